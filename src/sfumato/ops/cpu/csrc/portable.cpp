// The level that runs everywhere: plain loops, as well as the compiler vectorizes them.

#include <cmath>

#include "level.h"
#include "blocks.h"
#include "sfumato.h"

namespace {

constexpr int INT8_ROWS = 4, BF16_ROWS = 4;
constexpr int64_t SHARE_BYTES = 384 << 10;

template <int KIND, int ROWS>
void int8_tile(const uint8_t *codes, const uint16_t *scales, int64_t blocks, const uint8_t *rows,
               float *const *out, int64_t column) {
    constexpr Shape shape = SHAPES[KIND];
    constexpr int halves = shape.halves ? 2 : 1;
    float sums[ROWS][16] = {};
    for (int64_t b = 0; b < blocks; b++) {
        uint32_t lanes[8][16];
        int16_t weight[BLOCK][16];
        lanes_of<KIND>(codes, lanes);
        for (int k = 0; k < BLOCK; k++)
            for (int r = 0; r < 16; r++)
                weight[k][r] = (int16_t)(code_of<KIND>(lanes[k / 4][r] >> 8 * (k % 4)) + shape.offset);
        float scale[2][16], minimum[2][16];
        scales_of<KIND>(scales, scale, minimum);
        const uint8_t *behind = rows + ROWS * 32;
        for (int i = 0; i < ROWS; i++) {
            const auto *q = reinterpret_cast<const int8_t *>(rows + i * 32);
            float row_scale;
            memcpy(&row_scale, behind + i * 4, 4);
            for (int h = 0; h < halves; h++) {
                uint32_t first = 0, dots[16];  // of a row with NaN they may overflow
                float correction = 0.0f;
                memcpy(shape.minimum ? (void *)&correction : (void *)&first,
                       behind + (1 + h) * ROWS * 4 + i * 4, 4);
                for (int r = 0; r < 16; r++) dots[r] = first;
                for (int k = h * BLOCK / halves; k < (h + 1) * BLOCK / halves; k++) {
                    const int16_t x = q[k];  // 16 bits each: products of those vectorize everywhere
                    for (int r = 0; r < 16; r++) dots[r] += (uint32_t)(x * weight[k][r]);
                }
                for (int r = 0; r < 16; r++) {
                    sums[i][r] += (float)(int32_t)dots[r] * (scale[h][r] * row_scale);
                    if (shape.minimum) sums[i][r] += minimum[h][r] * correction;
                }
            }
        }
        codes += code_bytes(KIND);
        scales += scale_count(KIND);
        rows += ROWS * (32 + 4 + 4 * halves);
    }
    for (int i = 0; i < ROWS; i++) memcpy(out[i] + column, sums[i], sizeof sums[i]);
}

template <int ROWS>
void bf16_tile(const uint8_t *left, const uint8_t *right, int64_t blocks, const uint8_t *rows,
               float *const *out, int64_t left_column, int64_t right_column) {
    for (int side = 0; side < 2; side++) {
        const uint8_t *panel = side ? right : left;
        float sums[ROWS][16] = {};
        for (int64_t b = 0; b < blocks; b++) {
            uint32_t pairs[16][16];
            memcpy(pairs, panel + b * code_bytes(BF16), sizeof pairs);
            for (int i = 0; i < ROWS; i++) {
                uint16_t x[32];
                memcpy(x, rows + (b * ROWS + i) * 64, sizeof x);
                for (int j = 0; j < 16; j++) {
                    const float even = from_bf16(x[2 * j]), odd = from_bf16(x[2 * j + 1]);
                    for (int r = 0; r < 16; r++)
                        sums[i][r] += float_of(pairs[j][r] << 16) * even +
                                      float_of(pairs[j][r] & 0xffff0000) * odd;
                }
            }
        }
        const int64_t column = side ? right_column : left_column;
        for (int i = 0; i < ROWS; i++) memcpy(out[i] + column, sums[i], sizeof sums[i]);
    }
}

template <int TYPE>
void values_of(const Group &group, float *out) {
    plain_values<TYPE>(group, out);
}

template <int TYPE>
void halves_of(const Group &group, uint16_t *out) {
    plain_halves<TYPE>(group, out);
}

template <int KIND>
void widen_panel(const uint8_t *codes, const uint16_t *scales, int64_t blocks, uint8_t *out) {
    widen_plainly<KIND>(codes, scales, blocks, out);
}

}  // namespace

#include "blocks.inc"
#include "pack.inc"
#include "pack_columns.inc"
#include "level.inc"
#include "online_softmax.inc"
#include "row_operations.inc"

const Level PORTABLE_LEVEL = {
    {linear, experts}, update_softmax, gated, rms_norm, rotate, pack, dequantize, pack_columns, {}};
