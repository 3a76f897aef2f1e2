// Attention of packed tokens over a prefix and themselves, in bfloat16 with float32 sums.
//
// Keys and values are packed once per call into the pairs that vdpbf16ps multiplies, those of a prefix
// that several rows share once for all of these, WINDOW keys at a time; blocks of queries walk over
// them with a running maximum (online softmax), so that no more than ROWS x KEYS scores exist at a
// time, and keep maximum, total and sums from one window to the next.  A
// query's result depends on nothing but itself and its keys, in blocks of KEYS from the first one on:
// not on other queries or rows, nor on what is shared, cut into blocks or given to threads.
//
// Only for processors with AVX512-BF16; elsewhere the caller keeps to torch.

#include <cstdint>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "checks.h"
#include "sfumato.h"
#include "workspace.h"

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

constexpr int64_t ROWS = 96;   // queries of a task
constexpr int64_t KEYS = 256;  // keys whose scores are held at a time; a multiple of 32
constexpr int64_t WINDOW = 8192;  // keys of a row that are packed at a time; a multiple of KEYS
constexpr int64_t MOST_SEGMENTS = 1 << 20;

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
int64_t between(int64_t n, int64_t most) { return n < 0 ? 0 : n < most ? n : most; }
int64_t parts(int64_t n, int64_t of) { return (n + of - 1) / of; }

#include "attention_panels.inc"

struct Call {
    int64_t heads, kv_heads, d, window;
    const void *q;
    int q_dtype;
    void *out;
    int out_dtype;
    bool masked;
    int64_t shared, split;  // shared keys, and how many of them no row's panels repeat
    const int32_t *shared_positions;
};

// The keys from..to - 1 of every row, whose panels exist: of the shared ones those before `split`, and
// in a row's panels the others.
struct Window {
    int64_t from, to;
    bool last;
};

// One row: its panels begin with the shared keys from `split` on.
struct Row {
    int64_t first, tokens;  // of the queries
    int64_t own;            // keys
    int64_t state;          // where the state of its queries begins, in queries
    const sf_rows *keys, *values;
    int64_t segments;
    const int32_t *query_positions, *own_positions;
    Panels panels;
};

// Of some queries: sums [queries][d], and [queries] of the others.
struct State {
    float *sums, *peak, *total;

    State at(int64_t query, int64_t d) const { return {sums + query * d, peak + query, total + query}; }
};

struct Scratch {
    uint16_t *q, *p;  // [ROWS][d], [ROWS][KEYS]
    float *scores;    // [ROWS][KEYS]
};

// No score for the keys that a token at position `query` may not look at.
void blind(float *scores, const int32_t *positions, int64_t count, int64_t query, int64_t window) {
    // Hidden are positions after the query's, and those up to this one; any is over INT32_MIN - 1.
    const int64_t low = window > (int64_t)1 << 33 ? INT64_MIN : query - window;
    const __m512i last = _mm512_set1_epi32((int32_t)query);
    const __m512i old = _mm512_set1_epi32((int32_t)(low < INT32_MIN ? INT32_MIN : low));
    for (int64_t k = 0; k < count; k += 16) {
        const __mmask16 here = count - k >= 16 ? 0xffff : (1u << (count - k)) - 1;
        const __m512i at = _mm512_maskz_loadu_epi32(here, positions + k);
        __mmask16 hidden = _mm512_mask_cmpgt_epi32_mask(here, at, last);
        if (low >= INT32_MIN) hidden |= _mm512_mask_cmple_epi32_mask(here, at, old);
        _mm512_mask_storeu_ps(scores + k, hidden, _mm512_set1_ps(-INFINITY));
    }
}

// Scores of one query -> masses in bf16, with its running peak and total; sums fade with it.
void update(const Call &call, const Scratch &s, const State &state, int64_t row, int64_t count) {
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
    const float old = state.peak[row], here = odd ? NAN : _mm512_reduce_max_ps(best);
    const float peak = old > here ? old : here;
    if (peak == -INFINITY) {  // nothing seen yet, and nothing to see here
        memset(p, 0, KEYS * sizeof *p);
        return;
    }
    const __m512 wide = _mm512_set1_ps(peak);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < up(count, 32); i += 16) {  // what is multiplied: whole panels of 32
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
    state.total[row] = state.total[row] * fade + _mm512_reduce_add_ps(sum);
    state.peak[row] = peak;
    if (fade != 1.0f)
        for (int64_t i = 0; i < call.d; i += 16) {
            float *at = state.sums + row * call.d + i;
            _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(fade)));
        }
}

// Queries first..first + count - 1 of one key head, and the keys of a window: query r is token
// r % tokens of its group's head r / tokens.
void attend(const Call &call, const Panels &shared, const Row &row, const Scratch &s, const State &state,
            const Window &window, int64_t kv, int64_t first, int64_t count) {
    const int64_t d = call.d, group = call.heads / call.kv_heads;
    const auto offset = [&](int64_t r) {
        const int64_t query = first + r;
        const int64_t token = row.first + query % row.tokens;
        return (token * call.heads + kv * group + query / row.tokens) * d;
    };
    for (int64_t r = 0; r < count; r++) {
        for (int64_t i = 0; i < d; i += 16)
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(s.q + r * d + i),
                                to_bf16(load16(call.q, call.q_dtype, offset(r) + i)));
        if (window.from) continue;
        state.peak[r] = -INFINITY;
        state.total[r] = 0.0f;
    }
    if (!window.from) memset(state.sums, 0, count * d * sizeof(float));
    const int64_t ours = kv * shared.padded * d, own = kv * row.panels.padded * d;
    const int64_t total = call.shared + row.own, end = total < window.to ? total : window.to;
    // The key that begins the row's panels.
    const int64_t begin = window.from > call.split ? window.from : call.split;
    for (int64_t at = window.from; at < end; at += KEYS) {
        // Of these keys the first `near` are in the shared panels, and the rest in the row's.
        const int64_t here = end - at < KEYS ? end - at : KEYS;
        const int64_t near = between(call.split - at, KEYS), rest = up(here, 32) - near;
        const int64_t place = rest ? at + near - begin : 0, passed = at - window.from;
        product(s.q, d, count, shared.keys + ours + passed * d, d * 16, d / 2, s.scores, KEYS, near,
                false);
        product(s.q, d, count, row.panels.keys + own + place * d, d * 16, d / 2, s.scores + near,
                KEYS, rest, false);
        const int64_t before = between(call.shared - at, here);  // of these keys, those that are shared
        for (int64_t r = 0; r < count; r++) {
            if (call.masked) {
                const int64_t query = row.query_positions[(first + r) % row.tokens];
                float *scores = s.scores + r * KEYS;
                if (before) blind(scores, call.shared_positions + at, before, query, call.window);
                if (before < here)
                    blind(scores + before, row.own_positions + (at + before - call.shared),
                          here - before, query, call.window);
            }
            update(call, s, state, r, here);
        }
        product(s.p, KEYS, count, shared.values + ours + passed * 16, shared.padded * 16, near / 2,
                state.sums, d, near ? d : 0, true);
        product(s.p + near, KEYS, count, row.panels.values + own + place * 16, row.panels.padded * 16,
                rest / 2, state.sums, d, rest ? d : 0, true);
    }
    for (int64_t r = 0; r < count && window.last; r++) {
        // Who sees nothing gets zeros, as torch has it.
        const __m512 share = _mm512_set1_ps(state.total[r] == 0.0f ? 0.0f : 1.0f / state.total[r]);
        for (int64_t i = 0; i < d; i += 16) {
            const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(state.sums + r * d + i), share);
            if (call.out_dtype == SF_F32)
                _mm512_storeu_ps(static_cast<float *>(call.out) + offset(r) + i, x);
            else
                _mm256_storeu_si256(reinterpret_cast<__m256i *>(
                                        static_cast<uint16_t *>(call.out) + offset(r) + i),
                                    to_bf16(x));
        }
    }
}

// Keys of one task of packing, of one head of a row or of what is shared.
constexpr int64_t PACKED = 64;

// A task by its number, among those of rows first..last - 1: the row, and the number within it.
// `count` gives how many a row has.
template <typename Count>
bool find(const std::vector<Row> &rows, int64_t first, int64_t last, int64_t task, Count count,
          int64_t *row, int64_t *within) {
    for (*row = first, *within = task; *row < last; *within -= count(rows[(*row)++]))
        if (*within < count(rows[*row])) return true;
    return false;
}

template <typename Count>
int64_t sum(const std::vector<Row> &rows, int64_t first, int64_t last, Count count) {
    int64_t total = 0;
    for (int64_t i = first; i < last; i++) total += count(rows[i]);
    return total;
}

// Where a task's queries keep their state: of a single window in the thread's own memory, `ours`.
State state_of(const Row &row, const State &all, const State &ours, int64_t kv, int64_t queries,
               int64_t from, int64_t d) {
    return all.sums ? all.at(row.state + kv * queries + from, d) : ours;
}

// Rows first..last - 1, whose panels lie side by side. All threads come here.
void attend_rows(const Call &call, const sf_shared_call &c, const Panels &shared,
                 const std::vector<Row> &rows, int64_t first, int64_t last, const Window &window,
                 const Scratch &s, const State &all, const State &ours) {
    const int64_t group = call.heads / call.kv_heads;
    const int64_t begin = window.from > call.split ? window.from : call.split;
    const auto end = [&](const Row &row) {  // of the keys in the row's panels
        const int64_t total = up(call.shared + row.own, 32);
        return total < window.to ? total : window.to;
    };
    const auto to_pack = [&](const Row &row) {
        return end(row) > begin ? call.kv_heads * parts(end(row) - begin, PACKED) : 0;
    };
    const auto to_attend = [&](const Row &row) { return call.kv_heads * parts(group * row.tokens, ROWS); };
    const int64_t packing = sum(rows, first, last, to_pack);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < packing; task++) {
        int64_t i, within;
        if (!find(rows, first, last, task, to_pack, &i, &within)) continue;
        const Row &row = rows[i];
        const int64_t from = begin + within / call.kv_heads * PACKED, left = end(row) - from;
        const Segments prefix[2] = {{c.keys, c.shared, call.split}, {c.values, c.shared, call.split}};
        const Segments own[2] = {{row.keys, row.segments, 0}, {row.values, row.segments, 0}};
        // Keys are numbered from `split` on, for the shared ones before it are left out.
        pack(prefix, own, within % call.kv_heads, call.d, from - call.split,
             from - call.split + (left < PACKED ? left : PACKED), begin - call.split, row.panels);
    }
    const int64_t attending = sum(rows, first, last, to_attend);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < attending; task++) {
        int64_t i, within;
        if (!s.q || !find(rows, first, last, task, to_attend, &i, &within)) continue;
        const int64_t queries = group * rows[i].tokens, blocks = parts(queries, ROWS);
        const int64_t kv = within / blocks, from = within % blocks * ROWS;
        attend(call, shared, rows[i], s, state_of(rows[i], all, ours, kv, queries, from, call.d),
               window, kv, from, queries - from < ROWS ? queries - from : ROWS);
    }
}

}  // namespace
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace {

constexpr int64_t TOGETHER = 2 << 20;  // numbers in the panels of rows that are packed at a time

bool segments_ok(const sf_rows *keys, const sf_rows *values, int64_t segments, int64_t *count) {
    *count = 0;
    for (int64_t s = 0; s < segments; s++) {
        for (const sf_rows &rows : {keys[s], values[s]})
            if (!dtype_ok(rows.dtype) || !fits({rows.count}) || (!rows.data && rows.count)) return false;
        if (keys[s].count != values[s].count) return false;
        *count += keys[s].count;
        if (!fits({*count})) return false;
    }
    return true;
}

// The rows of a call without their panels; SF_OK, or what is wrong with it.
int read_rows(const sf_shared_call &c, int64_t shared, std::vector<Row> &rows) {
    const sf_rows *keys = c.keys + c.shared, *values = c.values + c.shared;
    int64_t queries = 0, own = 0;
    for (int64_t i = 0; i < c.rows; i++) {
        Row row{};
        row.first = queries, row.tokens = c.queries[i], row.segments = c.segments[i];
        row.keys = keys, row.values = values;
        if (row.tokens < 0 || row.segments < 0 || row.segments > MOST_SEGMENTS ||
            !segments_ok(keys, values, row.segments, &row.own) || shared + row.own < 1 ||
            !fits({shared + row.own, c.kv_heads, c.d}))
            return SF_BAD_ARGUMENT;
        row.query_positions = c.query_positions ? c.query_positions + queries : nullptr;
        row.own_positions = c.key_positions ? c.key_positions + shared + own : nullptr;
        queries += row.tokens, own += row.own;
        keys += row.segments, values += row.segments;
        if (!fits({queries, c.heads, c.d}) || !fits({own})) return SF_BAD_ARGUMENT;
        rows.push_back(row);
    }
    return SF_OK;
}

Panels panels_at(uint16_t *memory, int64_t padded, int64_t numbers) {
    return {padded, memory, memory + padded * numbers};
}

State state_at(void *memory, int64_t queries, int64_t d) {
    auto *sums = static_cast<float *>(memory);
    return {sums, sums + queries * d, sums + queries * (d + 1)};
}

// The rows that are packed at a time, by their ends; sets the places of their panels in `numbers`.
std::vector<int64_t> groups_of(std::vector<Row> &rows, int64_t before, int64_t each, int64_t *numbers,
                               std::vector<int64_t> &places) {
    std::vector<int64_t> ends;
    int64_t used = 0;
    for (size_t i = 0; i < rows.size(); i++) {
        const int64_t padded = up(before + rows[i].own, 32);
        rows[i].panels.padded = padded < WINDOW ? padded : WINDOW;
        const int64_t size = 2 * rows[i].panels.padded * each;
        if (i && used + size > TOGETHER) ends.push_back((int64_t)i), used = 0;
        places[i] = used;
        used += size;
        *numbers = used > *numbers ? used : *numbers;
    }
    ends.push_back((int64_t)rows.size());
    return ends;
}

int shared_attention(const sf_shared_call &c, int64_t shared, std::vector<Row> &rows, int threads) {
    const int64_t each = c.kv_heads * c.d, split = shared / 32 * 32;
    std::vector<int64_t> places(rows.size());
    int64_t numbers = 0, longest = 0, queries = 0;
    const std::vector<int64_t> ends = groups_of(rows, shared - split, each, &numbers, places);
    for (Row &row : rows) {
        row.state = queries * c.heads;
        queries += row.tokens;
        longest = shared + row.own > longest ? shared + row.own : longest;
    }
    const int64_t ahead = split < WINDOW ? split : WINDOW;
    const Borrowed ours(2 * ahead * each * 2), own(numbers * 2);
    const bool once = longest <= WINDOW;
    const Borrowed kept(once ? 0 : queries * c.heads * (c.d + 2) * 4);
    if (!ours.data || !own.data || !kept.data) return SF_NO_MEMORY;
    const Panels panels = panels_at(reinterpret_cast<uint16_t *>(ours.data), ahead, each);
    for (size_t i = 0; i < rows.size(); i++)
        rows[i].panels = panels_at(reinterpret_cast<uint16_t *>(own.data) + places[i],
                                   rows[i].panels.padded, each);
    const Call call{c.heads, c.kv_heads, c.d, c.window, c.q, c.q_dtype, c.out, c.out_dtype,
                    c.query_positions != nullptr, shared, split, c.key_positions};
    const State all = once ? State{} : state_at(kept.data, queries * c.heads, c.d);
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        const Borrowed memory(ROWS * ((c.d + KEYS) * 2 + (KEYS + c.d + 2) * 4));
        Scratch s{};
        State mine{};
        if (memory.data) {
            s.q = reinterpret_cast<uint16_t *>(memory.data);
            s.p = s.q + ROWS * c.d;
            s.scores = reinterpret_cast<float *>(s.p + ROWS * KEYS);
            mine = state_at(s.scores + ROWS * KEYS, ROWS, c.d);
        } else {
#pragma omp atomic write
            failed = 1;
        }
        for (int64_t from = 0; from < longest; from += WINDOW) {
            const Window window{from, from + WINDOW, from + WINDOW >= longest};
            const int64_t stop = split < window.to ? split : window.to;
            const int64_t chunks = stop > from ? parts(stop - from, PACKED) : 0;
#pragma omp for schedule(static)
            for (int64_t task = 0; task < c.kv_heads * chunks; task++) {
                const int64_t at = from + task / c.kv_heads * PACKED, left = stop - at;
                const Segments prefix[2] = {{c.keys, c.shared, 0}, {c.values, c.shared, 0}};
                const Segments none[2] = {};
                pack(prefix, none, task % c.kv_heads, c.d, at, at + (left < PACKED ? left : PACKED),
                     from, panels);
            }
            int64_t begin = 0;
            for (const int64_t end : ends) {
                attend_rows(call, c, panels, rows, begin, end, window, s, all, mine);
                begin = end;
            }
        }
    }
    return failed ? SF_NO_MEMORY : SF_OK;
}

}  // namespace

extern "C" int sf_shared_attention(const sf_shared_call *call, int threads) {
    if (!sf_has_bf16()) return SF_UNSUPPORTED;
    if (!call || threads < 1) return SF_BAD_ARGUMENT;
    const sf_shared_call &c = *call;
    int64_t shared = 0;
    if (!c.q || !c.keys || !c.values || !c.segments || !c.queries || !c.out || c.rows < 1 ||
        c.shared < 0 || c.shared > MOST_SEGMENTS || c.heads < 1 || c.kv_heads < 1 ||
        c.heads % c.kv_heads || c.d < 32 || c.d % 32 || c.window < 0 || !dtype_ok(c.q_dtype) ||
        !dtype_ok(c.out_dtype) || !c.query_positions != !c.key_positions || !fits({c.rows}) ||
        !segments_ok(c.keys, c.values, c.shared, &shared))
        return SF_BAD_ARGUMENT;
    try {
        std::vector<Row> rows;
        const int code = read_rows(c, shared, rows);
        return code == SF_OK ? shared_attention(c, shared, rows, threads) : code;
    } catch (const std::bad_alloc &) {
        return SF_NO_MEMORY;
    }
}

#else  // no such processor

extern "C" int sf_shared_attention(const sf_shared_call *, int) { return SF_UNSUPPORTED; }

#endif

extern "C" int sf_attention(const void *q, int q_dtype, int64_t tokens, int64_t heads,
                            int64_t kv_heads, int64_t d, const sf_rows *keys,
                            const sf_rows *values, int64_t segments,
                            const int32_t *query_positions, const int32_t *key_positions,
                            int64_t window, void *out, int out_dtype, int threads) {
    // One row that shares nothing.
    if (segments < 1) return sf_has_bf16() ? SF_BAD_ARGUMENT : SF_UNSUPPORTED;
    const sf_shared_call call{q, q_dtype, 1, heads, kv_heads, d, keys, values, 0, &segments,
                              &tokens, query_positions, key_positions, window, out, out_dtype};
    return sf_shared_attention(&call, threads);
}
