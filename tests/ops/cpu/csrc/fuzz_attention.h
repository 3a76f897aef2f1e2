// Random calls of attention, for fuzz.cpp.
#ifndef SFUMATO_FUZZ_ATTENTION_H
#define SFUMATO_FUZZ_ATTENTION_H

#include <algorithm>

#include "fuzz.h"

namespace {

// Which positions queries at some positions see: their own and those before, or any; or none are named.
struct Bounds {
    bool masked = pick(0, 1);
    std::vector<int32_t> first, last;

    explicit Bounds(const std::vector<int32_t> &own) {
        const bool causal = pick(0, 1);
        const int64_t window = pick(0, 1) ? pick(0, 50) : 1 << 30;
        for (const int32_t at : own) {
            last.push_back((int32_t)(causal ? at : pick(0, 2 * at)));
            first.push_back((int32_t)(causal ? at - window + 1 : pick(-1, last.back() + 1)));
        }
        last.push_back(0), first.push_back(0);  // an address where there are none
    }

    const int32_t *first_of(int64_t query) const { return masked ? first.data() + query : nullptr; }
    const int32_t *last_of(int64_t query) const { return masked ? last.data() + query : nullptr; }
};

void attention(int isa) {
    if (!sf_attends(isa)) return;
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
    std::vector<int32_t> own(tokens), theirs(all);
    for (int64_t i = 0; i < tokens; i++) own[i] = (int32_t)(first + i);
    for (int64_t i = 0; i < all; i++) theirs[i] = (int32_t)i;
    const Bounds bounds(own);
    check(!sf_attention(isa, q.data(), q.dtype, tokens, heads, kv, d, segments[0], segments[1], 2,
                        bounds.first_of(0), bounds.last_of(0), bounds.masked ? theirs.data() : nullptr,
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
        const int64_t begin = bounds.masked ? std::max(0, bounds.first[token]) : 0;
        const int64_t end = bounds.masked ? std::min(all, (int64_t)bounds.last[token] + 1) : all;
        const bool blind = begin >= end;
        if (token == odd && i % heads == 0) {
            for (int64_t k = 0; k < d; k++) {
                check(blind || std::isnan(out[i * d + k]), "sf_attention: lost a NaN");
                out[i * d + k] = 0;
            }
            continue;
        }
        double sum = 0;
        for (int64_t key = begin; key < end; key++) {
            double score = 0;
            for (int64_t k = 0; k < d; k++) score += (double)numbers[i * d + k] * at(0, key, head)[k];
            const double mass = std::exp(score);
            sum += mass;
            for (int64_t k = 0; k < d; k++) wanted[i * d + k] += mass * at(1, key, head)[k];
        }
        for (int64_t k = 0; k < d; k++) wanted[i * d + k] /= blind ? 1 : sum;
    }
    const bool in_bf16 = (isa == SF_AVX512 || isa == SF_AMX) && sf_has_bf16();
    const bool rounded = in_bf16 || result.dtype == SF_BF16;
    check(distance(out, wanted) < (rounded ? 0.03 : 1e-5), "sf_attention: wrong result");
}

// Canvases of several rows, each of which is what sf_attention makes of it.
void canvas_attention(int isa) {
    if (!sf_attends(isa)) return;
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
    check(!sf_canvas_attention(isa, &call, (int)pick(1, 3)), "sf_canvas_attention");
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
        check(!sf_attention(isa, part(q, first), q.dtype, width[row], heads, kv, d, both[0], both[1], 2,
                            nullptr, nullptr, nullptr, alone.data(), q.dtype, 1),
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
            check(sf_canvas_attention(isa, &call, 1) == SF_BAD_ARGUMENT, "sf_canvas_attention: took any");
        }
        *wrong[i] = before;
    }
}

// Rows that follow one prefix, each of which is what sf_attention makes of it.
void shared_attention(int isa) {
    if (!sf_attends(isa)) return;
    const int64_t rows = pick(1, 4), kv = pick(1, 2), heads = kv * pick(1, 3), d = 32 * pick(1, 2);
    const int64_t shared = pick(0, 2), first = pick(0, 1) ? pick(0, 40) : pick(200, 600);
    std::vector<int64_t> queries(rows), segments(rows);
    std::vector<Numbers> keys, values;
    std::vector<sf_rows> key_rows, value_rows;
    std::vector<int32_t> own, theirs;
    const auto segment = [&](int64_t count, int64_t position) {
        keys.emplace_back(random_rows(kv * count * d));
        values.emplace_back(random_rows(kv * count * d));
        const bool by_head = pick(0, 1);
        key_rows.push_back({nullptr, 0, count, by_head ? count * d : d, by_head ? d : kv * d});
        value_rows.push_back(key_rows.back());
        for (int64_t i = 0; i < count; i++) theirs.push_back((int32_t)(position + i));
    };
    for (int64_t s = 0; s < shared; s++) segment(s ? pick(0, 9) : first, s ? first : 0);
    const int64_t prefix = (int64_t)theirs.size();
    for (int64_t row = 0; row < rows; row++) {
        queries[row] = pick(0, 30);
        segments[row] = pick(1, 2);
        for (int64_t s = 0; s < segments[row]; s++) segment(pick(1, 40), prefix + 40 * s);
        for (int64_t i = 0; i < queries[row]; i++) own.push_back((int32_t)(prefix + pick(0, 80)));
    }
    for (size_t s = 0; s < keys.size(); s++) {
        key_rows[s].data = keys[s].data(), key_rows[s].dtype = keys[s].dtype;
        value_rows[s].data = values[s].data(), value_rows[s].dtype = values[s].dtype;
    }
    const int64_t all = (int64_t)own.size(), size = heads * d;
    const Bounds bounds(own);
    Numbers q(random_rows(all * size)), out(1), alone(1);
    out = random_numbers(q.dtype, all * size);
    const sf_shared_call call = {q.data(), q.dtype, rows, heads, kv, d, key_rows.data(), value_rows.data(),
                                 shared, segments.data(), queries.data(), bounds.first_of(0),
                                 bounds.last_of(0), bounds.masked ? theirs.data() : nullptr, out.data(),
                                 q.dtype};
    check(!sf_shared_attention(isa, &call, (int)pick(1, 3)), "sf_shared_attention");
    const auto part = [](Numbers &of, int64_t at) {
        return static_cast<char *>(of.data()) + at * (of.dtype == SF_F32 ? 4 : 2);
    };
    int64_t query = 0, at = shared, key = prefix;
    for (int64_t row = 0; row < rows; row++) {
        std::vector<sf_rows> both[2] = {{key_rows.begin(), key_rows.begin() + shared},
                                        {value_rows.begin(), value_rows.begin() + shared}};
        std::vector<int32_t> seen(theirs.begin(), theirs.begin() + prefix);
        for (int64_t s = 0; s < segments[row]; s++, at++) {
            both[0].push_back(key_rows[at]);
            both[1].push_back(value_rows[at]);
            seen.insert(seen.end(), theirs.begin() + key, theirs.begin() + key + key_rows[at].count);
            key += key_rows[at].count;
        }
        alone = random_numbers(q.dtype, queries[row] * size);
        check(!sf_attention(isa, part(q, query * size), q.dtype, queries[row], heads, kv, d, both[0].data(),
                            both[1].data(), (int64_t)both[0].size(), bounds.first_of(query),
                            bounds.last_of(query), bounds.masked ? seen.data() : nullptr, alone.data(),
                            q.dtype, 1),
              "sf_attention of a row that shares");
        check(!memcmp(alone.data(), part(out, query * size), queries[row] * size * (q.dtype == SF_F32 ? 4 : 2)),
              "sf_shared_attention: a row is another than alone");
        query += queries[row];
    }
    const auto refuses = [&](auto change) {
        sf_shared_call wrong = call;
        change(wrong);
        check(sf_shared_attention(isa, &wrong, 1) == SF_BAD_ARGUMENT, "sf_shared_attention: took any");
    };
    refuses([](sf_shared_call &c) { c.rows = 0; });
    refuses([](sf_shared_call &c) { c.shared = -1; });
    if (bounds.masked) refuses([](sf_shared_call &c) { c.last = nullptr; });
    refuses([](sf_shared_call &c) { c.d = 16; });
    refuses([](sf_shared_call &c) { c.keys = nullptr; });
    refuses([](sf_shared_call &c) { c.out_dtype = 7; });
    for (std::vector<int64_t> *numbers : {&queries, &segments}) {
        const int64_t before = numbers->front();
        numbers->front() = -1;
        refuses([](sf_shared_call &) {});
        numbers->front() = (int64_t)1 << 50;
        refuses([](sf_shared_call &) {});
        numbers->front() = before;
    }
    check(sf_shared_attention(isa, nullptr, 1) == SF_BAD_ARGUMENT, "sf_shared_attention: took nothing");
}

}  // namespace
#endif
