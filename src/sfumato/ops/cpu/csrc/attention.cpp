// Attention of packed tokens over a prefix and themselves, in bfloat16 with float32 sums.
//
// Keys and values are first packed once per call into the pairs that vdpbf16ps multiplies; then
// blocks of query rows walk over them with a running maximum (online softmax), so that no more
// than ROWS x KEYS scores exist at a time.  A row's result depends on nothing but its own query:
// not on the other rows, nor on how they are cut into blocks or given to threads.
//
// Only for processors with AVX512-BF16; elsewhere the caller keeps to torch.

#include <cstdint>
#include <cstdlib>
#include <cmath>
#include <cstring>

#include "checks.h"
#include "sfumato.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#endif
#include <immintrin.h>

namespace {

constexpr int64_t ROWS = 96;   // query rows of a task
constexpr int64_t KEYS = 256;  // keys whose scores are held at a time; a multiple of 32
constexpr int TILE = 12;       // query rows in registers: 2 x 12 accumulators, 2 weights, 1 query

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// 16 numbers as float32, from either dtype.
__m512 load16(const void *from, int dtype, int64_t at) {
    if (dtype == SF_F32) return _mm512_loadu_ps(static_cast<const float *>(from) + at);
    const auto *half = static_cast<const uint16_t *>(from) + at;
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(half))), 16));
}

__m256i to_bf16(__m512 x) {
    const __m256bh rounded = _mm512_cvtneps_pbh(x);
    __m256i out;
    memcpy(&out, &rounded, sizeof out);
    return out;
}

// e^x for x <= 0, to about 2 ulp; 0 under -87; NaN stays NaN.
__m512 exp16(__m512 x) {
    const __mmask16 keep = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    const __m512 whole = _mm512_roundscale_ps(t, 0);
    __m512 r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_maskz_scalef_ps(keep, p, whole);
}

// out[row][0..31] (+)= a[row][0..2 pairs) . two panels of 16 columns; a is bf16, rows lda apart.
template <int MR>
void tile(const uint16_t *a, int64_t lda, const uint16_t *left, const uint16_t *right,
          int64_t pairs, float *out, int64_t ldo, bool add) {
    __m512 x[MR], y[MR];
    for (int i = 0; i < MR; i++) {
        x[i] = add ? _mm512_loadu_ps(out + i * ldo) : _mm512_setzero_ps();
        y[i] = add ? _mm512_loadu_ps(out + i * ldo + 16) : _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < pairs; k++) {
        const auto l = reinterpret_cast<__m512bh>(_mm512_loadu_si512(left + k * 32));
        const auto r = reinterpret_cast<__m512bh>(_mm512_loadu_si512(right + k * 32));
        for (int i = 0; i < MR; i++) {
            int pair;
            memcpy(&pair, a + i * lda + 2 * k, sizeof pair);
            const auto both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
            x[i] = _mm512_dpbf16_ps(x[i], l, both);
            y[i] = _mm512_dpbf16_ps(y[i], r, both);
        }
    }
    for (int i = 0; i < MR; i++) {
        _mm512_storeu_ps(out + i * ldo, x[i]);
        _mm512_storeu_ps(out + i * ldo + 16, y[i]);
    }
}

using Tile = void (*)(const uint16_t *, int64_t, const uint16_t *, const uint16_t *, int64_t,
                      float *, int64_t, bool);
constexpr Tile TILES[] = {nullptr, tile<1>, tile<2>,  tile<3>,  tile<4>, tile<5>, tile<6>,
                                  tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};

// out [rows][columns] (+)= a [rows][2 pairs] . panels, `step` bf16 numbers apart; columns % 32 == 0.
void product(const uint16_t *a, int64_t lda, int64_t rows, const uint16_t *panels, int64_t step,
             int64_t pairs, float *out, int64_t ldo, int64_t columns, bool add) {
    for (int64_t c = 0; c < columns; c += 32)
        for (int64_t row = 0; row < rows; row += TILE) {
            const int64_t count = rows - row < TILE ? rows - row : TILE;
            const uint16_t *panel = panels + c / 16 * step;
            TILES[count](a + row * lda, lda, panel, panel + step, pairs, out + row * ldo + c, ldo,
                         add);
        }
}

struct Call {
    int64_t tokens, heads, kv_heads, d, keys, padded;  // padded: keys rounded up to 32
    const void *q;
    int q_dtype;
    uint16_t *k_panels, *v_panels;  // [kv_heads][padded * d] each
    const int32_t *query_positions, *key_positions;
    int64_t window;
    void *out;
    int out_dtype;
};

// One key (a row of d numbers) into column `key % 16` of its panel [d / 2][16][2].
void pack_key(const void *from, int dtype, int64_t at, int64_t d, int64_t key, uint16_t *panels) {
    uint16_t *to = panels + key / 16 * (d * 16) + key % 16 * 2;
    uint16_t row[16];
    for (int64_t i = 0; i < d; i += 16) {
        const __m256i half = to_bf16(load16(from, dtype, at + i));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(row), half);
        for (int j = 0; j < 16; j += 2) memcpy(to + (i + j) / 2 * 32, row + j, 4);
    }
}

// One value (d columns) into place `key % 2` of pair `key / 2` of each panel [padded / 2][16][2].
void pack_value(const void *from, int dtype, int64_t at, int64_t d, int64_t key, int64_t padded,
                uint16_t *panels) {
    uint16_t row[16];
    for (int64_t i = 0; i < d; i += 16) {
        uint16_t *to = panels + i / 16 * (padded * 16) + key / 2 * 32 + key % 2;
        const __m256i half = to_bf16(load16(from, dtype, at + i));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(row), half);
        for (int j = 0; j < 16; j++) to[2 * j] = row[j];
    }
}

struct Scratch {
    uint16_t *q, *p;                   // [ROWS][d], [ROWS][KEYS]
    float *scores, *sums, *peak, *total;  // [ROWS][KEYS], [ROWS][d], [ROWS], [ROWS]
};

// Whether token `t` may not look at a key.
bool hidden(const Call &call, int64_t t, int64_t key) {
    const int64_t gap = (int64_t)call.query_positions[t] - call.key_positions[key];
    return gap < 0 || gap >= call.window;
}

// Scores of one row -> masses in bf16, with the row's running peak and total; sums fade with it.
void update(const Call &call, const Scratch &s, int64_t row, int64_t count) {
    float *scores = s.scores + row * KEYS;
    uint16_t *p = s.p + row * KEYS;
    __m512 best = _mm512_set1_ps(-INFINITY);
    __mmask16 odd = 0;  // maxima lose a NaN, whose row shall be none but NaN
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 in_range = count - i >= 16 ? 0xffff : (1u << (count - i)) - 1;
        const __m512 x = _mm512_loadu_ps(scores + i);
        best = _mm512_mask_max_ps(best, in_range, best, x);
        odd |= _mm512_mask_cmp_ps_mask(in_range, x, x, _CMP_UNORD_Q);
    }
    const float old = s.peak[row], here = odd ? NAN : _mm512_reduce_max_ps(best);
    const float peak = old > here ? old : here;
    if (peak == -INFINITY) {  // nothing seen yet, and nothing to see here
        memset(p, 0, KEYS * sizeof *p);
        return;
    }
    const __m512 wide = _mm512_set1_ps(peak);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < KEYS; i += 16) {
        const int64_t left = count - i;
        const __mmask16 in_range = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
        const __m512 mass =
            _mm512_maskz_mov_ps(in_range, exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + i), wide)));
        sum = _mm512_add_ps(sum, mass);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p + i), to_bf16(mass));
    }
    float fade = 0.0f;
    if (old != -INFINITY) {
        alignas(64) float lanes[16];
        _mm512_store_ps(lanes, exp16(_mm512_set1_ps(old - peak)));
        fade = lanes[0];
    }
    s.total[row] = s.total[row] * fade + _mm512_reduce_add_ps(sum);
    s.peak[row] = peak;
    if (fade != 1.0f)
        for (int64_t i = 0; i < call.d; i += 16) {
            float *at = s.sums + row * call.d + i;
            _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(fade)));
        }
}

// Query rows first..first + count - 1 of one key head: row r is token r % tokens of its group's
// head r / tokens.
void attend(const Call &call, const Scratch &s, int64_t kv, int64_t first, int64_t count) {
    const int64_t d = call.d, group = call.heads / call.kv_heads;
    const auto offset = [&](int64_t r) {
        const int64_t row = first + r;
        return (row % call.tokens * call.heads + kv * group + row / call.tokens) * d;
    };
    for (int64_t r = 0; r < count; r++) {
        for (int64_t i = 0; i < d; i += 16)
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(s.q + r * d + i),
                                to_bf16(load16(call.q, call.q_dtype, offset(r) + i)));
        s.peak[r] = -INFINITY;
        s.total[r] = 0.0f;
    }
    memset(s.sums, 0, count * d * sizeof(float));
    const uint16_t *keys = call.k_panels + kv * call.padded * d;
    const uint16_t *values = call.v_panels + kv * call.padded * d;
    for (int64_t at = 0; at < call.keys; at += KEYS) {
        const int64_t here = call.keys - at < KEYS ? call.keys - at : KEYS, wide = up(here, 32);
        product(s.q, d, count, keys + at * d, d * 16, d / 2, s.scores, KEYS, wide, false);
        for (int64_t r = 0; r < count; r++) {
            if (call.key_positions)
                for (int64_t k = 0; k < here; k++)
                    if (hidden(call, (first + r) % call.tokens, at + k))
                        s.scores[r * KEYS + k] = -INFINITY;
            update(call, s, r, here);
        }
        product(s.p, KEYS, count, values + at * 16, call.padded * 16, wide / 2, s.sums, d, d, true);
    }
    for (int64_t r = 0; r < count; r++) {
        // Who sees nothing gets zeros, as torch has it.
        const __m512 share = _mm512_set1_ps(s.total[r] == 0.0f ? 0.0f : 1.0f / s.total[r]);
        for (int64_t i = 0; i < d; i += 16) {
            const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(s.sums + r * d + i), share);
            if (call.out_dtype == SF_F32)
                _mm512_storeu_ps(static_cast<float *>(call.out) + offset(r) + i, x);
            else
                _mm256_storeu_si256(reinterpret_cast<__m256i *>(
                                        static_cast<uint16_t *>(call.out) + offset(r) + i),
                                    to_bf16(x));
        }
    }
}

}  // namespace
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

static bool rows_ok(const sf_rows &rows) {
    return dtype_ok(rows.dtype) && fits({rows.count}) && (rows.data || !rows.count);
}

extern "C" SF_API int sf_attention(const void *q, int q_dtype, int64_t tokens, int64_t heads,
                                   int64_t kv_heads, int64_t d, const sf_rows *keys,
                                   const sf_rows *values, int64_t segments,
                                   const int32_t *query_positions, const int32_t *key_positions,
                                   int64_t window, void *out, int out_dtype, int threads) {
    if (!sf_has_bf16()) return SF_UNSUPPORTED;
    if (!q || !keys || !values || !out || tokens < 0 || heads < 1 || kv_heads < 1 ||
        heads % kv_heads || d < 32 || d % 32 || segments < 1 || threads < 1 || window < 0 ||
        !dtype_ok(q_dtype) || !dtype_ok(out_dtype) || !query_positions != !key_positions ||
        !fits({tokens, heads, d}) || !fits({kv_heads, d}))
        return SF_BAD_ARGUMENT;
    int64_t total = 0;
    for (int64_t s = 0; s < segments; s++) {
        if (keys[s].count != values[s].count || !rows_ok(keys[s]) || !rows_ok(values[s]))
            return SF_BAD_ARGUMENT;
        total += keys[s].count;
        if (!fits({total, kv_heads, d})) return SF_BAD_ARGUMENT;
    }
    if (total < 1) return SF_BAD_ARGUMENT;
    if (!tokens) return SF_OK;
    const int64_t padded = up(total, 32), panel = kv_heads * padded * d;
    auto *panels = static_cast<uint16_t *>(calloc(2 * panel, sizeof(uint16_t)));
    if (!panels) return SF_NO_MEMORY;
    const Call call{tokens,         heads,  kv_heads, d,      total,
                    padded,         q,      q_dtype,  panels, panels + panel,
                    query_positions, key_positions, window, out, out_dtype};
    const int64_t rows = heads / kv_heads * tokens, blocks = (rows + ROWS - 1) / ROWS;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t kv = 0; kv < kv_heads * ((total + 63) / 64); kv++) {
            const int64_t head = kv % kv_heads, from = kv / kv_heads * 64;
            int64_t begin = 0;
            for (int64_t s = 0; s < segments; begin += keys[s++].count)
                for (int64_t i = 0; i < keys[s].count; i++) {
                    const int64_t key = begin + i;
                    if (key < from || key >= from + 64) continue;
                    pack_key(keys[s].data, keys[s].dtype,
                             head * keys[s].head_stride + i * keys[s].row_stride, d, key,
                             call.k_panels + head * padded * d);
                    pack_value(values[s].data, values[s].dtype,
                               head * values[s].head_stride + i * values[s].row_stride, d, key,
                               padded, call.v_panels + head * padded * d);
                }
        }
        const int64_t bytes = ROWS * (d + KEYS) * 2 + ROWS * (KEYS + d + 2) * 4;
        auto *memory = static_cast<uint8_t *>(aligned_alloc(64, up(bytes, 64)));
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
        Scratch s{};
        if (memory) {
            s.q = reinterpret_cast<uint16_t *>(memory);
            s.p = s.q + ROWS * d;
            s.scores = reinterpret_cast<float *>(s.p + ROWS * KEYS);
            s.sums = s.scores + ROWS * KEYS;
            s.peak = s.sums + ROWS * d;
            s.total = s.peak + ROWS;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < kv_heads * blocks; task++) {
            const int64_t first = task % blocks * ROWS;
            if (memory)
                attend(call, s, task / blocks, first, rows - first < ROWS ? rows - first : ROWS);
        }
        free(memory);
    }
    free(panels);
    return failed ? SF_NO_MEMORY : SF_OK;
}

#else  // no such processor

extern "C" int sf_attention(const void *, int, int64_t, int64_t, int64_t, int64_t, const sf_rows *,
                            const sf_rows *, int64_t, const int32_t *, const int32_t *, int64_t,
                            void *, int, int) {
    return SF_UNSUPPORTED;
}

#endif
