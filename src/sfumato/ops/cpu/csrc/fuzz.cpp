// Random calls of every operation, for a run under the address and undefined-behaviour sanitizers:
//   g++ -std=c++17 -O1 -g -fopenmp -fsanitize=address,undefined *.cpp -o fuzz && ./fuzz [seed]
// All memory is exactly as large as the interface says.  Results are held against plain loops in
// double precision, so that it is a test of its own as well.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "sfumato.h"

namespace {

std::mt19937 source;

int64_t pick(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(source);
}

float normal() { return std::normal_distribution<float>()(source); }

void check(bool good, const char *what) {
    if (!good) {
        std::fprintf(stderr, "fuzz: %s\n", what);
        std::exit(1);
    }
}

struct Format {
    int type, size, bytes;
    std::vector<int> halves;  // where a block's float16 numbers lie
};

const std::vector<Format> FORMATS = {
    {2, 32, 18, {0}},      {6, 32, 22, {0}},       {7, 32, 24, {0, 2}},
    {8, 32, 34, {0}},      {12, 256, 144, {0, 2}}, {13, 256, 176, {0, 2}},
    {14, 256, 210, {208}}, {20, 32, 18, {0}},      {23, 256, 136, {0}},
};

// Any bytes are valid codes; scales are kept small.
std::vector<uint8_t> random_blocks(const Format &format, int64_t elements) {
    std::vector<uint8_t> out(elements / format.size * format.bytes);
    for (auto &byte : out) byte = (uint8_t)pick(0, 255);
    for (size_t at = 0; at < out.size(); at += format.bytes)
        for (int half : format.halves) {
            const uint16_t scale = (uint16_t)(pick(0, 1) << 15 | pick(0x1000, 0x2000));
            memcpy(&out[at + half], &scale, 2);
        }
    return out;
}

struct Weight {
    int kind;
    std::vector<uint8_t> panels;
    std::vector<float> values;  // [matrices][rows][cols]
};

int random_isa() {
    int isa;
    do isa = (int)pick(0, 2);
    while (sf_isa_available(isa) != 1);
    return isa;
}

Weight random_weight(int64_t matrices, int64_t rows, int64_t cols, const Format *format) {
    Weight weight;
    const int type = format ? format->type : 30;
    std::vector<uint8_t> blocks;
    if (format)
        blocks = random_blocks(*format, matrices * rows * cols);
    else
        for (int64_t i = 0; i < matrices * rows * cols; i++) {
            const float x = normal();
            uint32_t bits;
            memcpy(&bits, &x, 4);
            blocks.push_back((uint8_t)(bits >> 16));
            blocks.push_back((uint8_t)(bits >> 24));
        }
    weight.kind = sf_kind(type);
    weight.panels.resize(matrices * sf_panel_bytes(weight.kind, rows, cols));
    weight.values.resize(matrices * rows * cols);
    // From an odd address, as blocks may lie in a mapped file.
    std::vector<uint8_t> odd(blocks.size() + 1);
    memcpy(odd.data() + 1, blocks.data(), blocks.size());
    const int threads = (int)pick(1, 3);
    check(!sf_pack(random_isa(), type, odd.data() + 1, matrices, rows, cols, weight.panels.data(),
                   threads),
          "sf_pack");
    check(!sf_unpack(weight.kind, weight.panels.data(), matrices, rows, cols, weight.values.data(),
                     threads),
          "sf_unpack");
    if (format) {
        std::vector<float> exact(weight.values.size());
        check(!sf_dequantize(random_isa(), type, odd.data() + 1, (int64_t)exact.size(),
                             exact.data(), SF_F32, threads),
              "sf_dequantize");
        for (size_t i = 0; i < exact.size(); i++)
            check(std::fabs(exact[i] - weight.values[i]) <= 0.02f * std::fabs(exact[i]) + 0.02f,
                  "values of panels and blocks differ");
    }
    return weight;
}

std::vector<float> random_rows(int64_t count) {
    std::vector<float> out(count);
    for (auto &x : out) x = normal();
    return out;
}

double distance(const std::vector<float> &got, const std::vector<double> &wanted) {
    double error = 0, size = 1e-30;
    for (size_t i = 0; i < got.size(); i++) {
        error += (got[i] - wanted[i]) * (got[i] - wanted[i]);
        size += wanted[i] * wanted[i];
    }
    return std::sqrt(error / size);
}

const Format *random_format() { return pick(0, 9) ? &FORMATS[pick(0, 8)] : nullptr; }

void linear() {
    const Format *format = random_format();
    const int64_t cols = format ? format->size * pick(1, 3) : pick(1, 99);
    const int64_t rows = pick(1, 70), tokens = pick(0, 40);
    const Weight weight = random_weight(1, rows, cols, format);
    const auto x = random_rows(tokens * cols);
    std::vector<float> out(tokens * rows);
    check(!sf_linear(random_isa(), (int)pick(0, 1), weight.kind, weight.panels.data(), rows, cols,
                     x.empty() ? (const void *)&rows : x.data(), SF_F32, tokens,
                     out.empty() ? (void *)&source : out.data(), SF_F32, (int)pick(1, 3)),
          "sf_linear");
    std::vector<double> wanted(out.size(), 0.0);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < cols; k++)
                wanted[t * rows + r] += (double)x[t * cols + k] * weight.values[r * cols + k];
    if (tokens) check(distance(out, wanted) < 0.03, "sf_linear: wrong result");
}

void experts() {
    const int64_t hidden = 256 * pick(1, 2), inner = 32 * pick(1, 3), count = pick(1, 6);
    const int64_t active = pick(1, 3), tokens = pick(1, 90);
    const Weight gate_up = random_weight(count, 2 * inner, hidden, random_format());
    const Weight down = random_weight(count, hidden, inner, pick(0, 3) ? &FORMATS[pick(0, 3)] : nullptr);
    const auto x = random_rows(tokens * hidden), shares = random_rows(tokens * active);
    std::vector<int64_t> chosen(tokens * active);
    for (auto &expert : chosen) expert = pick(0, 2) ? pick(0, count - 1) : 0;
    std::vector<float> out(tokens * hidden);
    const int mode = (int)pick(0, 1);
    const auto call = [&] {
        return sf_experts(random_isa(), mode, gate_up.kind, gate_up.panels.data(), down.kind,
                          down.panels.data(), count, hidden, inner, x.data(), SF_F32, tokens,
                          chosen.data(), shares.data(), active, out.data(), SF_F32,
                          (int)pick(1, 3));
    };
    check(!call(), "sf_experts");
    std::vector<double> wanted(out.size(), 0.0), mid(2 * inner);
    for (int64_t i = 0; i < tokens * active; i++) {
        const float *row = &x[i / active * hidden];
        for (int64_t r = 0; r < 2 * inner; r++) {
            mid[r] = 0;
            for (int64_t k = 0; k < hidden; k++)
                mid[r] += (double)row[k] * gate_up.values[(chosen[i] * 2 * inner + r) * hidden + k];
        }
        for (int64_t r = 0; r < inner; r++) {
            const double g = mid[r];
            mid[r] = 0.5 * g * (1 + std::tanh(0.7978845608 * (g + 0.044715 * g * g * g))) * mid[inner + r];
        }
        for (int64_t h = 0; h < hidden; h++)
            for (int64_t r = 0; r < inner; r++)
                wanted[i / active * hidden + h] +=
                    shares[i] * mid[r] * down.values[(chosen[i] * hidden + h) * inner + r];
    }
    check(distance(out, wanted) < 0.06, "sf_experts: wrong result");
    chosen[pick(0, tokens * active - 1)] = pick(0, 1) ? count : -1;
    check(call() == SF_BAD_ARGUMENT, "sf_experts: took an expert that there is not");
}

void law() {
    const int64_t positions = pick(1, 5), count = pick(1, 700);
    auto raw = random_rows(positions * count);
    const std::vector<float> heat(positions, 0.7f);
    std::vector<float> peak(positions, -2e30f), total(positions), moment(positions),
        fade(positions), top(positions * 8, -2e30f), sums(positions * ((count + 63) / 64)),
        mass(positions * count);
    std::vector<int64_t> argmax(positions), ids(positions * 8);
    check(!sf_law(random_isa(), raw.data(), SF_F32, positions, count, 5, 30.0f, heat.data(),
                  peak.data(), total.data(), moment.data(), argmax.data(), top.data(), ids.data(),
                  fade.data(), sums.data(), mass.data(), SF_F32, (int)pick(1, 3)),
          "sf_law");
    for (int64_t t = 0; t < positions; t++) {
        int64_t best = 0;
        double sum = 0, most = -1e9;
        for (int64_t i = 0; i < count; i++) {
            if (raw[t * count + i] > raw[t * count + best]) best = i;
            most = std::fmax(most, 30 * std::tanh(raw[t * count + i] / 30.0) / 0.7);
        }
        for (int64_t i = 0; i < count; i++)
            sum += std::exp(30 * std::tanh(raw[t * count + i] / 30.0) / 0.7 - most);
        check(argmax[t] == best + 5 && ids[t * 8] == best + 5, "sf_law: wrong argmax");
        check(std::fabs(total[t] - sum) < 1e-4 * sum, "sf_law: wrong total");
    }
}

void attention() {
    if (!sf_has_bf16()) return;
    const int64_t kv = pick(1, 2), heads = kv * pick(1, 3), d = 32 * pick(1, 3);
    const int64_t tokens = pick(1, 40), first = pick(0, 300), second = tokens;
    const auto q = random_rows(tokens * heads * d);
    const auto k1 = random_rows(kv * first * d), v1 = random_rows(kv * first * d);
    const auto k2 = random_rows(second * kv * d), v2 = random_rows(second * kv * d);
    const sf_rows keys[2] = {{k1.data(), SF_F32, first, first * d, d}, {k2.data(), SF_F32, second, d, kv * d}};
    const sf_rows values[2] = {{v1.data(), SF_F32, first, first * d, d}, {v2.data(), SF_F32, second, d, kv * d}};
    std::vector<int32_t> mine(tokens), theirs(first + second);
    for (int64_t i = 0; i < tokens; i++) mine[i] = (int32_t)(first + i);
    for (int64_t i = 0; i < first + second; i++) theirs[i] = (int32_t)i;
    std::vector<float> out(q.size());
    const bool masked = pick(0, 1);
    check(!sf_attention(q.data(), SF_F32, tokens, heads, kv, d, keys, values, 2,
                        masked ? mine.data() : nullptr, masked ? theirs.data() : nullptr,
                        masked ? pick(0, 50) : 0, out.data(), SF_F32, (int)pick(1, 3)),
          "sf_attention");
    for (float x : out) check(std::isfinite(x), "sf_attention: no number");
}

}  // namespace

int main(int count, char **arguments) {
    source.seed(count > 1 ? (unsigned)std::atoi(arguments[1]) : 1);
    check(sf_version() == SF_VERSION, "sf_version");
    check(sf_panel_bytes(99, 1, 32) == -1 && sf_panel_bytes(0, 1, 33) == -1 && sf_kind(3) == -1,
          "bad arguments were taken");
    check(sf_linear(7, 0, 0, &source, 1, 32, &source, 0, 1, &source, 0, 1) == SF_BAD_ARGUMENT,
          "an instruction set that there is not");
    for (int i = 0; i < 60; i++) {
        linear();
        experts();
        law();
        attention();
    }
    std::puts("fuzz: all well");
}
