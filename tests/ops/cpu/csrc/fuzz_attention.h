// Random calls of attention, for fuzz.cpp.
#ifndef SFUMATO_FUZZ_ATTENTION_H
#define SFUMATO_FUZZ_ATTENTION_H

#include "fuzz.h"

namespace {

void attention() {
    if (!sf_has_bf16()) return;
    const int64_t kv = pick(1, 2), group = pick(1, 3), heads = kv * group, d = 32 * pick(1, 3);
    const int64_t tokens = pick(1, 40), first = pick(0, 300), all = first + tokens;
    auto rows = random_rows(tokens * heads * d);
    for (auto &x : rows) x *= 0.1f;
    const int64_t odd = pick(-tokens, tokens - 1);  // the token whose first head is NaN
    if (odd >= 0) rows[odd * heads * d + pick(0, d - 1)] = NAN;
    Numbers q(rows), result(tokens * heads * d);
    Numbers parts[2][2] = {{Numbers(random_rows(kv * first * d)), Numbers(random_rows(tokens * kv * d))},
                           {Numbers(random_rows(kv * first * d)), Numbers(random_rows(tokens * kv * d))}};
    sf_rows segments[2][2];
    std::vector<float> plain[2][2];
    for (int i = 0; i < 2; i++)
        for (int s = 0; s < 2; s++) {
            segments[i][s] = {parts[i][s].data(), parts[i][s].dtype, s ? tokens : first,
                              s ? d : first * d, s ? kv * d : d};
            plain[i][s] = parts[i][s].floats();
        }
    std::vector<int32_t> mine(tokens), theirs(all);
    for (int64_t i = 0; i < tokens; i++) mine[i] = (int32_t)(first + i);
    for (int64_t i = 0; i < all; i++) theirs[i] = (int32_t)i;
    const bool masked = pick(0, 1);
    const int64_t window = pick(0, 1) ? pick(0, 50) : INT64_MAX;
    check(!sf_attention(q.data(), q.dtype, tokens, heads, kv, d, segments[0], segments[1], 2,
                        masked ? mine.data() : nullptr, masked ? theirs.data() : nullptr, window,
                        result.data(), result.dtype, (int)pick(1, 3)),
          "sf_attention");
    const auto numbers = q.floats();
    auto out = result.floats();
    std::vector<double> wanted(out.size(), 0.0);
    const auto at = [&](int i, int64_t key, int64_t head) {
        const sf_rows &part = segments[i][key >= first];
        return &plain[i][key >= first][head * part.head_stride +
                                       (key < first ? key : key - first) * part.row_stride];
    };
    for (int64_t i = 0; i < tokens * heads; i++) {
        const int64_t token = i / heads, head = i % heads / group;
        const bool blind = masked && window == 0;
        if (token == odd && i % heads == 0) {
            for (int64_t k = 0; k < d; k++) {
                check(blind || std::isnan(out[i * d + k]), "sf_attention: lost a NaN");
                out[i * d + k] = 0;
            }
            continue;
        }
        double sum = 0;
        for (int64_t key = 0; key < all; key++) {
            const int64_t gap = first + token - key;
            if (masked && (gap < 0 || gap >= window)) continue;
            double score = 0;
            for (int64_t k = 0; k < d; k++) score += (double)numbers[i * d + k] * at(0, key, head)[k];
            const double mass = std::exp(score);
            sum += mass;
            for (int64_t k = 0; k < d; k++) wanted[i * d + k] += mass * at(1, key, head)[k];
        }
        for (int64_t k = 0; k < d; k++) wanted[i * d + k] /= blind ? 1 : sum;
    }
    check(distance(out, wanted) < 0.03, "sf_attention: wrong result");
}

// Canvases of several rows, each of which is what sf_attention makes of it.
void canvas_attention() {
    if (!sf_has_bf16()) return;
    const int64_t rows = pick(1, 3), length = pick(1, 20), kv = pick(1, 2), heads = kv * pick(1, 3);
    const int64_t d = 32, stored = pick(1, 3), size = pick(1, 40);
    Numbers q(random_rows(rows * length * heads * d)), k(1), v(1), out(1);
    k = random_numbers(q.dtype, rows * length * kv * d), v = random_numbers(q.dtype, rows * length * kv * d);
    out = random_numbers(q.dtype, rows * length * heads * d);
    Numbers keys(random_rows(stored * kv * size * d)), values(1), alone(1);
    values = random_numbers(keys.dtype, stored * kv * size * d);
    std::vector<int64_t> slots(rows), held(rows), width(rows);
    for (int64_t row = 0; row < rows; row++) {
        slots[row] = pick(0, stored - 1);
        held[row] = pick(0, size);
        width[row] = pick(0, length);
    }
    sf_canvas_call call = {q.data(), k.data(), v.data(), keys.data(), values.data(),
                           q.dtype, keys.dtype, rows, length, heads, kv, d, stored, size,
                           slots.data(), held.data(), width.data(), out.data()};
    check(!sf_canvas_attention(&call, (int)pick(1, 3)), "sf_canvas_attention");
    const auto part = [](Numbers &of, int64_t at) {
        return static_cast<char *>(of.data()) + at * (of.dtype == SF_F32 ? 4 : 2);
    };
    for (int64_t row = 0; row < rows; row++) {
        if (!width[row]) continue;
        const int64_t slot = slots[row] * kv * size * d, mine = row * length * kv * d;
        const sf_rows both[2][2] = {
            {{part(keys, slot), keys.dtype, held[row], size * d, d},
             {part(k, mine), k.dtype, width[row], d, kv * d}},
            {{part(values, slot), values.dtype, held[row], size * d, d},
             {part(v, mine), v.dtype, width[row], d, kv * d}}};
        const int64_t count = width[row] * heads * d, first = row * length * heads * d;
        alone = random_numbers(q.dtype, count);
        check(!sf_attention(part(q, first), q.dtype, width[row], heads, kv, d, both[0], both[1], 2,
                            nullptr, nullptr, 0, alone.data(), q.dtype, 1),
              "sf_attention of a row");
        check(!memcmp(alone.data(), part(out, first), count * (q.dtype == SF_F32 ? 4 : 2)),
              "sf_canvas_attention: a row is another than alone");
    }
    int64_t *const wrong[] = {&slots[0], &held[0], &width[0]};
    const int64_t most[] = {stored - 1, size, length};
    for (int i = 0; i < 3; i++) {
        const int64_t before = *wrong[i];
        for (int64_t bad : {(int64_t)-1, most[i] + 1}) {
            *wrong[i] = bad;
            check(sf_canvas_attention(&call, 1) == SF_BAD_ARGUMENT, "sf_canvas_attention: took any");
        }
        *wrong[i] = before;
    }
}

}  // namespace
#endif
