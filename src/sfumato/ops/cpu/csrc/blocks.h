// The ggml block formats, read 32 elements at a time.  Layouts follow ggml-common.h.
#ifndef SFUMATO_BLOCKS_H
#define SFUMATO_BLOCKS_H

#include "iq3_grids.h"
#include "panels.h"

namespace {

enum Type { T_Q4_0 = 2, T_Q5_0 = 6, T_Q5_1 = 7, T_Q8_0 = 8, T_Q2_K = 10, T_Q3_K = 11, T_Q4_K = 12, T_Q5_K = 13, T_Q6_K = 14,
            T_IQ3_XXS = 18, T_IQ4_NL = 20, T_IQ3_S = 21, T_IQ4_XS = 23, T_BF16 = 30 };

// Sixteen codes of a byte each, for bitwise operations on all of them in one register.
typedef uint64_t Codes __attribute__((vector_size(16)));

// 32 consecutive elements: value = scale[half] * (code - offset) + minimum[half].
struct Group {
    Codes codes[2];
    float scale[2], minimum[2];
};

struct Format {
    int kind, block_size, block_bytes;
};

// kind -1: unknown
constexpr Format format_of(int type) {
    switch (type) {
        case T_Q4_0: return {Q4, 32, 18};
        case T_Q5_0: return {Q5, 32, 22};
        case T_Q5_1: return {Q5M, 32, 24};
        case T_Q8_0: return {Q8, 32, 34};
        case T_Q2_K: return {Q2M, 256, 84};
        case T_Q3_K: return {Q3, 256, 110};
        case T_Q4_K: return {Q4M, 256, 144};
        case T_Q5_K: return {Q5M, 256, 176};
        case T_Q6_K: return {Q6, 256, 210};
        case T_IQ3_XXS: return {LUT3X, 256, 98};
        case T_IQ3_S: return {LUT3S, 256, 110};
        case T_IQ4_NL: return {LUT4, 32, 18};
        case T_IQ4_XS: return {LUT4, 256, 136};
        case T_BF16: return {BF16, 1, 2};
        default: return {-1, 1, 1};
    }
}

inline float half_at(const uint8_t *at) {
    uint16_t h;
    memcpy(&h, at, 2);
    return from_half(h);
}

constexpr uint64_t EACH = 0x0101010101010101u;  // byte

// (from[i] >> shift & mask) << up of sixteen bytes: what leaves a byte on one side and enters the
// next is masked off.
inline Codes bits_at(const uint8_t *from, int shift, uint64_t mask, int up = 0) {
    Codes x;
    memcpy(&x, from, sizeof x);
    return (x >> shift & EACH * mask) << up;
}

// The first 16 elements in low nibbles, the next in high ones.
inline void split_nibbles(const uint8_t *from, Codes (&codes)[2]) {
    codes[0] = bits_at(from, 0, 15);
    codes[1] = bits_at(from, 4, 15);
}

// Bit i of four bytes becomes bit 4 of code i.
inline void add_fifth_bits(const uint8_t *from, Codes (&codes)[2]) {
    for (int h = 0; h < 2; h++) {
        // Byte i keeps bit i alone; adding 127 carries whatever is left of it to the byte's top.
        const Codes bits = Codes{from[2 * h] * EACH, from[2 * h + 1] * EACH} & 0x8040201008040201u;
        codes[h] |= ((bits + EACH * 127) & EACH * 128) >> 3;
    }
}

// Scale and minimum of group g of a Q4_K or Q5_K block (twelve bytes hold eight 6-bit pairs).
inline void k_scale(const uint8_t *block, int g, Group &out) {
    const uint8_t *packed = block + 4;
    int scale, minimum;
    if (g < 4) {
        scale = packed[g] & 63;
        minimum = packed[g + 4] & 63;
    } else {
        scale = (packed[g + 4] & 15) | (packed[g - 4] >> 6 << 4);
        minimum = (packed[g + 4] >> 4) | (packed[g] >> 6 << 4);
    }
    out.scale[0] = out.scale[1] = half_at(block) * (float)scale;
    out.minimum[0] = out.minimum[1] = -(half_at(block + 2) * (float)minimum);
}

// One of the sixteen scales of a Q3_K block: twelve bytes hold sixteen times 6 bits.
inline int q3_k_scale(const uint8_t *packed, int i) {
    const int low = packed[i % 8] >> 4 * (i / 8) & 15, high = packed[8 + i % 4] >> 2 * (i / 4) & 3;
    return (low | high << 4) - 32;
}

// Four magnitudes of a grid, as bytes with what is below zero in bit 3; bit i of `signs` is of number i.
inline uint32_t with_signs(uint16_t four, int signs) {
    uint32_t codes = 0;
    for (int i = 0; i < 4; i++)
        codes |= (uint32_t)((four >> 3 * i & 7) | (signs >> i & 1) << 3) << 8 * i;
    return codes;
}

// 256 elements as 64 bytes, each the place of four magnitudes; then a dword for each 32 elements: four
// times seven signs, of which the eighth makes their number even, and a scale of four bits.
inline void read_iq3_xxs(const uint8_t *block, int g, Group &out) {
    const uint8_t *places = block + 2 + 8 * g;
    uint32_t word, codes[8];
    memcpy(&word, block + 66 + 4 * g, 4);
    for (int i = 0; i < 4; i++) {
        const int seven = word >> 7 * i & 127, signs = seven | (__builtin_popcount(seven) & 1) << 7;
        codes[2 * i] = with_signs(XXS_GRID[places[2 * i]], signs);
        codes[2 * i + 1] = with_signs(XXS_GRID[places[2 * i + 1]], signs >> 4);
    }
    memcpy(out.codes, codes, sizeof codes);
    out.scale[0] = out.scale[1] = half_at(block) * (0.5f + (float)(word >> 28)) * 0.5f;
}

// Places of nine bits: 64 bytes, and 8 with the top bits; then 32 bytes of signs, and a scale of four bits
// for each 32 elements.
inline void read_iq3_s(const uint8_t *block, int g, Group &out) {
    const uint8_t *places = block + 2 + 8 * g, *signs = block + 74 + 4 * g;
    uint32_t codes[8];
    for (int i = 0; i < 8; i++) {
        const int place = places[i] | (block[66 + g] >> i & 1) << 8;
        codes[i] = with_signs(S_GRID[place], signs[i / 2] >> 4 * (i % 2));
    }
    memcpy(out.codes, codes, sizeof codes);
    const int scale = block[106 + g / 2] >> 4 * (g % 2) & 15;
    out.scale[0] = out.scale[1] = half_at(block) * (float)(1 + 2 * scale);
}

template <int TYPE>
inline void read_group(const uint8_t *block, int g, Group &out) {
    out.minimum[0] = out.minimum[1] = 0.0f;
    if (TYPE == T_Q2_K) {
        for (int h = 0; h < 2; h++) {
            const int both = block[2 * g + h];
            out.codes[h] = bits_at(block + 16 + g / 4 * 32 + 16 * h, 2 * (g % 4), 3);
            out.scale[h] = half_at(block + 80) * (float)(both & 15);
            out.minimum[h] = -(half_at(block + 82) * (float)(both >> 4));
        }
        return;
    }
    if (TYPE == T_IQ3_XXS) return read_iq3_xxs(block, g, out);
    if (TYPE == T_IQ3_S) return read_iq3_s(block, g, out);
    if (TYPE == T_Q3_K) {
        for (int h = 0; h < 2; h++) {
            out.codes[h] = bits_at(block + 32 + g / 4 * 32 + 16 * h, 2 * (g % 4), 3) |
                           bits_at(block + 16 * h, g, 1, 2);
            out.scale[h] = half_at(block + 108) * (float)q3_k_scale(block + 96, 2 * g + h);
        }
        return;
    }
    if (TYPE == T_Q4_K || TYPE == T_Q5_K) {
        k_scale(block, g, out);
        const uint8_t *low = block + (TYPE == T_Q4_K ? 16 : 48) + g / 2 * 32;
        for (int h = 0; h < 2; h++) {
            out.codes[h] = bits_at(low + 16 * h, 4 * (g % 2), 15);
            if (TYPE == T_Q5_K) out.codes[h] |= bits_at(block + 16 + 16 * h, g, 1, 4);
        }
        return;
    }
    if (TYPE == T_Q6_K) {
        const uint8_t *low = block + g / 4 * 64 + g % 2 * 32, *high = block + 128 + g / 4 * 32;
        for (int h = 0; h < 2; h++) {
            out.codes[h] = bits_at(low + 16 * h, 4 * (g % 4 / 2), 15) |
                           bits_at(high + 16 * h, 2 * (g % 4), 3, 4);
            out.scale[h] = half_at(block + 208) * (float)(int8_t)block[192 + 2 * g + h];
        }
        return;
    }
    if (TYPE == T_IQ4_XS) {
        const int low = block[4 + g / 2] >> 4 * (g % 2) & 15;
        const int high = block[2 + g / 4] >> 2 * (g % 4) & 3;
        out.scale[0] = out.scale[1] = half_at(block) * (float)((low | high << 4) - 32);
        split_nibbles(block + 8 + 16 * g, out.codes);
        return;
    }
    out.scale[0] = out.scale[1] = half_at(block);
    if (TYPE == T_Q8_0)
        for (int h = 0; h < 2; h++) out.codes[h] = bits_at(block + 2 + 16 * h, 0, 255) ^ EACH * 128;
    else if (TYPE == T_Q5_0 || TYPE == T_Q5_1) {
        const uint8_t *bits = block + (TYPE == T_Q5_1 ? 4 : 2);
        split_nibbles(bits + 4, out.codes);
        add_fifth_bits(bits, out.codes);
        if (TYPE == T_Q5_1) out.minimum[0] = out.minimum[1] = half_at(block + 2);
    } else
        split_nibbles(block + 2, out.codes);
}

template <int TYPE>
constexpr Shape SHAPE_OF = SHAPES[format_of(TYPE).kind];

template <int TYPE>
constexpr bool LOOKED_UP = looked_up(format_of(TYPE).kind);

template <int TYPE>
constexpr const uint8_t (&TABLE_OF)[16] = TABLE<format_of(TYPE).kind>;

// 32 values, with ggml's own order of float operations.
template <int TYPE>
inline void plain_values(const Group &group, float *out) {
    constexpr Shape shape = SHAPE_OF<TYPE>;
    uint8_t codes[BLOCK];
    memcpy(codes, group.codes, sizeof codes);
    for (int h = 0; h < 2; h++)
        for (int i = 16 * h; i < 16 * h + 16; i++) {
            const int code = LOOKED_UP<TYPE> ? TABLE_OF<TYPE>[codes[i]] : codes[i];
            const float value = group.scale[h] * (float)(code - shape.offset);
            out[i] = shape.minimum ? value + group.minimum[h] : value;
        }
}

template <int TYPE>
inline void plain_halves(const Group &group, uint16_t *out) {
    float values[32];
    plain_values<TYPE>(group, values);
    for (int i = 0; i < 32; i++) out[i] = to_bf16(values[i]);
}

// Calls f with the type as a compile-time number; types that are not blocks do not come here.
template <class F>
void with_type(int type, F f) {
    switch (type) {
        case T_Q4_0: return f.template operator()<T_Q4_0>();
        case T_Q5_0: return f.template operator()<T_Q5_0>();
        case T_Q5_1: return f.template operator()<T_Q5_1>();
        case T_Q8_0: return f.template operator()<T_Q8_0>();
        case T_Q2_K: return f.template operator()<T_Q2_K>();
        case T_Q3_K: return f.template operator()<T_Q3_K>();
        case T_Q4_K: return f.template operator()<T_Q4_K>();
        case T_Q5_K: return f.template operator()<T_Q5_K>();
        case T_Q6_K: return f.template operator()<T_Q6_K>();
        case T_IQ3_XXS: return f.template operator()<T_IQ3_XXS>();
        case T_IQ3_S: return f.template operator()<T_IQ3_S>();
        case T_IQ4_NL: return f.template operator()<T_IQ4_NL>();
        case T_IQ4_XS: return f.template operator()<T_IQ4_XS>();
        default: return;
    }
}

}  // namespace
#endif
