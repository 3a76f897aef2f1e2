// Products of bfloat16, and attention, for AVX-512 with BF16 (and, as for all AVX-512 here, with VNNI).

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

#include "panels.h"

#include "avx512.inc"
#include "attention_bf16.inc"

namespace {

constexpr int INT8_ROWS = 0, BF16_ROWS = 12;  // 24 sums in 32 registers
constexpr int64_t SHARE_BYTES = 384 << 10;

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

}  // namespace

#include "level.inc"

const Products AVX512_BF16_PRODUCTS = {linear, experts};
const Attention AVX512_BF16_ATTENTION = of_attention::BFLOAT16;

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
