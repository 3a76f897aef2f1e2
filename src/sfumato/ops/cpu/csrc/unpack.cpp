// The values that panels stand for, for tests and for callers that need plain numbers.

#include "checks.h"
#include "panels.h"
#include "sfumato.h"
#include "threads.h"

namespace {

struct UnpackPanel {
    const uint8_t *codes;
    const uint16_t *scales;
    int64_t blocks, cols, count;
    float *out;

    template <int KIND>
    void operator()() const {
        for (int64_t b = 0; b < blocks; b++) {
            float values[BLOCK][16];
            block<KIND>(codes + b * code_bytes(KIND), scales + b * scale_count(KIND), values);
            for (int64_t r = 0; r < count; r++)
                for (int64_t k = 0; k < BLOCK && b * BLOCK + k < cols; k++)
                    out[r * cols + b * BLOCK + k] = values[k][r];
        }
    }

    template <int KIND>
    static void block(const uint8_t *at, const uint16_t *scale, float (&values)[BLOCK][16]) {
        if constexpr (KIND == BF16) {
            uint16_t pairs[16][16][2];
            memcpy(pairs, at, sizeof pairs);
            for (int k = 0; k < BLOCK; k++)
                for (int r = 0; r < 16; r++) values[k][r] = from_bf16(pairs[k / 2][r][k % 2]);
        } else {
            uint32_t lanes[8][16];
            float size[2][16], minimum[2][16];
            lanes_of<KIND>(at, lanes);
            scales_of<KIND>(scale, size, minimum);
            for (int k = 0; k < BLOCK; k++)
                for (int r = 0; r < 16; r++) {
                    const int code = code_of<KIND>(lanes[k / 4][r] >> 8 * (k % 4));
                    values[k][r] = size[k / 16][r] * (float)code + minimum[k / 16][r];
                }
        }
    }
};

}  // namespace

extern "C" int sf_unpack(int kind, const void *panels, int64_t matrices, int64_t rows, int64_t cols,
                         float *out, int threads) {
    if (!panels_ok(panels) || !out || threads < 1 || sf_panel_bytes(kind, rows, cols) < 0 ||
        !fits({matrices, rows, cols}))
        return SF_BAD_ARGUMENT;
    const int64_t each = ceil_div(rows, PANEL), bytes = matrix_bytes(kind, rows, cols);
    parallel_for(threads, matrices * each, [&](int64_t i) {
        const int64_t m = i / each, p = i % each;
        const Matrix from(kind, static_cast<const uint8_t *>(panels) + m * bytes, rows, cols);
        with_kind(kind, UnpackPanel{from.codes + p * from.blocks * code_bytes(kind),
                                    from.scales + p * from.blocks * scale_count(kind), from.blocks,
                                    cols, rows - p * PANEL < PANEL ? rows - p * PANEL : PANEL,
                                    out + (m * rows + p * PANEL) * cols});
    });
    return SF_OK;
}
