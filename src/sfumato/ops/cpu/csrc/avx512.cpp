// The level for AVX-512 with VNNI; products of bfloat16 where the processor has those.

#if defined(__x86_64__)

#include <cmath>
#include <cstring>

#include "level.h"
#include "sfumato.h"

// After the standard headers: nothing of theirs may be compiled for this instruction set alone.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,f16c,fma"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,f16c,fma")
#endif
#include <immintrin.h>

#include "blocks.h"

namespace {

// A tile keeps ROWS integer sums, ROWS float sums and the codes of one vector in 32 registers.
constexpr int INT8_ROWS = 10, BF16_ROWS = 12;

inline __m512i load(const uint8_t *at) { return _mm512_loadu_si512(at); }

inline __m512 load_halves(const uint16_t *at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
}

inline __m512i all32(const uint8_t *at) {
    int x;
    memcpy(&x, at, 4);
    return _mm512_set1_epi32(x);
}

// Vector v of a block, as unsigned bytes.  v is known when compiling, so this is one to four
// instructions.
template <int KIND>
inline __m512i codes_of(const uint8_t *block, int v) {
    constexpr int bits = SHAPES[KIND].bits;
    if (bits == 8) return load(block + 64 * v);
    __m512i x = load(block + 64 * (v % 4));
    if (v >= 4) x = _mm512_srli_epi16(x, 4);
    x = _mm512_and_si512(x, _mm512_set1_epi8(15));
    if (KIND == LUT4) {
        const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i *>(TABLE));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), x);
    }
    if (bits == 5) {
        const __mmask64 high = _mm512_test_epi8_mask(load(block + 256), _mm512_set1_epi8((char)(1 << v)));
        return _mm512_mask_add_epi8(x, high, x, _mm512_set1_epi8(16));
    }
    if (bits == 6) {
        const __m512i plane = load(block + 256 + 64 * (v / 4));
        const int shift = 2 * (v % 4) - 4;
        const __m512i high = shift < 0 ? _mm512_slli_epi16(plane, -shift) : _mm512_srli_epi16(plane, shift);
        return _mm512_or_si512(x, _mm512_and_si512(high, _mm512_set1_epi8(0x30)));
    }
    return x;
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
                    dots[i] = _mm512_dpbusd_epi32(dots[i], weight, all32(rows + i * 32 + v * 4));
            }
            const __m512 scale = load_halves(scales + 16 * h);
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; i++) {
                const __m512 both = _mm512_mul_ps(scale, _mm512_castsi512_ps(all32(behind + i * 4)));
                sums[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[i]), both, sums[i]);
            }
            if (shape.minimum) {
                const __m512 minimum = load_halves(scales + 16);
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

template <int ROWS>
void bf16_tile(const uint8_t *left, const uint8_t *right, int64_t blocks, const uint8_t *rows,
               float *const *out, int64_t left_column, int64_t right_column) {
    __m512 a[ROWS], b[ROWS];
    for (int i = 0; i < ROWS; i++) a[i] = b[i] = _mm512_setzero_ps();
    for (int64_t block = 0; block < blocks; block++) {
#pragma GCC unroll 4
        for (int j = 0; j < 16; j++) {
            const auto x = (__m512bh)load(left + j * 64), y = (__m512bh)load(right + j * 64);
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; i++) {
                const auto pair = (__m512bh)all32(rows + i * 64 + j * 4);
                a[i] = _mm512_dpbf16_ps(a[i], x, pair);
                b[i] = _mm512_dpbf16_ps(b[i], y, pair);
            }
        }
        for (int line = 0; line < 1024; line += 64) {
            _mm_prefetch(reinterpret_cast<const char *>(left + 4096 + line), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char *>(right + 4096 + line), _MM_HINT_T0);
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
        codes = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i *>(TABLE)), codes);
    const __m512i wide = _mm512_cvtepi8_epi32(_mm_sub_epi8(codes, _mm_set1_epi8((char)shape.offset)));
    const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_set1_ps(group.scale[h]));
    return shape.minimum ? _mm512_add_ps(value, _mm512_set1_ps(group.minimum)) : value;
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

// Two floats of each row as a pair of bfloat16, rounded to nearest even.
inline __m512i pair_of(__m512 low, __m512 high) {
    const __m512i one = _mm512_set1_epi32(1), half = _mm512_set1_epi32(0x7fff);
    __m512i a = _mm512_castps_si512(low), b = _mm512_castps_si512(high);
    a = _mm512_add_epi32(a, _mm512_add_epi32(half, _mm512_and_si512(_mm512_srli_epi32(a, 16), one)));
    b = _mm512_add_epi32(b, _mm512_add_epi32(half, _mm512_and_si512(_mm512_srli_epi32(b, 16), one)));
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(a, 16), b);
}

template <int KIND>
void widen_panel(const uint8_t *codes, const uint16_t *scales, int64_t blocks, uint8_t *out) {
    constexpr Shape shape = SHAPES[KIND];
    const __m512i byte = _mm512_set1_epi32(255);
    for (int64_t b = 0; b < blocks; b++) {
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++) {
            const __m512 scale = load_halves(scales + (shape.halves && v >= 4 ? 16 : 0));
            // scale . (code - offset) is one rounding of scale . code - scale . offset
            const __m512 first = shape.minimum ? load_halves(scales + 16)
                                               : _mm512_mul_ps(scale, _mm512_set1_ps(-shape.offset));
            const __m512i x = codes_of<KIND>(codes, v);
            __m512 values[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                const __m512i code = _mm512_and_si512(_mm512_srli_epi32(x, 8 * k), byte);
                values[k] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), scale, first);
            }
            _mm512_storeu_si512(out + 128 * v, pair_of(values[0], values[1]));
            _mm512_storeu_si512(out + 128 * v + 64, pair_of(values[2], values[3]));
        }
        codes += code_bytes(KIND);
        scales += scale_count(KIND);
        out += code_bytes(BF16);
    }
}

}  // namespace

#include "blocks.inc"
#include "pack.inc"
#include "level.inc"
#include "online_softmax.inc"
#include "row_operations.inc"

const Level AVX512_LEVEL = {linear,   experts, update_softmax, geglu,
                              rms_norm, rotate,  pack,           dequantize};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
