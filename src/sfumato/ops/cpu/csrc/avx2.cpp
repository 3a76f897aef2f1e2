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

#include "avx2.inc"

namespace {

constexpr int INT8_ROWS = 4;

// The codes of these kinds lose their offset here, and need no correction.
template <int KIND>
constexpr bool FOLDED = SHAPES[KIND].offset == 128;

// Adds the products of a block's vectors first..last - 1 with ROWS packed rows.  Pairs of products are
// summed in 16 bits, which holds those of as many vectors as RUN; codes of eight bits go as code - 128,
// whose sign the other factor takes over.
template <int KIND, int ROWS, int FIRST, int LAST>
inline void add_products(const uint8_t *codes, const uint8_t *rows, __m256i (&dots)[ROWS]) {
    constexpr int bits = FOLDED<KIND> ? 8 : SHAPES[KIND].bits;  // of what the 16 bits are for
    constexpr int RUN = bits == 4 ? 8 : bits <= 5 ? 4 : bits == 6 ? 2 : 1;
    static_assert((LAST - FIRST) % RUN == 0);
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int start = FIRST; start < LAST; start += RUN) {
        __m256i pairs[ROWS];
#pragma GCC unroll 8
        for (int v = start; v < start + RUN; v++) {
            __m256i weight = codes_of<KIND>(codes, v), size = weight;
            if (FOLDED<KIND>) {
                weight = _mm256_xor_si256(weight, _mm256_set1_epi8((char)128));
                size = _mm256_abs_epi8(weight);
            }
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++) {
                __m256i q = all32(rows + i * 32 + v * 4);
                if (FOLDED<KIND>) q = _mm256_sign_epi8(q, weight);
                const __m256i products = KIND == S8 ? _mm256_maddubs_epi16(q, weight)
                                                    : _mm256_maddubs_epi16(size, q);
                pairs[i] = v == start ? products : _mm256_add_epi16(pairs[i], products);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
            dots[i] = _mm256_add_epi32(dots[i], _mm256_madd_epi16(pairs[i], ones));
    }
}

}  // namespace

#include "avx2_tiles.inc"
#include "blocks.inc"
#include "pack.inc"
#include "pack_columns.inc"
#include "level.inc"
#include "online_softmax.inc"
#include "row_operations.inc"
#include "attention_f32.inc"

const Level AVX2_LEVEL = {
    {linear, experts}, update_softmax, gated, rms_norm, rotate, pack, dequantize, pack_columns,
    of_attention::FLOAT32};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
