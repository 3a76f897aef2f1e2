// What a level (an instruction set) offers to the dispatching interface in api.cpp.
#ifndef SFUMATO_LEVEL_H
#define SFUMATO_LEVEL_H

#include <cstdint>

#include "attention.h"
#include "sfumato.h"
#include "workspace.h"

// A run of tokens that one expert works on: places [first, first + count) of `order`.
struct ExpertTask {
    int64_t expert, first, count;
};

struct LinearCall {
    int mode, kind;
    const void *panels;
    int64_t rows, cols;
    const void *x;
    int x_dtype;
    int64_t tokens;
    void *out;
    int out_dtype, threads;
};

struct ExpertsCall {
    int mode, gate_up_kind, down_kind;
    const void *gate_up, *down;
    int64_t hidden, inner;
    const void *x;
    int x_dtype;
    int64_t tokens, active;
    const int64_t *order;  // [tokens * active]: a choice (token * active + place), by expert
    const ExpertTask *tasks;
    int64_t task_count;
    const float *shares;
    int gating;
    void *out;
    int out_dtype, threads;
};

struct GatedCall {
    const void *gate, *up;
    int64_t gate_stride, up_stride;
    int dtype, gating;
    int64_t rows, columns;
    void *out;
    int threads;
};

struct RmsNormCall {
    const void *x;
    int dtype;
    int64_t rows, columns;
    const void *weight;  // null: 1
    int weight_dtype;
    float eps;
    void *out;
    int threads;
};

struct RotateCall {
    const void *x;
    int dtype;
    int64_t tokens, heads, half;
    const void *cosines, *sines;
    void *out;
    int threads;
};

struct PackCall {
    int type;
    const void *blocks;
    int64_t matrices, rows, cols;
    void *panels;
    int threads;
};

struct PackColumnsCall {
    int type;
    const void *blocks;
    int64_t rows, cols;
    void *panels;
    int threads;
};

struct DequantizeCall {
    int type;
    const void *blocks;
    int64_t elements;
    void *out;
    int out_dtype, threads;
};

// Products with packed weights.
struct Products {
    int (*linear)(const LinearCall &);
    int (*experts)(const ExpertsCall &);
};

struct Level {
    Products products;
    int (*update_softmax)(const sf_softmax_call &, int threads);
    void (*gated)(const GatedCall &);
    void (*rms_norm)(const RmsNormCall &);
    void (*rotate)(const RotateCall &);
    int (*pack)(const PackCall &);
    int (*dequantize)(const DequantizeCall &);
    int (*pack_columns)(const PackColumnsCall &);
    Attention attention;  // without functions on a level that does not attend
};

// 1 or 0: whether this processor runs a level; -1: none of its family does.  By C's name, for setup.py.
extern "C" int processor_runs(int isa);

const Attention *attention_of(int isa);  // null where a level does not attend

constexpr int64_t EXPERT_TOKENS = 64;  // of a task: few enough to share a busy expert out
constexpr int64_t SOFTMAX_BLOCK = 64, SOFTMAX_TOP = 8;

extern const Level PORTABLE_LEVEL;
#if defined(__x86_64__)
extern const Level AVX2_LEVEL, AVX_VNNI_LEVEL, AVX512_LEVEL;
extern const Products AVX512_BF16_PRODUCTS, AMX_PRODUCTS;  // of bfloat16
extern const Attention AVX512_BF16_ATTENTION;
#elif defined(__aarch64__)
extern const Level NEON_LEVEL;
extern const Products I8MM_PRODUCTS;
#endif

#endif
