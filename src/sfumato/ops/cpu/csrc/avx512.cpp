// The level for AVX-512 with VNNI.

#if defined(__x86_64__)

#include <cmath>
#include <cstring>

#include "level.h"
#include "sfumato.h"

// After the standard headers: nothing of theirs may be compiled for this instruction set alone.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")
#endif
#include <immintrin.h>

#include "blocks.h"

#include "avx512.inc"

namespace {

// A tile keeps ROWS integer sums, ROWS float sums and the codes of one vector in 32 registers.
constexpr int INT8_ROWS = 10, BF16_ROWS = 10;
constexpr int64_t SHARE_BYTES = 384 << 10;

// Adds the sums of four products of bytes each: the codes have no sign, or else the other factor.
template <int KIND>
inline __m512i dot4(__m512i sums, __m512i codes, __m512i q) {
    return KIND == S8 ? _mm512_dpbusd_epi32(sums, q, codes) : _mm512_dpbusd_epi32(sums, codes, q);
}

template <int KIND, int ROWS>
void int8_tile(const uint8_t *codes, const uint16_t *scales, int64_t blocks, const uint8_t *rows,
               float *const *out, int64_t column) {
    constexpr Shape shape = SHAPES[KIND];
    constexpr int halves = shape.halves ? 2 : 1;
    __m512 sums[ROWS];
    for (int i = 0; i < ROWS; i++) sums[i] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *behind = rows + ROWS * 32;
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++) {
            const uint8_t *corrections = behind + (1 + h) * ROWS * 4;
            __m512i dots[ROWS];
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; i++)
                dots[i] = shape.minimum ? _mm512_setzero_si512() : all32(corrections + i * 4);
#pragma GCC unroll 8
            for (int v = h * 8 / halves; v < (h + 1) * 8 / halves; v++) {
                const __m512i weight = codes_of<KIND>(codes, v);
#pragma GCC unroll 16
                for (int i = 0; i < ROWS; i++)
                    dots[i] = dot4<KIND>(dots[i], weight, all32(rows + i * 32 + v * 4));
            }
            const __m512 scale = scale_of<KIND>(scales, h);
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; i++) {
                const __m512 both = _mm512_mul_ps(scale, _mm512_castsi512_ps(all32(behind + i * 4)));
                sums[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[i]), both, sums[i]);
            }
            if (shape.minimum) {
                const __m512 minimum = minimum_of<KIND>(scales, h);
#pragma GCC unroll 16
                for (int i = 0; i < ROWS; i++)
                    sums[i] = _mm512_fmadd_ps(
                        minimum, _mm512_castsi512_ps(all32(corrections + i * 4)), sums[i]);
            }
        }
        // Weights come from memory in one long stream: asking a few blocks ahead hides its delay.
        for (int64_t line = 0; line < code_bytes(KIND); line += 64)
            _mm_prefetch(reinterpret_cast<const char *>(codes + 6 * code_bytes(KIND) + line), _MM_HINT_T0);
        codes += code_bytes(KIND);
        scales += scale_count(KIND);
        rows += ROWS * (32 + 4 + 4 * halves);
    }
    for (int i = 0; i < ROWS; i++) _mm512_storeu_ps(out[i] + column, sums[i]);
}

// Without the processor's own products of bfloat16: its values are the upper halves of floats.
template <int ROWS>
void bf16_tile(const uint8_t *left, const uint8_t *right, int64_t blocks, const uint8_t *rows,
               float *const *out, int64_t left_column, int64_t right_column) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    __m512 a[ROWS], b[ROWS];
    for (int i = 0; i < ROWS; i++) a[i] = b[i] = _mm512_setzero_ps();
    for (int64_t block = 0; block < blocks; block++) {
        for (int j = 0; j < 16; j++) {
            const __m512i x = load(left + j * 64), y = load(right + j * 64);
            const __m512 x0 = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
            const __m512 y0 = _mm512_castsi512_ps(_mm512_slli_epi32(y, 16));
            const __m512 x1 = _mm512_castsi512_ps(_mm512_and_si512(x, upper));
            const __m512 y1 = _mm512_castsi512_ps(_mm512_and_si512(y, upper));
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; i++) {
                const __m512i pair = all32(rows + i * 64 + j * 4);
                const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
                const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(pair, upper));
                a[i] = _mm512_fmadd_ps(x1, second, _mm512_fmadd_ps(x0, first, a[i]));
                b[i] = _mm512_fmadd_ps(y1, second, _mm512_fmadd_ps(y0, first, b[i]));
            }
        }
        left += code_bytes(BF16);
        right += code_bytes(BF16);
        rows += ROWS * 64;
    }
    for (int i = 0; i < ROWS; i++) {
        _mm512_storeu_ps(out[i] + left_column, a[i]);
        _mm512_storeu_ps(out[i] + right_column, b[i]);
    }
}

// Sixteen values of a group of 32, the first or the second half.
template <int TYPE>
inline __m512 half_values(const Group &group, int h) {
    constexpr Shape shape = SHAPE_OF<TYPE>;
    __m128i codes = (__m128i)group.codes[h];
    if (LOOKED_UP<TYPE>)
        codes = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i *>(TABLE_OF<TYPE>)), codes);
    const __m512i wide = _mm512_cvtepi8_epi32(_mm_sub_epi8(codes, _mm_set1_epi8((char)shape.offset)));
    const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_set1_ps(group.scale[h]));
    return shape.minimum ? _mm512_add_ps(value, _mm512_set1_ps(group.minimum[h])) : value;
}

template <int TYPE>
void values_of(const Group &group, float *out) {
    for (int h = 0; h < 2; h++) _mm512_storeu_ps(out + 16 * h, half_values<TYPE>(group, h));
}

// Rounded to bfloat16 in the upper halves, to nearest even; NaN stays NaN.
inline __m512i rounded(__m512 value) {
    const __m512i u = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(up, nan, u, _mm512_set1_epi32(0x400000));
}

template <int TYPE>
void halves_of(const Group &group, uint16_t *out) {
    alignas(64) static constexpr uint16_t UPPER[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                       23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                       45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i low = rounded(half_values<TYPE>(group, 0)), high = rounded(half_values<TYPE>(group, 1));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(low, _mm512_load_si512(UPPER), high));
}

}  // namespace

#include "blocks.inc"
#include "pack.inc"
#include "pack_columns.inc"
#include "level.inc"
#include "online_softmax.inc"
#include "row_operations.inc"

namespace {

using Floats = __m512;
constexpr int FLOATS = 16, ATTENTION_ROWS = 12;  // enough sums to hide the delay of two units

inline Floats floats_at(const float *at) { return _mm512_loadu_ps(at); }
inline void put_floats(float *at, Floats x) { _mm512_storeu_ps(at, x); }
inline Floats each_float(float x) { return _mm512_set1_ps(x); }
inline Floats add_products_of(Floats a, Floats b, Floats sums) { return _mm512_fmadd_ps(a, b, sums); }

}  // namespace

#include "attention_f32.inc"

const Level AVX512_LEVEL = {
    {linear, experts}, update_softmax, gated, rms_norm, rotate, pack, dequantize, pack_columns,
    of_attention::FLOAT32};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
