// The level for AVX-VNNI: AVX2, FMA, F16C and products of bytes summed in 32 bits.

#if defined(__x86_64__)

#include <cmath>
#include <cstring>

#include "level.h"
#include "sfumato.h"

// After the standard headers: nothing of theirs may be compiled for this instruction set alone.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#include <immintrin.h>

#include "blocks.h"

#include "avx2.inc"

namespace {

constexpr int INT8_ROWS = 6;

// The codes keep their offset; it is in the corrections.
template <int KIND>
constexpr bool FOLDED = false;

// Adds the products of a block's vectors FIRST..LAST - 1 with ROWS packed rows.
template <int KIND, int ROWS, int FIRST, int LAST>
inline void add_products(const uint8_t *codes, const uint8_t *rows, __m256i (&dots)[ROWS]) {
#pragma GCC unroll 8
    for (int v = FIRST; v < LAST; v++) {
        const __m256i weight = codes_of<KIND>(codes, v);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            const __m256i q = all32(rows + i * 32 + v * 4);
            // The codes have no sign, or else the packed rows.
            dots[i] = KIND == S8 ? _mm256_dpbusd_avx_epi32(dots[i], q, weight)
                                 : _mm256_dpbusd_avx_epi32(dots[i], weight, q);
        }
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

const Level AVX_VNNI_LEVEL = {
    {linear, experts}, update_softmax, gated, rms_norm, rotate, pack, dequantize, pack_columns,
    of_attention::FLOAT32};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
