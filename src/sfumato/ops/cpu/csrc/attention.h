// What attention.cpp, which shares a call out, and the functions of a level, which compute, agree on.
#ifndef SFUMATO_ATTENTION_H
#define SFUMATO_ATTENTION_H

#include <cstdint>

#include "sfumato.h"

namespace attention {

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t between(int64_t n, int64_t most) { return n < 0 ? 0 : n < most ? n : most; }
inline int64_t parts(int64_t n, int64_t of) { return (n + of - 1) / of; }
inline int64_t element_bytes(int dtype) { return dtype == SF_F32 ? 4 : dtype == SF_BF16 ? 2 : 1; }

// Keys and values as a level multiplies them: of each key head [padded * d] numbers, zeros past the last
// key.
struct Panels {
    int64_t padded;  // keys rounded up to 32
    void *keys, *values;
};

// Segments of keys or values, one after another, without the first `skipped` rows.
struct Segments {
    const sf_rows *rows;
    int64_t count, skipped;
};

// Keys and values `from`..`to` - 1 of one head, which the first and then the second segments have, to
// where the panels begin with number `base`; all three are multiples of 32.
struct Packing {
    Segments keys[2], values[2];
    int64_t head, d, from, to, base;
};

struct Call {
    int64_t heads, kv_heads, d;
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
    const int32_t *first_seen, *last_seen;  // positions, of each query
    const int32_t *own_positions;
    Panels panels;
};

// Of some queries: sums [queries][d], and [queries] of the others.
struct State {
    float *sums, *peak, *total;

    State at(int64_t query, int64_t d) const { return {sums + query * d, peak + query, total + query}; }
};

// A thread's own: numbers [rows][d] and [rows][keys], as they are multiplied, and scores [rows][keys].
struct Scratch {
    void *q, *masses;
    float *scores;
};

// Queries first..first + count - 1 of one key head: query r is token r % tokens of its group's head
// r / tokens.
struct Queries {
    int64_t kv, first, count;
};

}  // namespace attention

// The functions of a level.
struct Attention {
    int64_t number_bytes;  // of a number in panels
    int64_t rows, keys;    // most queries of a task, and keys whose scores are held at a time
    int64_t window;        // keys of a row that are packed at a time; a multiple of `keys`
    void (*pack)(const attention::Packing &, const attention::Panels &);
    // Takes the keys of a window into the state of some queries, and after the last one their result.
    void (*attend)(const attention::Call &, const attention::Panels &shared, const attention::Row &,
                   const attention::Scratch &, const attention::State &, const attention::Window &,
                   const attention::Queries &);
};

#endif
