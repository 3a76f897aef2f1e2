// Products for ARM with those of small matrices of bytes and of bfloat16 (FEAT_I8MM, FEAT_BF16).

#if defined(__aarch64__)

#include <cmath>
#include <cstring>

#include "level.h"
#include "sfumato.h"

// After the standard headers: nothing of theirs may be compiled for this instruction set alone.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod,i8mm,bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm+bf16")
#endif

#include "blocks.h"

#include "neon.inc"

namespace {

// Two rows of weights by two packed rows at a time, of eight columns; the last of an odd number of packed
// rows is multiplied twice.
template <int KIND, int ROWS, int FIRST, int LAST>
inline void add_products(const uint8_t *codes, const uint8_t *rows, Sums<ROWS> &dots) {
    constexpr int PAIRS = (ROWS + 1) / 2;
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
        int32x4_t sums[PAIRS][2];
        for (int i = 0; i < PAIRS; i++) sums[i][0] = sums[i][1] = vdupq_n_s32(0);
#pragma GCC unroll 4
        for (int v = FIRST; v < LAST; v += 2) {
            const int32x4_t a = vreinterpretq_s32_s8(codes_of<KIND>(codes + 16 * j, v));
            const int32x4_t b = vreinterpretq_s32_s8(codes_of<KIND>(codes + 16 * j, v + 1));
            const int8x16_t first = vreinterpretq_s8_s32(vzip1q_s32(a, b));
            const int8x16_t second = vreinterpretq_s8_s32(vzip2q_s32(a, b));
#pragma GCC unroll 4
            for (int i = 0; i < PAIRS; i++) {
                const int other = 2 * i + 1 < ROWS ? 2 * i + 1 : 2 * i;
                const int8x16_t q = vreinterpretq_s8_u8(vcombine_u8(
                    vld1_u8(rows + 2 * i * 32 + v * 4), vld1_u8(rows + other * 32 + v * 4)));
                sums[i][0] = vmmlaq_s32(sums[i][0], first, q);
                sums[i][1] = vmmlaq_s32(sums[i][1], second, q);
            }
        }
        for (int i = 0; i < ROWS; i++) {
            const int32x4_t *both = sums[i / 2];
            dots[i][j] = vaddq_s32(dots[i][j], i % 2 ? vuzp2q_s32(both[0], both[1])
                                                     : vuzp1q_s32(both[0], both[1]));
        }
    }
}

template <int ROWS>
void bf16_tile(const uint8_t *left, const uint8_t *right, int64_t blocks, const uint8_t *rows,
               float *const *out, int64_t left_column, int64_t right_column) {
    for (int which = 0; which < 2; which++) {
        const uint8_t *panel = which ? right : left, *row = rows;
        float32x4_t sums[ROWS][4];
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < 4; j++) sums[i][j] = vdupq_n_f32(0.0f);
        for (int64_t b = 0; b < blocks; b++, panel += code_bytes(BF16), row += ROWS * 64)
            for (int k = 0; k < 16; k++) {
                bfloat16x8_t pairs[4];
                for (int j = 0; j < 4; j++)
                    pairs[j] = vreinterpretq_bf16_u8(vld1q_u8(panel + k * 64 + 16 * j));
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++) {
                    const auto pair = vreinterpretq_bf16_s32(all32(row + i * 64 + k * 4));
                    for (int j = 0; j < 4; j++) sums[i][j] = vbfdotq_f32(sums[i][j], pairs[j], pair);
                }
            }
        const int64_t column = which ? right_column : left_column;
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < 4; j++) vst1q_f32(out[i] + column + 4 * j, sums[i][j]);
    }
}

}  // namespace

#include "level.inc"

const Products I8MM_PRODUCTS = {linear, experts};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
