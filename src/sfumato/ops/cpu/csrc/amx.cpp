// Products of bfloat16 for processors with AMX (which have AVX-512 with VNNI too).
//
// A panel of bfloat16 lies as the tile instructions take their right factor, and packed rows as the left
// one.  Products of int8 stay with AVX-512: their sums of 32 would leave the tiles after each block to be
// scaled, which was measured to cost what the tiles save.

#if defined(__x86_64__)

#include <cmath>
#include <cstring>

#include "level.h"
#include "sfumato.h"

// After the standard headers: nothing of theirs may be compiled for this instruction set alone.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,f16c,fma,amx-tile,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,f16c,fma,amx-tile,amx-bf16")
#endif
#include <immintrin.h>

#include "panels.h"

#include "avx512.inc"
#include "tiles.h"

namespace {

constexpr int INT8_ROWS = 0, BF16_ROWS = 32;
constexpr int64_t SHARE_BYTES = 1 << 20;

template <int ROWS>
void bf16_tile(const uint8_t *left, const uint8_t *right, int64_t blocks, const uint8_t *rows,
               float *const *out, int64_t left_column, int64_t right_column) {
    constexpr int upper = ROWS < 16 ? ROWS : 16, lower = ROWS - upper;
    TileShapes shapes;
    // Sums of upper and lower rows in tiles 0 to 3, these rows in 4 and 5, both panels in 6 and 7.
    for (int t = 0; t < 8; t++)
        shapes.set(t, t > 5 ? 16 : t == 2 || t == 3 || t == 5 ? (lower ? lower : 1) : upper, 64);
    shapes.use();
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t block = 0; block < blocks; block++) {
        TILE_LOAD(6, left, 64);
        TILE_LOAD(4, rows, 64);
        TILE_MULTIPLY_BF16(0, 4, 6);
        TILE_LOAD(7, right, 64);
        TILE_MULTIPLY_BF16(1, 4, 7);
        if (lower) {
            TILE_LOAD(5, rows + upper * 64, 64);
            TILE_MULTIPLY_BF16(2, 5, 6);
            TILE_MULTIPLY_BF16(3, 5, 7);
        }
        left += code_bytes(BF16);
        right += code_bytes(BF16);
        rows += ROWS * 64;
    }
    alignas(64) float sums[4][16][16];
    TILE_STORE(0, sums[0], 64);
    TILE_STORE(1, sums[1], 64);
    if (lower) {
        TILE_STORE(2, sums[2], 64);
        TILE_STORE(3, sums[3], 64);
    }
    for (int i = 0; i < ROWS; i++) {
        memcpy(out[i] + left_column, sums[i / 16 * 2][i % 16], 64);
        memcpy(out[i] + right_column, sums[i / 16 * 2 + 1][i % 16], 64);
    }
}

}  // namespace

#include "level.inc"

const Products AMX_PRODUCTS = {linear, experts};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
