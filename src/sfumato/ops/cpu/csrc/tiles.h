// The tile instructions of AMX by the names that amx.cpp uses; with SF_EMULATE_TILES in plain C++, so
// that what is built on them runs on any processor with AVX-512.
//
// A tile has up to 16 rows of up to 64 bytes.  Sources: Intel SDM, volume 1, chapter 18, and TDPBF16PS in
// volume 2.
#ifndef SFUMATO_TILES_H
#define SFUMATO_TILES_H

#include <cstdint>
#include <cstring>

#include "panels.h"

namespace {

// Rows and bytes a row of each tile, as the processor reads them.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int its_rows, int its_row_bytes) {
        rows[tile] = (uint8_t)its_rows;
        row_bytes[tile] = (uint16_t)its_row_bytes;
    }
    void use() const;
};
static_assert(sizeof(TileShapes) == 64, "the size that LDTILECFG reads");

#if defined(SF_EMULATE_TILES)

thread_local TileShapes emulated_shapes;
thread_local uint8_t emulated_tiles[8][16][64];

inline void TileShapes::use() const { emulated_shapes = *this; }

template <int T>
inline void tile_zero() {
    memset(emulated_tiles[T], 0, sizeof emulated_tiles[T]);
}

template <int T>
inline void tile_load(const void *from, int64_t stride) {
    tile_zero<T>();
    for (int i = 0; i < emulated_shapes.rows[T]; i++)
        memcpy(emulated_tiles[T][i], static_cast<const uint8_t *>(from) + i * stride,
               emulated_shapes.row_bytes[T]);
}

template <int T>
inline void tile_store(void *to, int64_t stride) {
    for (int i = 0; i < emulated_shapes.rows[T]; i++)
        memcpy(static_cast<uint8_t *>(to) + i * stride, emulated_tiles[T][i],
               emulated_shapes.row_bytes[T]);
}

// C += A . B, in the order in which the processor adds.
template <int C, int A, int B>
inline void tile_multiply_bf16() {
    for (int m = 0; m < emulated_shapes.rows[A]; m++)
        for (int k = 0; k < emulated_shapes.row_bytes[A] / 4; k++)
            for (int n = 0; n < emulated_shapes.row_bytes[B] / 4; n++) {
                float sum;
                uint32_t a, b;
                memcpy(&sum, emulated_tiles[C][m] + 4 * n, 4);
                memcpy(&a, emulated_tiles[A][m] + 4 * k, 4);
                memcpy(&b, emulated_tiles[B][k] + 4 * n, 4);
                sum += float_of(a << 16) * float_of(b << 16);
                sum += float_of(a & 0xffff0000) * float_of(b & 0xffff0000);
                memcpy(emulated_tiles[C][m] + 4 * n, &sum, 4);
            }
}

#define TILE_ZERO(tile) tile_zero<tile>()
#define TILE_LOAD(tile, from, stride) tile_load<tile>(from, stride)
#define TILE_STORE(tile, to, stride) tile_store<tile>(to, stride)
#define TILE_MULTIPLY_BF16(sums, left, right) tile_multiply_bf16<sums, left, right>()

#else

inline void TileShapes::use() const { _tile_loadconfig(this); }

// GCC has the tile's number in the name of a register: it must be a literal.
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
// float32 sums of the products of bfloat16
#define TILE_MULTIPLY_BF16(sums, left, right) _tile_dpbf16ps(sums, left, right)

#endif

}  // namespace
#endif
