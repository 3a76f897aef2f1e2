// The level for ARM with products of bytes summed in 32 bits (FEAT_DotProd).

#if defined(__aarch64__)

#include <cmath>
#include <cstring>

#include "level.h"
#include "sfumato.h"

// After the standard headers: nothing of theirs may be compiled for this instruction set alone.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#include "blocks.h"

#include "neon.inc"

namespace {

template <int KIND, int ROWS, int FIRST, int LAST>
inline void add_products(const uint8_t *codes, const uint8_t *rows, Sums<ROWS> &dots) {
#pragma GCC unroll 2
    for (int v = FIRST; v < LAST; v += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            int8x16_t weight[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) weight[k] = codes_of<KIND>(codes + 16 * j, v + k);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++) {
                const int8x16_t q = vreinterpretq_s8_u8(vld1q_u8(rows + i * 32 + v * 4));
                dots[i][j] = vdotq_laneq_s32(dots[i][j], weight[0], q, 0);
                dots[i][j] = vdotq_laneq_s32(dots[i][j], weight[1], q, 1);
                dots[i][j] = vdotq_laneq_s32(dots[i][j], weight[2], q, 2);
                dots[i][j] = vdotq_laneq_s32(dots[i][j], weight[3], q, 3);
            }
        }
}

// Values of bfloat16 are the upper halves of floats.
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
                float32x4_t even[4], odd[4];
                for (int j = 0; j < 4; j++) {
                    const uint32x4_t pairs = vreinterpretq_u32_u8(vld1q_u8(panel + k * 64 + 16 * j));
                    even[j] = shift_up(pairs);
                    odd[j] = upper(pairs);
                }
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++) {
                    uint32_t pair;
                    memcpy(&pair, row + i * 64 + k * 4, 4);
                    const float first = float_of(pair << 16), second = float_of(pair & 0xffff0000);
                    for (int j = 0; j < 4; j++)
                        sums[i][j] = vfmaq_n_f32(vfmaq_n_f32(sums[i][j], even[j], first), odd[j], second);
                }
            }
        const int64_t column = which ? right_column : left_column;
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < 4; j++) vst1q_f32(out[i] + column + 4 * j, sums[i][j]);
    }
}

}  // namespace

#include "blocks.inc"
#include "pack.inc"
#include "level.inc"
#include "pack_columns.inc"
#include "online_softmax.inc"
#include "row_operations.inc"
#include "attention_f32.inc"

const Level NEON_LEVEL = {
    {linear, experts}, update_softmax, gated, rms_norm, rotate, pack, dequantize, pack_columns,
    of_attention::FLOAT32};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
