// Attention of packed tokens over a prefix and themselves, shared out to threads; a level's functions
// compute.
//
// Keys and values are packed once per call into panels, those of a prefix that several rows share once for
// all of these, some thousand keys at a time; blocks of queries walk over them with a running maximum
// (online softmax), so that no more than rows x keys scores exist at a time, and keep maximum, total and
// sums from one window to the next.  A query's result depends on nothing but itself and its keys, in blocks
// of as many keys as its level takes, from the first one on: not on other queries or rows, nor on what is
// shared, cut into blocks or given to threads.

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "attention.h"
#include "checks.h"
#include "level.h"
#include "sfumato.h"
#include "threads.h"
#include "workspace.h"

namespace {

using namespace attention;

constexpr int64_t MOST_SEGMENTS = 1 << 20;
constexpr int64_t PACKED = 64;  // keys of one task of packing, of one head of a row or of what is shared
constexpr int64_t TOGETHER = 4 << 20;  // bytes in the panels of rows that are packed at a time

// The level's functions with a call of theirs.
struct Work {
    const Attention &level;
    Call call;
    const sf_shared_call &c;
};

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
void attend_rows(Team &team, const Work &work, const Panels &shared, const std::vector<Row> &rows,
                 int64_t first, int64_t last, const Window &window, const Scratch &s, const State &all,
                 const State &ours) {
    const Call &call = work.call;
    const sf_shared_call &c = work.c;
    const int64_t group = call.heads / call.kv_heads, most = work.level.rows;
    const int64_t begin = window.from > call.split ? window.from : call.split;
    const auto end = [&](const Row &row) {  // of the keys in the row's panels
        const int64_t total = up(call.shared + row.own, 32);
        return total < window.to ? total : window.to;
    };
    const auto to_pack = [&](const Row &row) {
        return end(row) > begin ? call.kv_heads * parts(end(row) - begin, PACKED) : 0;
    };
    const auto to_attend = [&](const Row &row) { return call.kv_heads * parts(group * row.tokens, most); };
    const int64_t packing = sum(rows, first, last, to_pack);
    team.static_for(packing, [&](int64_t task) {
        int64_t i, within;
        if (!find(rows, first, last, task, to_pack, &i, &within)) return;
        const Row &row = rows[i];
        const int64_t from = begin + within / call.kv_heads * PACKED, left = end(row) - from;
        // Keys are numbered from `split` on, for the shared ones before it are left out.
        work.level.pack({{{c.keys, c.shared, call.split}, {row.keys, row.segments, 0}},
                         {{c.values, c.shared, call.split}, {row.values, row.segments, 0}},
                         within % call.kv_heads, call.d, from - call.split,
                         from - call.split + (left < PACKED ? left : PACKED), begin - call.split},
                        row.panels);
    });
    team.barrier();
    const int64_t attending = sum(rows, first, last, to_attend);
    team.dynamic_for(attending, 1, [&](int64_t task) {
        int64_t i, within;
        if (!s.q || !find(rows, first, last, task, to_attend, &i, &within)) return;
        const int64_t queries = group * rows[i].tokens, blocks = parts(queries, most);
        const int64_t kv = within / blocks, from = within % blocks * most;
        work.level.attend(call, shared, rows[i], s,
                          state_of(rows[i], all, ours, kv, queries, from, call.d), window,
                          {kv, from, queries - from < most ? queries - from : most});
    });
}

bool segments_ok(const sf_rows *keys, const sf_rows *values, int64_t segments, int64_t *count) {
    *count = 0;
    for (int64_t s = 0; s < segments; s++) {
        for (const sf_rows &rows : {keys[s], values[s]})
            if (!stored_ok(rows.dtype) || !fits({rows.count}) || (!rows.data && rows.count)) return false;
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
        row.first_seen = c.first ? c.first + queries : nullptr;
        row.last_seen = c.last ? c.last + queries : nullptr;
        row.own_positions = c.key_positions ? c.key_positions + shared + own : nullptr;
        queries += row.tokens, own += row.own;
        keys += row.segments, values += row.segments;
        if (!fits({queries, c.heads, c.d}) || !fits({own})) return SF_BAD_ARGUMENT;
        rows.push_back(row);
    }
    return SF_OK;
}

// Panels of `padded` keys, each of `bytes` of all heads.
Panels panels_at(uint8_t *memory, int64_t padded, int64_t bytes) {
    return {padded, memory, memory + padded * bytes};
}

State state_at(void *memory, int64_t queries, int64_t d) {
    auto *sums = static_cast<float *>(memory);
    return {sums, sums + queries * d, sums + queries * (d + 1)};
}

// A thread's buffers in memory of scratch_bytes, and its state of a task's queries.
int64_t scratch_bytes(const Attention &level, int64_t d) {
    return level.rows * ((d + level.keys) * level.number_bytes + (level.keys + d + 2) * 4);
}

Scratch scratch_at(const Attention &level, int64_t d, uint8_t *memory, State *state) {
    uint8_t *masses = memory + level.rows * d * level.number_bytes;
    uint8_t *scores = masses + level.rows * level.keys * level.number_bytes;
    *state = state_at(scores + level.rows * level.keys * 4, level.rows, d);
    // Masses in float32 take the place of their scores.
    if (level.number_bytes == 4) masses = scores;
    return {memory, masses, reinterpret_cast<float *>(scores)};
}

// The rows that are packed at a time, by their ends; sets the places of their panels, and the most
// `bytes` of any; each: of one key.
std::vector<int64_t> groups_of(std::vector<Row> &rows, int64_t before, int64_t each, int64_t window,
                               int64_t *bytes, std::vector<int64_t> &places) {
    std::vector<int64_t> ends;
    int64_t used = 0;
    for (std::size_t i = 0; i < rows.size(); i++) {
        const int64_t padded = up(before + rows[i].own, 32);
        rows[i].panels.padded = padded < window ? padded : window;
        const int64_t size = 2 * rows[i].panels.padded * each;
        if (i && used + size > TOGETHER) ends.push_back((int64_t)i), used = 0;
        places[i] = used;
        used += size;
        *bytes = used > *bytes ? used : *bytes;
    }
    ends.push_back((int64_t)rows.size());
    return ends;
}

// The shared keys of a window, before those of any row. All threads come here.
void pack_shared(Team &team, const Work &work, const Window &window, const Panels &panels) {
    const Call &call = work.call;
    const sf_shared_call &c = work.c;
    const int64_t stop = call.split < window.to ? call.split : window.to;
    const int64_t chunks = stop > window.from ? parts(stop - window.from, PACKED) : 0;
    team.static_for(call.kv_heads * chunks, [&](int64_t task) {
        const int64_t at = window.from + task / call.kv_heads * PACKED, left = stop - at;
        work.level.pack({{{c.keys, c.shared, 0}, {}}, {{c.values, c.shared, 0}, {}},
                         task % call.kv_heads, call.d, at, at + (left < PACKED ? left : PACKED),
                         window.from},
                        panels);
    });
}

int shared_attention(const Attention &level, const sf_shared_call &c, int64_t shared,
                     std::vector<Row> &rows, int threads) {
    const int64_t each = c.kv_heads * c.d * level.number_bytes, split = shared / 32 * 32;
    const Work work{level, {c.heads, c.kv_heads, c.d, c.q, c.q_dtype, c.out, c.out_dtype, c.first != nullptr,
                            shared, split, c.key_positions}, c};
    std::vector<int64_t> places(rows.size());
    int64_t bytes = 0, longest = 0, queries = 0;
    const int64_t at_once = level.window;
    const std::vector<int64_t> ends = groups_of(rows, shared - split, each, at_once, &bytes, places);
    for (Row &row : rows) {
        row.state = queries * c.heads;
        queries += row.tokens;
        longest = shared + row.own > longest ? shared + row.own : longest;
    }
    const int64_t ahead = split < at_once ? split : at_once;
    const Borrowed ours(2 * ahead * each), own(bytes);
    const bool once = longest <= at_once;
    const Borrowed kept(once ? 0 : queries * c.heads * (c.d + 2) * 4);
    if (!ours.data || !own.data || !kept.data) return SF_NO_MEMORY;
    const Panels panels = panels_at(ours.data, ahead, each);
    for (std::size_t i = 0; i < rows.size(); i++)
        rows[i].panels = panels_at(own.data + places[i], rows[i].panels.padded, each);
    const State all = once ? State{} : state_at(kept.data, queries * c.heads, c.d);
    return parallel(threads, [&](Team &team) {
        const Borrowed memory(scratch_bytes(level, c.d));
        Scratch s{};
        State mine{};
        if (memory.data) s = scratch_at(level, c.d, memory.data, &mine);
        for (int64_t from = 0; from < longest; from += at_once) {
            const Window window{from, from + at_once, from + at_once >= longest};
            if (from) team.barrier();  // the panels are free again
            pack_shared(team, work, window, panels);
            int64_t begin = 0;
            for (const int64_t end : ends) {
                if (begin) team.barrier();
                attend_rows(team, work, panels, rows, begin, end, window, s, all, mine);
                begin = end;
            }
        }
        return memory.data ? SF_OK : SF_NO_MEMORY;
    });
}

}  // namespace

extern "C" int sf_attends(int isa) { return attention_of(isa) != nullptr; }

extern "C" int sf_shared_attention(int isa, const sf_shared_call *call, int threads) {
    const Attention *level = attention_of(isa);
    if (!level) return SF_UNSUPPORTED;
    if (!call || threads < 1) return SF_BAD_ARGUMENT;
    const sf_shared_call &c = *call;
    int64_t shared = 0;
    if (!c.q || !c.keys || !c.values || !c.segments || !c.queries || !c.out || c.rows < 1 ||
        c.shared < 0 || c.shared > MOST_SEGMENTS || c.heads < 1 || c.kv_heads < 1 ||
        c.heads % c.kv_heads || c.d < 32 || c.d % 32 || !dtype_ok(c.q_dtype) || !dtype_ok(c.out_dtype) ||
        !c.first != !c.key_positions || !c.last != !c.key_positions || !fits({c.rows}) ||
        !segments_ok(c.keys, c.values, c.shared, &shared))
        return SF_BAD_ARGUMENT;
    try {
        std::vector<Row> rows;
        const int code = read_rows(c, shared, rows);
        return code == SF_OK ? shared_attention(*level, c, shared, rows, threads) : code;
    } catch (const std::bad_alloc &) {
        return SF_NO_MEMORY;
    }
}

extern "C" int sf_attention(int isa, const void *q, int q_dtype, int64_t tokens, int64_t heads,
                            int64_t kv_heads, int64_t d, const sf_rows *keys,
                            const sf_rows *values, int64_t segments,
                            const int32_t *first, const int32_t *last,
                            const int32_t *key_positions, void *out, int out_dtype, int threads) {
    // One row that shares nothing.
    if (segments < 1) return sf_attends(isa) ? SF_BAD_ARGUMENT : SF_UNSUPPORTED;
    const sf_shared_call call{q, q_dtype, 1, heads, kv_heads, d, keys, values, 0, &segments,
                              &tokens, first, last, key_positions, out, out_dtype};
    return sf_shared_attention(isa, &call, threads);
}
