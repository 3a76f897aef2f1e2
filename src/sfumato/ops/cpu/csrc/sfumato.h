/* The C interface of the compiled CPU operations.
 *
 * Every function is re-entrant, keeps no state but memory of its thread (sf_workspace_bytes), the
 * files that sf_watch names and what sf_use_threads is given, throws
 * nothing and returns SF_OK or one of the negative codes.  `threads` is the number of threads that a call takes (sf_use_threads).  Pointers to blocks
 * need no alignment; panels lie at an even address, and all else where a number of its type may.
 * No tensor has more than 2^48 elements.  What a row gets depends neither on the other rows of a
 * call nor on `threads`.
 *
 * Weights are packed into panels: 16 rows side by side, in blocks of 32 columns, their codes in as
 * many bits as the block format has (see panels.h for the layout).
 */
#ifndef SFUMATO_H
#define SFUMATO_H

#include <stdint.h>

#if defined(_WIN32)
#define SF_API __declspec(dllexport)
#else
#define SF_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define SF_VERSION 17

enum { SF_OK = 0, SF_BAD_ARGUMENT = -1, SF_NO_MEMORY = -2, SF_UNSUPPORTED = -3 };
enum { SF_F32 = 0, SF_BF16 = 1 };                     /* dtypes */
/* What keys and values of attention may be besides, in bytes: SF_FP8 is e4m3 without infinities; a row of
 * SF_Q8_0 has d int8 codes, then a float16 scale for each 32 of them, d + d / 16 bytes in all, and
 * stands for codes . scales in float32, which SF_Q8_0_BF16 rounds to bfloat16. */
enum { SF_FP8 = 2, SF_Q8_0 = 3, SF_Q8_0_BF16 = 4 };
/* Instruction sets, of one family of processors the worst first. */
enum {
    SF_PORTABLE = 0,
    SF_AVX2 = 1,
    SF_AVX_VNNI = 2,
    SF_AVX512_VNNI = 3, /* as SF_AVX512 is on a processor without BF16 */
    SF_AVX512 = 4,
    SF_AMX = 5,
    SF_NEON = 6,
    SF_I8MM = 7,
    SF_ISAS = 8
};
enum { SF_MODE_INT8 = 0, SF_MODE_BF16 = 1 };          /* what activations are rounded to */
/* The function f of a gate: x/2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), or x / (1 + e^-x). */
enum { SF_GELU = 0, SF_SILU = 1 };

SF_API int sf_version(void);
/* 1: this processor runs it; 0: it does not; -1: no processor of its family does; SF_LEFT_OUT: this one
 * would, but the library was compiled without it. */
enum { SF_LEFT_OUT = 2 };
SF_API int sf_isa_available(int isa);
/* Gives the library the threads of an OpenMP runtime, by its functions: SF_GOMP takes GOMP_parallel,
 * GOMP_barrier, omp_get_thread_num and omp_get_num_threads; SF_KMPC takes __kmpc_fork_call, __kmpc_barrier,
 * omp_get_thread_num, omp_get_num_threads, __kmpc_push_num_threads and __kmpc_global_thread_num.  Once, before
 * all other calls, which run on one thread without. */
enum { SF_GOMP = 0, SF_KMPC = 1 };
SF_API int sf_use_threads(int kind, void *const *functions);
/* Whether calls are shared out to threads: sf_use_threads was given some. */
SF_API int sf_has_threads(void);
/* Whether a level attends: the functions of attention below take it. */
SF_API int sf_attends(int isa);
/* Whether this processor multiplies bfloat16 (AVX512-BF16). */
SF_API int sf_has_bf16(void);

/* Bytes that the calling thread keeps for the buffers of its next calls: the most that a call of its own
 * has needed, 256 MiB at most.  They are freed when the thread ends. */
SF_API int64_t sf_workspace_bytes(void);

/* From now on, where a page of these bytes of a mapped file cannot be read (SIGBUS: the file was made
 * shorter), the process writes one line with the file's name to standard error and ends with this exit
 * code. Other addresses are left to the handler that there was before. Returns a number for sf_unwatch,
 * to be called before the bytes are unmapped, or a negative code: SF_NO_MEMORY for the 1,025th file,
 * SF_UNSUPPORTED on Windows. */
SF_API int sf_watch(const void *data, int64_t bytes, const char *name, int exit_code);
SF_API void sf_unwatch(int number);

/* The kind of panel that a ggml type is packed into, or -1. */
SF_API int sf_kind(int ggml_type);
/* Bytes of the panels of one matrix, or -1. */
SF_API int64_t sf_panel_bytes(int kind, int64_t rows, int64_t cols);
/* blocks [matrices][rows][cols] of a ggml type -> panels, each matrix apart. */
SF_API int sf_pack(int isa, int ggml_type, const void *blocks, int64_t matrices, int64_t rows,
                   int64_t cols, void *panels, int threads);
/* The kind of panels that sf_pack_columns makes.  It is multiplied by activations of int8 alone, of which
 * none is below zero. */
enum { SF_SIGNED_BYTES = 8 };
/* blocks [rows][cols] of a ggml type -> panels of the transposed matrix [cols][rows]: int8 in blocks of
 * 32 rows, each with a float16 scale. */
SF_API int sf_pack_columns(int isa, int ggml_type, const void *blocks, int64_t rows, int64_t cols,
                           void *panels, int threads);
/* The values that panels stand for: out float32 [matrices][rows][cols]. */
SF_API int sf_unpack(int kind, const void *panels, int64_t matrices, int64_t rows, int64_t cols,
                     float *out, int threads);
/* Blocks -> out [elements], bit for bit ggml's float32, rounded where out is bfloat16. */
SF_API int sf_dequantize(int isa, int ggml_type, const void *blocks, int64_t elements, void *out,
                         int out_dtype, int threads);

/* out [tokens][rows] = x [tokens][cols] . weight [rows][cols] transposed. */
SF_API int sf_linear(int isa, int mode, int kind, const void *panels, int64_t rows, int64_t cols,
                     const void *x, int x_dtype, int64_t tokens, void *out, int out_dtype,
                     int threads);

/* out [tokens][hidden] = sum over a token's `active` experts, in their order, of
 * shares . down . (f(gate . x) * up . x), where f is what `gating` says; gate_up
 * [experts][2 inner][hidden], the gate first; down [experts][hidden][inner]; chosen and shares
 * [tokens][active]. */
SF_API int sf_experts(int isa, int mode, int gate_up_kind, const void *gate_up, int down_kind,
                      const void *down, int64_t experts, int64_t hidden, int64_t inner,
                      const void *x, int x_dtype, int64_t tokens, const int64_t *chosen,
                      const float *shares, int64_t active, int gating, void *out, int out_dtype,
                      int threads);

/* A chunk of the vocabulary's scores, to be taken into the distribution of each position.
 *
 * raw [positions][count] holds the scores of the ids first_id...; s = softcap tanh(raw / softcap) /
 * temperature, or raw / temperature where softcap is 0, at least -1e30, which is also the score of
 * what is banned: at position p ban_ids[ban_first[p]...ban_last[p]), of `bans` ids in all (all
 * null: nothing is banned). */
typedef struct {
    const void *raw;
    int raw_dtype;
    int64_t positions, count, first_id;
    float softcap;
    const float *temperature; /* [positions] */
    const int64_t *ban_first, *ban_last, *ban_ids;
    int64_t bans;
    /* The state, in place: max s, sum e^(s - max), sum e^(s - max) (s - max), the id of the highest
     * score (the lowest of equals), and the highest scores [positions][8], falling, with their ids. */
    float *max, *sum_exp, *sum_shifted;
    int64_t *argmax;
    float *top;
    int64_t *top_ids;
    /* Results: e^(old max - max) [positions]; e^(s - max) summed over each 64 ids [positions]
     * [ceil(count / 64)]; e^(s - max) [positions][count]. */
    float *fade, *block_sums;
    void *mass;
    int mass_dtype;
} sf_softmax_call;

SF_API int sf_softmax_update(int isa, const sf_softmax_call *call, int threads);

/* out [rows][columns] = f(gate) . up, where f is what `gating` says, rounded once; rows of gate and
 * up lie `gate_stride` and `up_stride` elements apart. */
SF_API int sf_gated(int isa, const void *gate, int64_t gate_stride, const void *up,
                    int64_t up_stride, int dtype, int gating, int64_t rows, int64_t columns,
                    void *out, int threads);

/* out [rows][columns] = x / sqrt(mean x^2 + eps) . weight (null: 1), in float32, rounded once. */
SF_API int sf_rms_norm(int isa, const void *x, int dtype, int64_t rows, int64_t columns,
                       const void *weight, int weight_dtype, float eps, void *out, int threads);

/* Rotary embedding of the pairs (i, i + half): x and out [tokens][heads][2 half]; cosines and sines
 * [tokens][half]; all of one dtype, rounded once. */
SF_API int sf_rotate(int isa, const void *x, int dtype, int64_t tokens, int64_t heads, int64_t half,
                     const void *cosines, const void *sines, void *out, int threads);

/* Rows of keys or values: [kv_heads][count][d] by strides in elements, of narrow ones in bytes. */
typedef struct {
    const void *data;
    int dtype;
    int64_t count, head_stride, row_stride;
} sf_rows;

/* Softmax attention in bfloat16 with float32 sums (SF_AVX512 and SF_AMX where the processor multiplies
 * it) or in float32 (the others that attend), with scale 1 and grouped heads: q and out [tokens][heads][d]; keys and values
 * in segments, one after another.  With positions, a token sees the keys from position first[token] to
 * last[token]; without (all three null), every key.  Who sees none gets zeros. */
SF_API int sf_attention(int isa, const void *q, int q_dtype, int64_t tokens, int64_t heads,
                        int64_t kv_heads, int64_t d, const sf_rows *keys, const sf_rows *values,
                        int64_t segments, const int32_t *first, const int32_t *last,
                        const int32_t *key_positions, void *out, int out_dtype, int threads);

/* As sf_attention, of several rows that follow one prefix: q and out have queries[row] tokens of each
 * row; keys and values have `shared` segments, which every row sees first, and then segments[row] of
 * each row's own.  first and last are those of q's tokens, key_positions those of the keys in the order
 * of the segments (all null: every key is seen).  What a row gets is to the bit what sf_attention makes
 * of its queries and segments. */
typedef struct {
    const void *q;
    int q_dtype;
    int64_t rows, heads, kv_heads, d;
    const sf_rows *keys, *values;
    int64_t shared;
    const int64_t *segments, *queries;
    const int32_t *first, *last, *key_positions;
    void *out;
    int out_dtype;
} sf_shared_call;

SF_API int sf_shared_attention(int isa, const sf_shared_call *call, int threads);

/* Attention of canvases, one a row: q and out [rows][length][heads][d]; k and v [rows][length]
 * [kv_heads][d]; keys and values [stored][kv_heads][size][d, or a row's bytes].  The first width[row] positions of a
 * row see the first held[row] positions stored at slots[row] and one another; the others get
 * nothing, and their part of `out` is left as it is. */
typedef struct {
    const void *q, *k, *v, *keys, *values;
    int dtype, stored_dtype; /* of q, k, v and out; of keys and values, which may be narrow */
    int64_t rows, length, heads, kv_heads, d, stored, size;
    const int64_t *slots, *held, *width;
    void *out;
} sf_canvas_call;

SF_API int sf_canvas_attention(int isa, const sf_canvas_call *call, int threads);

#ifdef __cplusplus
}
#endif
#endif
