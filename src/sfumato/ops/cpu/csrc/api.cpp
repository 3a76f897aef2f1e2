// The C interface's checks, and the choice of the level that serves a call.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "blocks.h"
#include "checks.h"
#include "level.h"
#include "sfumato.h"

namespace {

static_assert((int)S8 == (int)SF_SIGNED_BYTES, "the number in sfumato.h");

const Level &compiled(int isa) {
#if defined(__x86_64__)
    if (isa == SF_AVX2) return AVX2_LEVEL;
    if (isa == SF_AVX_VNNI) return AVX_VNNI_LEVEL;
    if (isa == SF_AVX512_VNNI || isa == SF_AVX512 || isa == SF_AMX) return AVX512_LEVEL;
#elif defined(__aarch64__)
    if (isa == SF_NEON || isa == SF_I8MM) return NEON_LEVEL;
#endif
    return PORTABLE_LEVEL;
}

// Whether the build has nothing for a level (left_out.cpp).
bool left_out(int isa) {
#if defined(__x86_64__)
    if (isa == SF_AMX && !AMX_PRODUCTS.linear) return true;
#endif
    return !compiled(isa).pack;
}

const Level *level_of(int isa) { return sf_isa_available(isa) == 1 ? &compiled(isa) : nullptr; }

const Products *products_of(int isa, int mode) {
    const Level *level = level_of(isa);
#if defined(__x86_64__)
    if (level && mode == SF_MODE_BF16) {
        if (isa == SF_AMX) return &AMX_PRODUCTS;
        if (isa == SF_AVX512 && sf_has_bf16()) return &AVX512_BF16_PRODUCTS;
    }
#elif defined(__aarch64__)
    if (level && isa == SF_I8MM) return &I8MM_PRODUCTS;
#endif
    (void)mode;
    return level ? &level->products : nullptr;
}

// Panels are many and are read in long streams: large pages save most of the page faults while
// they are written, and misses of the translation buffer later.  A hint, so failing is no error.
void ask_for_large_pages(void *data, int64_t bytes) {
#if defined(__linux__)
    const auto from = (reinterpret_cast<uintptr_t>(data) + 4095) & ~(uintptr_t)4095;
    const auto to = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(uintptr_t)4095;
    if (to > from) madvise(reinterpret_cast<void *>(from), to - from, MADV_HUGEPAGE);
#else
    (void)data;
    (void)bytes;
#endif
}

// Products with bfloat16 weights always take bfloat16, and so do all on a level that lacks them.
int mode_for(int mode, int kind) { return kind == BF16 ? SF_MODE_BF16 : mode; }

// The choices by expert, and tasks of at most EXPERT_TOKENS of them, the largest first.
struct Grouping {
    std::vector<int64_t> order;
    std::vector<ExpertTask> tasks;
    bool ok = true;

    Grouping(const int64_t *chosen, int64_t choices, int64_t experts) : order(choices) {
        std::vector<int64_t> start(experts + 1, 0);
        for (int64_t i = 0; i < choices; i++) {
            if (chosen[i] < 0 || chosen[i] >= experts) {
                ok = false;
                return;
            }
            start[chosen[i] + 1]++;
        }
        for (int64_t e = 0; e < experts; e++) start[e + 1] += start[e];
        for (int64_t e = 0; e < experts; e++)
            for (int64_t at = start[e]; at < start[e + 1]; at += EXPERT_TOKENS)
                tasks.push_back({e, at, std::min(EXPERT_TOKENS, start[e + 1] - at)});
        std::vector<int64_t> next(start.begin(), start.end() - 1);
        for (int64_t i = 0; i < choices; i++) order[next[chosen[i]]++] = i;
        std::stable_sort(tasks.begin(), tasks.end(), [](const ExpertTask &a, const ExpertTask &b) {
            return a.count > b.count;
        });
    }
};

}  // namespace

const Attention *attention_of(int isa) {
    const Level *level = level_of(isa);
#if defined(__x86_64__)
    if (level && (isa == SF_AVX512 || isa == SF_AMX) && sf_has_bf16()) return &AVX512_BF16_ATTENTION;
#endif
    return level && level->attention.attend ? &level->attention : nullptr;
}

extern "C" int sf_version(void) { return SF_VERSION; }

extern "C" int sf_isa_available(int isa) {
    const int runs = processor_runs(isa);
    return runs == 1 && left_out(isa) ? SF_LEFT_OUT : runs;
}

extern "C" int sf_kind(int type) { return format_of(type).kind; }

extern "C" int64_t sf_panel_bytes(int kind, int64_t rows, int64_t cols) {
    if (kind < 0 || kind >= KINDS || rows < 1 || cols < 1 || !fits({rows, cols})) return -1;
    if (kind != BF16 && kind != S8 && cols % BLOCK) return -1;
    return matrix_bytes(kind, rows, cols);
}

extern "C" int sf_pack(int isa, int type, const void *blocks, int64_t matrices, int64_t rows,
                       int64_t cols, void *panels, int threads) {
    const Level *level = level_of(isa);
    const Format format = format_of(type);
    if (!level || format.kind < 0 || !blocks || !panels_ok(panels) || threads < 1 ||
        sf_panel_bytes(format.kind, rows, cols) < 0 || cols % format.block_size ||
        !fits({matrices, rows, cols}))
        return SF_BAD_ARGUMENT;
    ask_for_large_pages(panels, matrices * matrix_bytes(format.kind, rows, cols));
    return level->pack({type, blocks, matrices, rows, cols, panels, threads});
}

extern "C" int sf_pack_columns(int isa, int type, const void *blocks, int64_t rows, int64_t cols,
                               void *panels, int threads) {
    const Level *level = level_of(isa);
    const Format format = format_of(type);
    if (!level || format.kind < 0 || type == T_BF16 || !blocks || !panels_ok(panels) || threads < 1 ||
        sf_panel_bytes(S8, cols, rows) < 0 || cols % format.block_size)
        return SF_BAD_ARGUMENT;
    return level->pack_columns({type, blocks, rows, cols, panels, threads});
}

extern "C" int sf_dequantize(int isa, int type, const void *blocks, int64_t elements, void *out,
                             int out_dtype, int threads) {
    const Level *level = level_of(isa);
    const Format format = format_of(type);
    if (!level || format.kind < 0 || type == T_BF16 || !blocks || !out || !fits({elements}) ||
        threads < 1 || elements % format.block_size || !dtype_ok(out_dtype))
        return SF_BAD_ARGUMENT;
    return level->dequantize({type, blocks, elements, out, out_dtype, threads});
}

extern "C" int sf_linear(int isa, int mode, int kind, const void *panels, int64_t rows,
                         int64_t cols, const void *x, int x_dtype, int64_t tokens, void *out,
                         int out_dtype, int threads) {
    const Products *products = products_of(isa, mode_for(mode, kind));
    if (!products || !panels_ok(panels) || !x || !out || threads < 1 || mode < 0 || mode > 1 ||
        !dtype_ok(x_dtype) || !dtype_ok(out_dtype) || sf_panel_bytes(kind, rows, cols) < 0 ||
        !fits({tokens, rows}) || !fits({tokens, cols}) || (kind == S8 && mode != SF_MODE_INT8))
        return SF_BAD_ARGUMENT;
    if (!tokens) return SF_OK;
    return products->linear({mode_for(mode, kind), kind, panels, rows, cols, x, x_dtype, tokens, out,
                          out_dtype, threads});
}

extern "C" int sf_experts(int isa, int mode, int gate_up_kind, const void *gate_up, int down_kind,
                          const void *down, int64_t experts, int64_t hidden, int64_t inner,
                          const void *x, int x_dtype, int64_t tokens, const int64_t *chosen,
                          const float *shares, int64_t active, int gating, void *out,
                          int out_dtype, int threads) {
    mode = std::max(mode_for(mode, gate_up_kind), mode_for(mode, down_kind));
    const Products *products = products_of(isa, mode);
    if (!products || !panels_ok(gate_up) || !panels_ok(down) || !x || !chosen || !shares || !out ||
        experts < 1 || hidden < 1 || inner < 1 || active < 1 || threads < 1 || mode < 0 ||
        mode > 1 || !gating_ok(gating) || gate_up_kind == S8 || down_kind == S8 || !dtype_ok(x_dtype) || !dtype_ok(out_dtype) ||
        !fits({experts, inner, hidden}) ||
        !fits({tokens, active, hidden}) || sf_panel_bytes(gate_up_kind, 2 * inner, hidden) < 0 ||
        sf_panel_bytes(down_kind, hidden, inner) < 0)
        return SF_BAD_ARGUMENT;
    if (!tokens) return SF_OK;
    try {
        const Grouping grouping(chosen, tokens * active, experts);
        if (!grouping.ok) return SF_BAD_ARGUMENT;
        return products->experts({mode, gate_up_kind, down_kind, gate_up, down, hidden, inner, x,
                               x_dtype, tokens, active, grouping.order.data(),
                               grouping.tasks.data(), (int64_t)grouping.tasks.size(), shares, gating, out,
                               out_dtype, threads});
    } catch (const std::bad_alloc &) {
        return SF_NO_MEMORY;
    }
}

extern "C" int sf_softmax_update(int isa, const sf_softmax_call *call, int threads) {
    const Level *level = level_of(isa);
    if (!level || !call || threads < 1) return SF_BAD_ARGUMENT;
    const sf_softmax_call &c = *call;
    const bool all = c.raw && c.temperature && c.max && c.sum_exp && c.sum_shifted && c.argmax &&
                     c.top && c.top_ids && c.fade && c.block_sums && c.mass;
    if (!all || c.count < 1 || !fits({c.positions, c.count}) || !fits({c.first_id}) ||
        !(c.softcap >= 0.0f) || !dtype_ok(c.raw_dtype) || !dtype_ok(c.mass_dtype))
        return SF_BAD_ARGUMENT;
    if (!c.ban_first != !c.ban_last || !c.ban_first != !c.ban_ids) return SF_BAD_ARGUMENT;
    for (int64_t t = 0; c.ban_first && t < c.positions; t++)
        if (c.ban_first[t] < 0 || c.ban_first[t] > c.ban_last[t] || c.ban_last[t] > c.bans)
            return SF_BAD_ARGUMENT;
    return level->update_softmax(c, threads);
}

extern "C" int sf_gated(int isa, const void *gate, int64_t gate_stride, const void *up,
                        int64_t up_stride, int dtype, int gating, int64_t rows, int64_t columns,
                        void *out, int threads) {
    const Level *level = level_of(isa);
    if (!level || !gate || !up || !out || threads < 1 || !dtype_ok(dtype) || !gating_ok(gating) ||
        columns < 1 || gate_stride < 0 || up_stride < 0 || !fits({rows, columns}) || !fits({rows, gate_stride}) ||
        !fits({rows, up_stride}))
        return SF_BAD_ARGUMENT;
    level->gated({gate, up, gate_stride, up_stride, dtype, gating, rows, columns, out, threads});
    return SF_OK;
}

extern "C" int sf_rms_norm(int isa, const void *x, int dtype, int64_t rows, int64_t columns,
                           const void *weight, int weight_dtype, float eps, void *out,
                           int threads) {
    const Level *level = level_of(isa);
    if (!level || !x || !out || threads < 1 || !dtype_ok(dtype) || !dtype_ok(weight_dtype) ||
        columns < 1 || !fits({rows, columns}))
        return SF_BAD_ARGUMENT;
    level->rms_norm({x, dtype, rows, columns, weight, weight_dtype, eps, out, threads});
    return SF_OK;
}

extern "C" int sf_rotate(int isa, const void *x, int dtype, int64_t tokens, int64_t heads,
                         int64_t half, const void *cosines, const void *sines, void *out,
                         int threads) {
    const Level *level = level_of(isa);
    if (!level || !x || !cosines || !sines || !out || threads < 1 || !dtype_ok(dtype) ||
        half < 1 || !fits({tokens, heads, half, 2}))
        return SF_BAD_ARGUMENT;
    level->rotate({x, dtype, tokens, heads, half, cosines, sines, out, threads});
    return SF_OK;
}

extern "C" int sf_canvas_attention(int isa, const sf_canvas_call *call, int threads) {
    if (!call || threads < 1) return SF_BAD_ARGUMENT;
    const sf_canvas_call &c = *call;
    if (!c.q || !c.k || !c.v || !c.keys || !c.values || !c.slots || !c.held || !c.width || !c.out ||
        !dtype_ok(c.dtype) || !stored_ok(c.stored_dtype) || c.kv_heads < 1 || c.d < 1 || c.d % 32 ||
        !fits({c.rows, c.length, c.heads, c.d}) || !fits({c.stored, c.kv_heads, c.size, 2, c.d}) ||
        !fits({c.rows, c.length, c.kv_heads, c.d}))
        return SF_BAD_ARGUMENT;
    for (int64_t row = 0; row < c.rows; row++)
        if (c.slots[row] < 0 || c.slots[row] >= c.stored || c.held[row] < 0 ||
            c.held[row] > c.size || c.width[row] < 0 || c.width[row] > c.length)
            return SF_BAD_ARGUMENT;
    const auto part = [](const void *data, int dtype, int64_t at) {
        return static_cast<const char *>(data) + at * attention::element_bytes(dtype);
    };
    const int64_t wide = stored_width(c.stored_dtype, c.d);
    const int64_t slot = c.kv_heads * c.size * wide, new_keys = c.length * c.kv_heads * c.d;
    const int64_t queries = c.length * c.heads * c.d;
    for (int64_t row = 0; row < c.rows; row++) {
        if (!c.width[row]) continue;
        // One after another: a row is computed as it would be alone.
        const auto both = [&](const void *stored, const void *new_rows, sf_rows (&out)[2]) {
            out[0] = {part(stored, c.stored_dtype, c.slots[row] * slot), c.stored_dtype,
                      c.held[row], c.size * wide, wide};
            out[1] = {part(new_rows, c.dtype, row * new_keys), c.dtype, c.width[row], c.d, c.kv_heads * c.d};
        };
        sf_rows keys[2], values[2];
        both(c.keys, c.k, keys);
        both(c.values, c.v, values);
        void *out = const_cast<char *>(part(c.out, c.dtype, row * queries));
        const int code = sf_attention(isa, part(c.q, c.dtype, row * queries), c.dtype,
                                      c.width[row], c.heads, c.kv_heads, c.d, keys, values, 2, nullptr, nullptr,
                                      nullptr, out, c.dtype, threads);
        if (code != SF_OK) return code;
    }
    return SF_OK;
}
