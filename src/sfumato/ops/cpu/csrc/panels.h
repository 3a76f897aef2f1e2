// How a packed weight lies in memory, and the small conversions that every level shares.
//
// A weight [rows][cols] is cut into panels of 16 rows (the last filled up with zeros) and blocks of
// 32 columns.  Behind one another lie the codes of all panels, then their scales.
//
//   codes   8 vectors of 16 dwords: dword r of vector v holds the codes of row r at columns
//           4v .. 4v + 3.  Eight-bit codes are stored like that (512 bytes a block); four-bit ones
//           as 4 such vectors, vector v in the low nibbles and v + 4 in the high ones (256 bytes).
//           Five- and six-bit codes have their high bits in planes behind: one plane whose byte
//           has bit 4 of vector v in its bit v (64 bytes), or two planes with bits 4 and 5 of
//           vectors 0-3 and of 4-7 (128 bytes).
//   scales  16 float16 a block; 32 where a block has minima (behind the scales) or a scale for each
//           half of its columns (the first halves' before the second).
//
// A value is scale * code + minimum; without stored minima it is scale * (code - offset).
// BF16 panels hold values: [col / 2][16 rows][2], no scales.
//
// Everything here has internal linkage on purpose: the levels are compiled for different
// instruction sets, and the linker must not merge their copies.
#ifndef SFUMATO_PANELS_H
#define SFUMATO_PANELS_H

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t PANEL = 16, BLOCK = 32;

enum Kind { Q4, Q4M, Q5, Q5M, Q6, Q8, LUT4, BF16, S8, KINDS };

struct Shape {
    int bits, offset;
    bool minimum, halves;
};

constexpr Shape SHAPES[KINDS] = {
    {4, 8, false, false},    // Q4
    {4, 0, true, false},     // Q4M
    {5, 16, false, false},   // Q5
    {5, 0, true, false},     // Q5M
    {6, 32, false, true},    // Q6
    {8, 128, false, false},  // Q8
    {4, 128, false, false},  // LUT4: the nibble picks a code of TABLE
    {16, 0, false, false},   // BF16
    {8, 0, false, false},    // S8: signed codes, for activations that are never below zero
};

// IQ4's values, moved by the offset of 128 so that they are unsigned.
constexpr uint8_t TABLE[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                               129, 141, 153, 166, 181, 197, 217, 241};

constexpr int64_t code_bytes(int kind) {
    return SHAPES[kind].bits * PANEL * BLOCK / 8;
}

constexpr int64_t scale_count(int kind) {
    return kind == BF16 ? 0 : PANEL * (SHAPES[kind].minimum || SHAPES[kind].halves ? 2 : 1);
}

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// One packed matrix: where its panels begin.
struct Matrix {
    const uint8_t *codes;
    const uint16_t *scales;
    int64_t panels, blocks;

    Matrix(int kind, const void *data, int64_t rows, int64_t cols)
        : codes(static_cast<const uint8_t *>(data)),
          panels(ceil_div(rows, PANEL)),
          blocks(ceil_div(cols, BLOCK)) {
        scales = reinterpret_cast<const uint16_t *>(codes + panels * blocks * code_bytes(kind));
    }
};

inline int64_t matrix_bytes(int kind, int64_t rows, int64_t cols) {
    return ceil_div(rows, PANEL) * ceil_div(cols, BLOCK) * (code_bytes(kind) + 2 * scale_count(kind));
}

inline uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

inline float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

inline float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

// Round to nearest even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 64 : rounded);
}

#if defined(__F16C__)  // by the level's own target: one instruction each

inline float from_half(uint16_t h) { return _cvtsh_ss(h); }

inline void from_halves(const uint16_t (&from)[PANEL], float (&to)[PANEL]) {
    for (int i = 0; i < PANEL; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
}

inline void to_halves(const float (&from)[PANEL], uint16_t *to) {
    for (int i = 0; i < PANEL; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i),
                                                              _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__aarch64__)

inline float from_half(uint16_t h) {
    __fp16 x;
    memcpy(&x, &h, 2);
    return x;
}

inline void from_halves(const uint16_t (&from)[PANEL], float (&to)[PANEL]) {
    for (int i = 0; i < PANEL; i++) to[i] = from_half(from[i]);
}

inline void to_halves(const float (&from)[PANEL], uint16_t *to) {
    for (int i = 0; i < PANEL; i++) {
        const __fp16 x = from[i];
        memcpy(to + i, &x, 2);
    }
}

#else

inline float from_half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    // Scaling by a power of two moves the exponent, and makes subnormal numbers normal.
    return float_of(sign | bits_of(float_of(rest << 13) * float_of(0x77800000)));
}

// Round to nearest even; what exceeds the range becomes infinite.
inline uint16_t to_half(float x) {
    const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000;
    const float size = float_of(u & 0x7fffffff);
    if (!(size <= 65504.0f)) return (uint16_t)(sign | (size != size ? 0x7e00 : 0x7c00));
    if (size < 6.103515625e-5f)  // subnormal: its unit is 2^-24, which 0.5 makes the last bit
        return (uint16_t)(sign | (bits_of(size + 0.5f) - bits_of(0.5f)));
    const uint32_t v = bits_of(size), even = (v >> 13) & 1;
    return (uint16_t)(sign | ((v + 0xfff + even - 0x38000000) >> 13));
}

inline void from_halves(const uint16_t (&from)[PANEL], float (&to)[PANEL]) {
    for (int i = 0; i < PANEL; i++) to[i] = from_half(from[i]);
}

inline void to_halves(const float (&from)[PANEL], uint16_t *to) {
    for (int i = 0; i < PANEL; i++) to[i] = to_half(from[i]);
}

#endif

// The codes of a block as vectors of dwords, see above; LUT4's already looked up.
template <int KIND>
inline void lanes_of(const uint8_t *codes, uint32_t (&lanes)[8][16]) {
    constexpr int bits = SHAPES[KIND].bits;
    if (bits == 8) {
        memcpy(lanes, codes, sizeof lanes);
        return;
    }
    uint32_t packed[4][16], plane[2][16];
    memcpy(packed, codes, sizeof packed);
    if (bits > 4) memcpy(plane, codes + 256, (bits - 4) * 64);
    for (int v = 0; v < 8; v++)
        for (int r = 0; r < 16; r++) {
            uint32_t x = packed[v % 4][r] >> (v < 4 ? 0 : 4) & 0x0f0f0f0f;
            if (bits == 5) x |= (plane[0][r] >> v & 0x01010101) << 4;
            if (bits == 6) x |= (plane[v / 4][r] >> 2 * (v % 4) & 0x03030303) << 4;
            lanes[v][r] = x;
        }
    if (KIND == LUT4) {
        auto *bytes = reinterpret_cast<uint8_t *>(lanes);
        for (size_t i = 0; i < sizeof lanes; i++) bytes[i] = TABLE[bytes[i]];
    }
}

// A code as a number.
template <int KIND>
inline int code_of(uint32_t byte) {
    return KIND == S8 ? (int8_t)byte : (int)(byte & 255) - SHAPES[KIND].offset;
}

// A panel of another kind as a panel of bfloat16.
template <int KIND>
inline void widen_plainly(const uint8_t *codes, const uint16_t *scales, int64_t blocks, uint8_t *out) {
    constexpr Shape shape = SHAPES[KIND];
    for (int64_t b = 0; b < blocks; b++) {
        uint32_t lanes[8][16], pairs[16][16];
        float size[2][16], minimum[16];
        lanes_of<KIND>(codes, lanes);
        for (int r = 0; r < 16; r++) {
            size[0][r] = from_half(scales[r]);
            size[1][r] = shape.halves ? from_half(scales[16 + r]) : size[0][r];
            minimum[r] = shape.minimum ? from_half(scales[16 + r]) : 0.0f;
        }
        for (int j = 0; j < 16; j++)
            for (int r = 0; r < 16; r++) {
                const uint32_t both = lanes[j / 2][r] >> 16 * (j % 2);
                const float s = size[j / 8][r];
                const float low = s * (float)code_of<KIND>(both) + minimum[r];
                const float high = s * (float)code_of<KIND>(both >> 8) + minimum[r];
                const uint32_t a = bits_of(low), c = bits_of(high);
                pairs[j][r] = (a + 0x7fff + (a >> 16 & 1)) >> 16 |
                              ((c + 0x7fff + (c >> 16 & 1)) & 0xffff0000);
            }
        memcpy(out, pairs, sizeof pairs);
        codes += code_bytes(KIND);
        scales += scale_count(KIND);
        out += sizeof pairs;
    }
}

// Calls f<KIND>() for a kind that is only known when running.
template <class F>
inline void with_kind(int kind, F f) {
    switch (kind) {
        case Q4: return f.template operator()<Q4>();
        case Q4M: return f.template operator()<Q4M>();
        case Q5: return f.template operator()<Q5>();
        case Q5M: return f.template operator()<Q5M>();
        case Q6: return f.template operator()<Q6>();
        case Q8: return f.template operator()<Q8>();
        case LUT4: return f.template operator()<LUT4>();
        case S8: return f.template operator()<S8>();
        default: return f.template operator()<BF16>();
    }
}

}  // namespace
#endif
