// Random keys and values in 8 bits, for fuzz.cpp: attention has the bits that it has over what they stand
// for.
#ifndef SFUMATO_FUZZ_NARROW_H
#define SFUMATO_FUZZ_NARROW_H

#include "fuzz_attention.h"

namespace {

int64_t narrow_width(int dtype, int64_t d) { return dtype == SF_FP8 ? d : d + d / 32 * 2; }

// Rows of bytes that are all numbers.
std::vector<uint8_t> narrow_rows(int dtype, int64_t count, int64_t d) {
    std::vector<uint8_t> out(count * narrow_width(dtype, d));
    const uint8_t kept = pick(0, 1) ? 0xff : 0xbf;  // all, or those below 2
    for (auto &x : out) x = (uint8_t)source() & kept;
    if (dtype == SF_FP8) {
        for (auto &x : out) x = (x & 0x7f) == 0x7f ? 0 : x;
        return out;
    }
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < d / 32; i++) {
            // Float16 up to 2^-5, and those that its exponent does not reach.
            const uint16_t scale = (uint16_t)((pick(0, 1) << 15) | (pick(0, 9) << 10) | pick(0, 1023));
            memcpy(&out[row * narrow_width(dtype, d) + d + 2 * i], &scale, 2);
        }
    return out;
}

// Number i of a row, as a formula has it.
float narrow_number(int dtype, const uint8_t *row, int64_t d, int64_t i) {
    if (dtype == SF_FP8) {
        const int exponent = row[i] >> 3 & 15, rest = row[i] & 7;
        const double size = exponent ? std::ldexp(8 + rest, exponent - 10) : std::ldexp(rest, -9);
        return (float)(row[i] & 0x80 ? -size : size);
    }
    uint16_t half;
    memcpy(&half, row + d + i / 32 * 2, 2);
    const int exponent = half >> 10 & 31, rest = half & 1023;
    const double size = exponent ? std::ldexp(1024 + rest, exponent - 25) : std::ldexp(rest, -24);
    const float x = (float)(int8_t)row[i] * (float)(half & 0x8000 ? -size : size);
    if (dtype == SF_Q8_0) return x;
    uint32_t bits;  // to the nearest, of two the even one
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    float rounded;
    memcpy(&rounded, &bits, 4);
    return rounded;
}

// What rows stand for, in float32 or, where that has them all, in bfloat16.
Numbers widened(int dtype, const std::vector<uint8_t> &rows, int64_t d) {
    const int64_t width = narrow_width(dtype, d), count = (int64_t)rows.size() / width;
    std::vector<float> out(count * d);
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < d; i++) out[row * d + i] = narrow_number(dtype, &rows[row * width], d, i);
    Numbers numbers(out);
    while (dtype == SF_Q8_0 && numbers.dtype != SF_F32) numbers = Numbers(out);
    return numbers;
}

// A canvas over a slot, and a row's tokens over the same behind keys in segments.
void narrow_attention(int isa) {
    if (!sf_attends(isa)) return;
    const int dtype = (int)pick(SF_FP8, SF_Q8_0_BF16);
    const int64_t kv = pick(1, 2), heads = kv * pick(1, 3), d = 32 * pick(1, 3), wide = narrow_width(dtype, d);
    const int64_t stored = pick(1, 3), size = pick(1, 80), length = pick(1, 20);
    auto rows = random_rows(length * heads * d);
    for (auto &x : rows) x *= 0.1f;
    Numbers q(rows), new_keys(1), out(1), alone(1);
    new_keys = random_numbers(q.dtype, length * kv * d);
    out = random_numbers(q.dtype, length * heads * d), alone = random_numbers(q.dtype, length * heads * d);
    const int64_t bytes = length * heads * d * (q.dtype == SF_F32 ? 4 : 2);
    const auto keys = narrow_rows(dtype, stored * kv * size, d), values = narrow_rows(dtype, stored * kv * size, d);
    Numbers wide_keys = widened(dtype, keys, d), wide_values = widened(dtype, values, d);
    while (wide_values.dtype != wide_keys.dtype) wide_values = widened(dtype, values, d);
    const int64_t slot = pick(0, stored - 1), held = pick(0, size), width = length;
    sf_canvas_call call = {q.data(), new_keys.data(), new_keys.data(), keys.data(), values.data(),
                           q.dtype, dtype, 1, length, heads, kv, d, stored, size,
                           &slot, &held, &width, out.data()};
    check(!sf_canvas_attention(isa, &call, (int)pick(1, 3)), "sf_canvas_attention: narrow");
    call.keys = wide_keys.data(), call.values = wide_values.data(), call.stored_dtype = wide_keys.dtype;
    call.out = alone.data();
    check(!sf_canvas_attention(isa, &call, 1), "sf_canvas_attention: widened");
    check(!memcmp(out.data(), alone.data(), bytes), "sf_canvas_attention: narrow keys are others than widened");

    std::vector<int32_t> own(length), theirs(held + length);
    for (size_t i = 0; i < own.size(); i++) own[i] = (int32_t)(held + i);
    for (size_t i = 0; i < theirs.size(); i++) theirs[i] = (int32_t)i;
    const Bounds bounds(own);
    const int64_t split = pick(0, held);
    const auto attend = [&](int kind, int64_t of_row, const void *k, const void *v, Numbers &to) {
        const int64_t each = kind == SF_F32 ? 4 : kind == SF_BF16 ? 2 : 1, head = size * of_row;
        const auto at = [&](const void *data, int64_t row) {
            return static_cast<const char *>(data) + (slot * kv * size + row) * of_row * each;
        };
        const sf_rows last = {new_keys.data(), new_keys.dtype, length, d, kv * d};
        // The last keys of a slot before the first ones, as a ring has them.
        const sf_rows both[2][3] = {
            {{at(k, split), kind, held - split, head, of_row}, {at(k, 0), kind, split, head, of_row}, last},
            {{at(v, split), kind, held - split, head, of_row}, {at(v, 0), kind, split, head, of_row}, last}};
        return sf_attention(isa, q.data(), q.dtype, length, heads, kv, d, both[0], both[1], 3,
                            bounds.first_of(0), bounds.last_of(0), bounds.masked ? theirs.data() : nullptr,
                            to.data(), to.dtype, (int)pick(1, 3));
    };
    check(!attend(dtype, wide, keys.data(), values.data(), out), "sf_attention: narrow");
    check(!attend(wide_keys.dtype, d, wide_keys.data(), wide_values.data(), alone), "sf_attention: widened");
    check(!memcmp(out.data(), alone.data(), bytes), "sf_attention: narrow keys are others than widened");

    call.keys = keys.data(), call.values = values.data();
    for (int wrong : {-1, SF_Q8_0_BF16 + 1}) {
        call.stored_dtype = wrong;
        check(sf_canvas_attention(isa, &call, 1) == SF_BAD_ARGUMENT, "sf_canvas_attention: took any dtype");
    }
    call.stored_dtype = SF_Q8_0, call.d = 48;
    check(sf_canvas_attention(isa, &call, 1) == SF_BAD_ARGUMENT, "sf_canvas_attention: took any width");
}

}  // namespace
#endif
