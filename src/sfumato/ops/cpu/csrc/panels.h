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
//           vectors 0-3 and of 4-7 (128 bytes).  Two-bit codes are 2 vectors, with v in the bits
//           2 (v / 2) of vector v % 2 (128 bytes), and three-bit ones have a plane of bit 2 behind.
//   scales  16 float16 a block; 32 where a block has minima (behind the scales) or a scale for each
//           half of its columns (the first halves' before the second).  Where each half has both, 48
//           numbers of 16 bits: the float16 that the row's scales share, the one that its minima
//           share, and four factors of them: bits 0-3 and 4-7 are those of the first half's scale
//           and minimum, bits 8-11 and 12-15 those of the second's.
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

enum Kind { Q4, Q4M, Q5, Q5M, Q6, Q8, LUT4, BF16, S8, Q2M, Q3, LUT3X, LUT3S, KINDS };

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
    {4, 128, false, false},  // LUT4: the nibble picks a code of the kind's table
    {16, 0, false, false},   // BF16
    {8, 0, false, false},    // S8: signed codes, for activations that are never below zero
    {2, 0, true, true},      // Q2M
    {3, 4, false, true},     // Q3
    {4, 128, false, false},  // LUT3X and LUT3S: the same with tables of their own
    {4, 128, false, false},
};

// IQ4's values, moved by the offset of 128 so that they are unsigned.
constexpr uint8_t IQ4_TABLE[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                   129, 141, 153, 166, 181, 197, 217, 241};

// IQ3's magnitudes and, where bit 3 is set, what is as much below zero; moved likewise.
constexpr uint8_t IQ3_XXS_TABLE[16] = {132, 140, 148, 156, 164, 172, 180, 190,
                                       124, 116, 108, 100, 92,  84,  76,  66};
constexpr uint8_t IQ3_S_TABLE[16] = {129, 131, 133, 135, 137, 139, 141, 143,
                                     127, 125, 123, 121, 119, 117, 115, 113};

constexpr bool looked_up(int kind) { return kind == LUT4 || kind == LUT3X || kind == LUT3S; }

template <int KIND>
constexpr const uint8_t (&TABLE)[16] = KIND == LUT3X   ? IQ3_XXS_TABLE
                                       : KIND == LUT3S ? IQ3_S_TABLE
                                                       : IQ4_TABLE;

constexpr int64_t code_bytes(int kind) {
    return SHAPES[kind].bits * PANEL * BLOCK / 8;
}

constexpr int64_t scale_count(int kind) {
    if (kind == BF16) return 0;
    return PANEL * (1 + (SHAPES[kind].minimum ? 1 : 0) + (SHAPES[kind].halves ? 1 : 0));
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

// The codes of a block as vectors of dwords, see above; those that pick from a table already looked up.
template <int KIND>
inline void lanes_of(const uint8_t *codes, uint32_t (&lanes)[8][16]) {
    constexpr int bits = SHAPES[KIND].bits;
    if (bits == 8) {
        memcpy(lanes, codes, sizeof lanes);
        return;
    }
    uint32_t packed[4][16], plane[2][16];
    memcpy(packed, codes, bits < 4 ? 128 : 256);
    if (bits == 3) memcpy(plane, codes + 128, 64);
    if (bits > 4) memcpy(plane, codes + 256, (bits - 4) * 64);
    for (int v = 0; v < 8; v++)
        for (int r = 0; r < 16; r++) {
            uint32_t x = bits < 4 ? packed[v % 2][r] >> 2 * (v / 2) & 0x03030303
                                  : packed[v % 4][r] >> (v < 4 ? 0 : 4) & 0x0f0f0f0f;
            if (bits == 3) x |= (plane[0][r] >> v & 0x01010101) << 2;
            if (bits == 5) x |= (plane[0][r] >> v & 0x01010101) << 4;
            if (bits == 6) x |= (plane[v / 4][r] >> 2 * (v % 4) & 0x03030303) << 4;
            lanes[v][r] = x;
        }
    if (looked_up(KIND)) {
        auto *bytes = reinterpret_cast<uint8_t *>(lanes);
        for (size_t i = 0; i < sizeof lanes; i++) bytes[i] = TABLE<KIND>[bytes[i]];
    }
}

// A code as a number.
template <int KIND>
inline int code_of(uint32_t byte) {
    return KIND == S8 ? (int8_t)byte : (int)(byte & 255) - SHAPES[KIND].offset;
}

// Where each half has a scale and a minimum, they are products; see above.
template <int KIND>
constexpr bool TWO_LEVELS = SHAPES[KIND].minimum && SHAPES[KIND].halves;

// A block's scales and minima, of its first and of its second half.
template <int KIND>
inline void scales_of(const uint16_t *scales, float (&size)[2][16], float (&minimum)[2][16]) {
    constexpr Shape shape = SHAPES[KIND];
    for (int h = 0; h < 2; h++)
        for (int r = 0; r < 16; r++) {
            if (TWO_LEVELS<KIND>) {
                const int factors = scales[32 + r] >> 8 * h;
                size[h][r] = from_half(scales[r]) * (float)(factors & 15);
                minimum[h][r] = from_half(scales[16 + r]) * (float)(factors >> 4 & 15);
                continue;
            }
            size[h][r] = from_half(scales[shape.halves && h ? 16 + r : r]);
            minimum[h][r] = shape.minimum ? from_half(scales[16 + r]) : 0.0f;
        }
}

// A panel of another kind as a panel of bfloat16.
template <int KIND>
inline void widen_plainly(const uint8_t *codes, const uint16_t *scales, int64_t blocks, uint8_t *out) {
    for (int64_t b = 0; b < blocks; b++) {
        uint32_t lanes[8][16], pairs[16][16];
        float size[2][16], minimum[2][16];
        lanes_of<KIND>(codes, lanes);
        scales_of<KIND>(scales, size, minimum);
        for (int j = 0; j < 16; j++)
            for (int r = 0; r < 16; r++) {
                const uint32_t both = lanes[j / 2][r] >> 16 * (j % 2);
                const float s = size[j / 8][r], m = minimum[j / 8][r];
                const float low = s * (float)code_of<KIND>(both) + m;
                const float high = s * (float)code_of<KIND>(both >> 8) + m;
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
        case Q2M: return f.template operator()<Q2M>();
        case Q3: return f.template operator()<Q3>();
        case LUT3X: return f.template operator()<LUT3X>();
        case LUT3S: return f.template operator()<LUT3S>();
        default: return f.template operator()<BF16>();
    }
}

}  // namespace
#endif
