// The level for AVX2 with FMA and F16C.

#if defined(__x86_64__)

#include <cmath>
#include <cstring>

#include "level.h"
#include "sfumato.h"

// After the standard headers: nothing of theirs may be compiled for this instruction set alone.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>

#include "blocks.h"

namespace {

constexpr int INT8_ROWS = 4, BF16_ROWS = 3;

inline __m256i load(const uint8_t *at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
}

inline __m256 load_halves(const uint16_t *at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
}

inline __m256i all32(const uint8_t *at) {
    int x;
    memcpy(&x, at, 4);
    return _mm256_set1_epi32(x);
}

// Rows 8 side .. 8 side + 7 of vector v of a block, as unsigned bytes.
template <int KIND>
inline __m256i codes_of(const uint8_t *block, int v, int side) {
    constexpr int bits = SHAPES[KIND].bits;
    block += 32 * side;
    if (bits == 8) return load(block + 64 * v);
    __m256i x = load(block + 64 * (v % 4));
    if (v >= 4) x = _mm256_srli_epi16(x, 4);
    x = _mm256_and_si256(x, _mm256_set1_epi8(15));
    if (KIND == LUT4) {
        const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i *>(TABLE));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), x);
    }
    if (bits == 5) {
        const __m256i bit = _mm256_set1_epi8((char)(1 << v));
        const __m256i high = _mm256_cmpeq_epi8(_mm256_and_si256(load(block + 256), bit), bit);
        return _mm256_or_si256(x, _mm256_and_si256(high, _mm256_set1_epi8(16)));
    }
    if (bits == 6) {
        const __m256i plane = load(block + 256 + 64 * (v / 4));
        const int shift = 2 * (v % 4) - 4;
        const __m256i high =
            shift < 0 ? _mm256_slli_epi16(plane, -shift) : _mm256_srli_epi16(plane, shift);
        return _mm256_or_si256(x, _mm256_and_si256(high, _mm256_set1_epi8(0x30)));
    }
    return x;
}

// Sums of four products of bytes each.  Pairs are summed in 16 bits first, which codes of six bits
// cannot overflow; those of eight go as code - 128, whose sign the other factor takes over.
template <int KIND>
inline __m256i dot4(__m256i codes, __m256i q) {
    if (SHAPES[KIND].offset == 128) {
        codes = _mm256_xor_si256(codes, _mm256_set1_epi8((char)128));
        q = _mm256_sign_epi8(q, codes);
        codes = _mm256_abs_epi8(codes);
    }
    return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, q), _mm256_set1_epi16(1));
}

template <int KIND, int ROWS>
void int8_tile(const uint8_t *codes, const uint16_t *scales, int64_t blocks, const uint8_t *rows,
               float *const *out, int64_t column) {
    constexpr Shape shape = SHAPES[KIND];
    constexpr int halves = shape.halves ? 2 : 1;
    constexpr bool folded = shape.offset == 128;  // dot4 has taken the offset off already
    __m256 sums[2][ROWS];
    for (int i = 0; i < ROWS; i++) sums[0][i] = sums[1][i] = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *behind = rows + ROWS * 32;
        for (int side = 0; side < 2; side++)
            for (int h = 0; h < halves; h++) {
                const uint8_t *corrections = behind + (1 + h) * ROWS * 4;
                __m256i dots[ROWS];
                for (int i = 0; i < ROWS; i++)
                    dots[i] = shape.minimum || folded ? _mm256_setzero_si256()
                                                      : all32(corrections + i * 4);
#pragma GCC unroll 8
                for (int v = h * 8 / halves; v < (h + 1) * 8 / halves; v++) {
                    const __m256i weight = codes_of<KIND>(codes, v, side);
                    for (int i = 0; i < ROWS; i++)
                        dots[i] = _mm256_add_epi32(
                            dots[i], dot4<KIND>(weight, all32(rows + i * 32 + v * 4)));
                }
                const __m256 scale = load_halves(scales + 16 * h + 8 * side);
                for (int i = 0; i < ROWS; i++) {
                    const __m256 both =
                        _mm256_mul_ps(scale, _mm256_castsi256_ps(all32(behind + i * 4)));
                    sums[side][i] =
                        _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[i]), both, sums[side][i]);
                    if (shape.minimum)
                        sums[side][i] = _mm256_fmadd_ps(
                            load_halves(scales + 16 + 8 * side),
                            _mm256_castsi256_ps(all32(corrections + i * 4)), sums[side][i]);
                }
            }
        codes += code_bytes(KIND);
        scales += scale_count(KIND);
        rows += ROWS * (32 + 4 + 4 * halves);
    }
    for (int i = 0; i < ROWS; i++)
        for (int side = 0; side < 2; side++)
            _mm256_storeu_ps(out[i] + column + 8 * side, sums[side][i]);
}

template <int ROWS>
void bf16_tile(const uint8_t *left, const uint8_t *right, int64_t blocks, const uint8_t *rows,
               float *const *out, int64_t left_column, int64_t right_column) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000);
    for (int side = 0; side < 4; side++) {
        const uint8_t *panel = (side < 2 ? left : right) + side % 2 * 32, *row = rows;
        __m256 sums[ROWS];
        for (int i = 0; i < ROWS; i++) sums[i] = _mm256_setzero_ps();
        for (int64_t b = 0; b < blocks; b++, panel += code_bytes(BF16), row += ROWS * 64)
            for (int j = 0; j < 16; j++) {
                const __m256i pairs = load(panel + j * 64);
                const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
                const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, high));
                for (int i = 0; i < ROWS; i++) {
                    const __m256i x = all32(row + i * 64 + j * 4);
                    sums[i] = _mm256_fmadd_ps(
                        even, _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), sums[i]);
                    sums[i] = _mm256_fmadd_ps(
                        odd, _mm256_castsi256_ps(_mm256_and_si256(x, high)), sums[i]);
                }
            }
        const int64_t column = (side < 2 ? left_column : right_column) + side % 2 * 8;
        for (int i = 0; i < ROWS; i++) _mm256_storeu_ps(out[i] + column, sums[i]);
    }
}

template <int TYPE>
void values_of(const Group &group, float *out) {
    plain_values<TYPE>(group, out);
}

template <int TYPE>
void halves_of(const Group &group, uint16_t *out) {
    plain_halves<TYPE>(group, out);
}

template <int KIND>
void widen_panel(const uint8_t *codes, const uint16_t *scales, int64_t blocks, uint8_t *out) {
    widen_plainly<KIND>(codes, scales, blocks, out);
}

}  // namespace

#include "blocks.inc"
#include "pack.inc"
#include "level.inc"
#include "online_softmax.inc"
#include "row_operations.inc"

const Level AVX2_LEVEL = {linear,   experts, update_softmax, geglu,
                              rms_norm, rotate,  pack,           dequantize};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
