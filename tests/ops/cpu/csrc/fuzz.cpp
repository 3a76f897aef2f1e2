// Random calls of every operation, for a run under the address and undefined-behaviour sanitizers:
// tests/ops/cpu/test_build.py builds it with the sources of the library and runs it.
// All memory is exactly as large as the interface says.  Results are held against plain loops in
// double precision, so that it is a test of its own as well.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fuzz.h"
#include "fuzz_attention.h"
#include "fuzz_narrow.h"
#include "sfumato.h"

namespace {

struct Format {
    int type, size, bytes;
    std::vector<int> halves;  // where a block's float16 numbers lie
};

const std::vector<Format> FORMATS = {
    {2, 32, 18, {0}},      {6, 32, 22, {0}},       {7, 32, 24, {0, 2}},
    {8, 32, 34, {0}},      {12, 256, 144, {0, 2}}, {13, 256, 176, {0, 2}},
    {14, 256, 210, {208}}, {20, 32, 18, {0}},      {23, 256, 136, {0}},
    {10, 256, 84, {80, 82}}, {11, 256, 110, {108}}, {18, 256, 98, {0}},
    {21, 256, 110, {0}},
};

const Format &any_format() { return FORMATS[pick(0, (int64_t)FORMATS.size() - 1)]; }

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
    do isa = (int)pick(0, SF_ISAS - 1);
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
        std::vector<uint16_t> half(exact.size());
        check(!sf_dequantize(random_isa(), type, odd.data() + 1, (int64_t)half.size(), half.data(),
                             SF_BF16, threads),
              "sf_dequantize");
        for (size_t i = 0; i < exact.size(); i++) {
            check(std::fabs(exact[i] - weight.values[i]) <= 0.02f * std::fabs(exact[i]) + 0.02f,
                  "values of panels and blocks differ");
            check(std::fabs(exact[i] - from_bf16(half[i])) <= 0.004f * std::fabs(exact[i]) + 1e-30f,
                  "sf_dequantize: wrong bfloat16");
        }
    }
    return weight;
}

const Format *random_format() { return pick(0, 9) ? &any_format() : nullptr; }

void linear() {
    const Format *format = random_format();
    const int64_t cols = format ? format->size * pick(1, 3) : pick(1, 99);
    const int64_t rows = pick(1, 70), tokens = pick(0, 40);
    const Weight weight = random_weight(1, rows, cols, format);
    auto rows_in = random_rows(tokens * cols);
    const int64_t odd = tokens ? pick(-tokens, tokens - 1) : -1;  // the row with what is no number
    if (odd >= 0) rows_in[odd * cols + pick(0, cols - 1)] = no_number();
    Numbers in(rows_in), result(tokens * rows);
    check(!sf_linear(random_isa(), (int)pick(0, 1), weight.kind, weight.panels.data(), rows, cols,
                     in.data(), in.dtype, tokens, result.data(), result.dtype, (int)pick(1, 3)),
          "sf_linear");
    auto x = in.floats(), out = result.floats();
    std::vector<double> wanted(out.size(), 0.0);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) {
            if (t == odd) {
                check(!std::isfinite(out[t * rows + r]), "sf_linear: made a number of what is none");
                out[t * rows + r] = 0;
                continue;
            }
            for (int64_t k = 0; k < cols; k++)
                wanted[t * rows + r] += (double)x[t * cols + k] * weight.values[r * cols + k];
        }
    if (tokens) check(distance(out, wanted) < 0.03, "sf_linear: wrong result");
}

// Sums of a matrix's rows, from panels of its columns.
void columns() {
    const Format &format = any_format();
    const int64_t rows = pick(1, 100), cols = format.size * pick(1, 3), positions = pick(1, 20);
    const auto blocks = random_blocks(format, rows * cols);
    std::vector<float> values(rows * cols), unpacked(rows * cols);
    check(!sf_dequantize(0, format.type, blocks.data(), rows * cols, values.data(), SF_F32, 1), "sf_dequantize");
    std::vector<uint8_t> panels(sf_panel_bytes(SF_SIGNED_BYTES, cols, rows));
    check(!sf_pack_columns(random_isa(), format.type, blocks.data(), rows, cols, panels.data(), (int)pick(1, 3)),
          "sf_pack_columns");
    check(!sf_unpack(SF_SIGNED_BYTES, panels.data(), 1, cols, rows, unpacked.data(), 1), "sf_unpack");
    auto masses = random_rows(positions * rows);
    for (float &mass : masses) mass = std::exp(3 * mass);
    Numbers in(masses), result(positions * cols);
    auto x = in.floats();
    for (int64_t at = 0; at < positions * rows; at += at % rows + 32 < rows ? 32 : rows - at % rows) {
        const int64_t end = at % rows + 32 < rows ? at + 32 : at - at % rows + rows;  // of its block
        float peak = 1e-30f;
        for (int64_t i = at; i < end; i++) peak = std::fmax(peak, x[i]);
        for (int64_t i = at; i < end; i++) x[i] = std::nearbyint(x[i] * 127 / peak) * peak / 127;
    }
    const int isa = random_isa();
    check(!sf_linear(isa, 0, SF_SIGNED_BYTES, panels.data(), cols, rows, in.data(), in.dtype, positions,
                     result.data(), result.dtype, (int)pick(1, 3)),
          "sf_linear of columns");
    std::vector<double> wanted(positions * cols, 0.0), exact(rows * cols);
    for (int64_t i = 0; i < rows * cols; i++) exact[i % cols * rows + i / cols] = values[i];
    for (int64_t t = 0; t < positions; t++)
        for (int64_t c = 0; c < cols; c++)
            for (int64_t r = 0; r < rows; r++)
                wanted[t * cols + c] += (double)x[t * rows + r] * unpacked[c * rows + r];
    check(distance(unpacked, exact) < 0.03, "sf_pack_columns: wrong values");
    check(distance(result.floats(), wanted) < 0.01, "sf_linear of columns: wrong result");
    check(sf_linear(isa, 1, SF_SIGNED_BYTES, panels.data(), cols, rows, in.data(), in.dtype, 1,
                    result.data(), result.dtype, 1) == SF_BAD_ARGUMENT,
          "sf_linear: multiplied columns by bfloat16");
}

double gate_of(int gating, double g) {
    if (gating == SF_SILU) return g / (1 + std::exp(-g));
    return 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
}

void experts() {
    const int64_t hidden = 256 * pick(1, 2), inner = 32 * pick(1, 3), count = pick(1, 6);
    const int64_t active = pick(1, 3), tokens = pick(1, 90);
    const Weight gate_up = random_weight(count, 2 * inner, hidden, random_format());
    const Weight down = random_weight(count, hidden, inner, pick(0, 3) ? &FORMATS[pick(0, 3)] : nullptr);
    Numbers in(random_rows(tokens * hidden)), result(tokens * hidden);
    const auto x = in.floats(), shares = random_rows(tokens * active);
    std::vector<int64_t> chosen(tokens * active);
    for (auto &expert : chosen) expert = pick(0, 2) ? pick(0, count - 1) : 0;
    const int mode = (int)pick(0, 1), gating = (int)pick(0, 1);
    const auto call = [&] {
        return sf_experts(random_isa(), mode, gate_up.kind, gate_up.panels.data(), down.kind,
                          down.panels.data(), count, hidden, inner, in.data(), in.dtype, tokens,
                          chosen.data(), shares.data(), active, gating, result.data(),
                          result.dtype, (int)pick(1, 3));
    };
    check(!call(), "sf_experts");
    const auto out = result.floats();
    std::vector<double> wanted(out.size(), 0.0), mid(2 * inner);
    for (int64_t i = 0; i < tokens * active; i++) {
        const float *row = &x[i / active * hidden];
        for (int64_t r = 0; r < 2 * inner; r++) {
            mid[r] = 0;
            for (int64_t k = 0; k < hidden; k++)
                mid[r] += (double)row[k] * gate_up.values[(chosen[i] * 2 * inner + r) * hidden + k];
        }
        for (int64_t r = 0; r < inner; r++) mid[r] = gate_of(gating, mid[r]) * mid[inner + r];
        for (int64_t h = 0; h < hidden; h++)
            for (int64_t r = 0; r < inner; r++)
                wanted[i / active * hidden + h] +=
                    shares[i] * mid[r] * down.values[(chosen[i] * hidden + h) * inner + r];
    }
    check(distance(out, wanted) < 0.06, "sf_experts: wrong result");
    const int64_t odd = pick(0, tokens - 1);
    const float bad = no_number();
    if (in.dtype == SF_F32)
        in.wide[odd * hidden] = bad;
    else
        memcpy(&in.half[odd * hidden], (const char *)&bad + 2, 2);
    check(!call(), "sf_experts");
    const auto mixed = result.floats();
    for (int64_t i = 0; i < tokens * hidden; i++)
        check(std::isfinite(mixed[i]) == (i / hidden != odd), "sf_experts: no number strayed");
    chosen[pick(0, tokens * active - 1)] = pick(0, 1) ? count : -1;
    check(call() == SF_BAD_ARGUMENT, "sf_experts: took an expert that there is not");
}

void softmax_update() {
    const int64_t positions = pick(1, 5), total_ids = pick(1, 1200), cut = pick(1, total_ids);
    const float cap = pick(0, 1) ? 30.0f : 0.0f, degree = 0.7f;
    const int64_t odd = pick(-5, positions - 1);  // the position with a NaN
    const std::vector<float> temperature(positions, degree);
    std::vector<float> max(positions, -2e30f), sum_exp(positions), sum_shifted(positions),
        fade(positions), top(positions * 8, -2e30f);
    std::vector<int64_t> argmax(positions), ids(positions * 8);
    std::vector<std::vector<double>> scores(positions);
    // Each position's own stretch of ids that may lie anywhere, in the vocabulary or not.
    std::vector<int64_t> banned(pick(1, 6)), ban_first(positions), ban_last(positions);
    for (int64_t &id : banned) id = pick(0, total_ids + 20);
    for (int64_t t = 0; t < positions; t++) {
        ban_first[t] = pick(0, (int64_t)banned.size());
        ban_last[t] = t == odd ? ban_first[t] : pick(ban_first[t], (int64_t)banned.size());
    }
    for (int64_t first = 0; first < total_ids; first = first ? total_ids : cut) {
        const int64_t count = first ? total_ids - cut : cut;
        auto rows = random_rows(positions * count);
        if (odd >= 0) {
            const uint32_t nan = 0x7fffffff;
            memcpy(&rows[odd * count], &nan, 4);
        }
        Numbers raw(rows), mass(positions * count);
        std::vector<float> sums(positions * ((count + 63) / 64));
        const sf_softmax_call call = {
            raw.data(),       raw.dtype,       positions,     count,         5 + first,
            cap,              temperature.data(), ban_first.data(), ban_last.data(), banned.data(),
            (int64_t)banned.size(), max.data(), sum_exp.data(), sum_shifted.data(), argmax.data(),
            top.data(),       ids.data(),      fade.data(),   sums.data(),   mass.data(),
            mass.dtype};
        check(!sf_softmax_update(random_isa(), &call, (int)pick(1, 3)), "sf_softmax_update");
        const auto values = raw.floats();
        for (int64_t i = 0; i < positions * count; i++) {
            const double x = values[i];
            scores[i / count].push_back((cap > 0 ? cap * std::tanh(x / cap) : x) / degree);
        }
    }
    for (int64_t t = 0; t < positions; t++) {
        for (int64_t b = ban_first[t]; b < ban_last[t]; b++)
            if (banned[b] >= 5 && banned[b] < 5 + total_ids) scores[t][banned[b] - 5] = -1e30;
        if (t == odd) {
            check(std::isnan(sum_exp[t]) && std::isnan(sum_shifted[t]), "sf_softmax_update: lost a NaN");
            continue;
        }
        double most = -2e30, sum = 0, around = 0;
        for (double s : scores[t]) most = std::fmax(most, s);
        for (double s : scores[t]) {
            sum += std::exp(s - most);
            around += std::exp(s - most) * (s - most);
        }
        check(argmax[t] == ids[t * 8] && most - scores[t][argmax[t] - 5] < 1e-5, "sf_softmax_update: wrong argmax");
        check(std::fabs(sum_exp[t] - sum) < 1e-4 * sum, "sf_softmax_update: wrong sum");
        check(std::fabs(sum_shifted[t] - around) < 1e-4 * (sum - around), "sf_softmax_update: wrong shifted sum");
    }
}

// Gated products, RMS norm and rotary embedding.
void row_operations() {
    const int64_t rows = pick(1, 6), half = pick(1, 300), columns = 2 * half;
    const int isa = random_isa(), threads = (int)pick(1, 3), gating = (int)pick(0, 1);
    const Numbers x(random_rows(rows * columns));
    const auto numbers = x.floats();
    Numbers input = x, out = random_numbers(x.dtype, rows * columns), gated = random_numbers(x.dtype, rows * half);
    std::vector<double> wanted(rows * half);
    char *gate = static_cast<char *>(input.data());
    check(!sf_gated(isa, gate, columns, gate + half * (x.dtype == SF_F32 ? 4 : 2), columns, x.dtype,
                    gating, rows, half, gated.data(), threads),
          "sf_gated");
    for (int64_t i = 0; i < rows * half; i++) {
        const double g = numbers[i / half * columns + i % half];
        wanted[i] = gate_of(gating, g) * numbers[i / half * columns + half + i % half];
    }
    check(distance(gated.floats(), wanted) < 0.01, "sf_gated: wrong result");
    Numbers weight(random_rows(columns));
    const bool weighted = pick(0, 1);
    check(!sf_rms_norm(isa, input.data(), x.dtype, rows, columns, weighted ? weight.data() : nullptr,
                       weight.dtype, 1e-3f, out.data(), threads),
          "sf_rms_norm");
    const auto scales = weight.floats();
    wanted.assign(rows * columns, 0.0);
    for (int64_t t = 0; t < rows; t++) {
        double sum = 0;
        for (int64_t i = 0; i < columns; i++) sum += std::pow(numbers[t * columns + i], 2);
        const double root = std::sqrt(sum / columns + 1e-3);
        for (int64_t i = 0; i < columns; i++)
            wanted[t * columns + i] = numbers[t * columns + i] / root * (weighted ? scales[i] : 1);
    }
    check(distance(out.floats(), wanted) < 0.01, "sf_rms_norm: wrong result");
    const int64_t heads = pick(1, 2) == 2 && rows % 2 == 0 ? 2 : 1, tokens = rows / heads;
    Numbers cosines = random_numbers(x.dtype, tokens * half), sines = random_numbers(x.dtype, tokens * half);
    check(!sf_rotate(isa, input.data(), x.dtype, tokens, heads, half, cosines.data(), sines.data(),
                     out.data(), threads),
          "sf_rotate");
    const auto cosine = cosines.floats(), sine = sines.floats();
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < half; i++) {
            const double a = numbers[row * columns + i], b = numbers[row * columns + half + i];
            const int64_t at = row / heads * half + i;
            wanted[row * columns + i] = a * cosine[at] - b * sine[at];
            wanted[row * columns + half + i] = b * cosine[at] + a * sine[at];
        }
    check(distance(out.floats(), wanted) < 0.01, "sf_rotate: wrong result");
}

// Sizes whose products overflow, dtypes that there are not, and addresses that are none.
void refusals() {
    constexpr int64_t huge = (int64_t)1 << 40, most = INT64_MAX;
    std::vector<float> x(64);
    const int64_t chosen = 0;
    const int bad = SF_BAD_ARGUMENT, kind = sf_kind(2);
    alignas(2) uint8_t panels[2048] = {};
    for (int64_t size : {(int64_t)-1, (int64_t)1 << 61, most}) {
        check(sf_panel_bytes(kind, size, 32) == -1, "sf_panel_bytes: took any size");
        check(sf_pack(0, 2, panels, size, 16, 32, panels, 1) == bad, "sf_pack: took any size");
        check(sf_pack_columns(0, 2, panels, size, 32, panels, 1) == bad, "sf_pack_columns: took any size");
        check(sf_unpack(kind, panels, size, 16, 32, x.data(), 1) == bad, "sf_unpack: took any size");
        check(sf_dequantize(0, 2, panels, size, x.data(), 0, 1) == bad, "sf_dequantize: took any size");
        check(sf_linear(0, 0, kind, panels, 16, 32, x.data(), 0, size, x.data(), 0, 1) == bad,
              "sf_linear: took any size");
        check(sf_gated(0, x.data(), 1, x.data(), size, 0, 0, 2, 1, x.data(), 1) == bad &&
                  sf_rms_norm(0, x.data(), 0, size, 2, nullptr, 0, 1.0f, x.data(), 1) == bad &&
                  sf_rotate(0, x.data(), 0, 1, 1, size, x.data(), x.data(), x.data(), 1) == bad,
              "row operations: took any size");
        for (int which = 0; which < 3; which++)
            check(sf_experts(0, 0, kind, panels, kind, panels, which == 0 ? size : 1, 32, 32, x.data(), 0,
                             which == 1 ? size : 1, &chosen, x.data(), which == 2 ? size : 1, 0,
                             x.data(), 0, 1) == bad,
                  "sf_experts: took any size");
    }
    check(sf_panel_bytes(kind, huge, huge) == -1, "sf_panel_bytes: overflowed");
    check(sf_experts(0, 0, SF_SIGNED_BYTES, panels, kind, panels, 1, 32, 32, x.data(), 0, 1, &chosen,
                     x.data(), 1, 0, x.data(), 0, 1) == bad,
          "sf_experts: took panels of columns");
    check(sf_linear(0, 0, kind, panels + 1, 16, 32, x.data(), 0, 1, x.data(), 0, 1) == bad,
          "sf_linear: took panels at an odd address");
    int isa = SF_ISAS - 1;
    while (isa && !sf_attends(isa)) isa--;
    check(sf_attention(SF_PORTABLE, x.data(), 0, 1, 1, 1, 32, nullptr, nullptr, 1, nullptr, nullptr,
                       nullptr, x.data(), 0, 1) == SF_UNSUPPORTED,
          "sf_attention: plain code attends");
    if (!isa) return;
    const auto attend = [&](int q_dtype, int out_dtype, sf_rows rows) {
        return sf_attention(isa, x.data(), q_dtype, 1, 1, 1, 32, &rows, &rows, 1, nullptr, nullptr,
                            nullptr, x.data(), out_dtype, 1);
    };
    const sf_rows good = {x.data(), SF_F32, 1, 32, 32};
    check(attend(7, 0, good) == bad && attend(0, 9, good) == bad &&
              attend(0, 0, {x.data(), 5, 1, 32, 32}) == bad &&
              attend(0, 0, {nullptr, 0, 1, 32, 32}) == bad &&
              attend(0, 0, {x.data(), 0, most, 32, 32}) == bad,
          "sf_attention: took bad arguments");
}

}  // namespace

#if defined(SF_FUZZ_SERIAL)  // where no OpenMP runtime is to be had (deploy/try_elsewhere.sh)
void use_threads() { check(!sf_has_threads(), "sf_has_threads"); }
#else
extern "C" {
void omp_get_thread_num();
void omp_get_num_threads();
#if defined(__clang__)
void __kmpc_fork_call();
void __kmpc_barrier();
void __kmpc_push_num_threads();
void __kmpc_global_thread_num();
#else
void GOMP_parallel();
void GOMP_barrier();
#endif
}

// The threads of the OpenMP runtime that this program is linked to.
void use_threads() {
    void *const number = (void *)omp_get_thread_num, *const threads = (void *)omp_get_num_threads;
#if defined(__clang__)
    void *const functions[] = {(void *)__kmpc_fork_call, (void *)__kmpc_barrier, number, threads,
                               (void *)__kmpc_push_num_threads, (void *)__kmpc_global_thread_num};
    const int kind = SF_KMPC;
#else
    void *const functions[] = {(void *)GOMP_parallel, (void *)GOMP_barrier, number, threads};
    const int kind = SF_GOMP;
#endif
    void *const some[] = {number, nullptr, number, threads, number, number};
    check(!sf_has_threads() && sf_use_threads(2, functions) == SF_BAD_ARGUMENT &&
              sf_use_threads(kind, nullptr) == SF_BAD_ARGUMENT &&
              sf_use_threads(kind, some) == SF_BAD_ARGUMENT && !sf_has_threads(),
          "sf_use_threads: took bad arguments");
    check(sf_use_threads(kind, functions) == SF_OK && sf_has_threads(), "sf_use_threads");
}
#endif

int main(int count, char **arguments) {
    use_threads();
    source.seed(count > 1 ? (unsigned)std::atoi(arguments[1]) : 1);
    check(sf_version() == SF_VERSION, "sf_version");
    check(sf_panel_bytes(99, 1, 32) == -1 && sf_panel_bytes(0, 1, 33) == -1 && sf_kind(3) == -1,
          "bad arguments were taken");
    check(sf_linear(SF_ISAS, 0, 0, &source, 1, 32, &source, 0, 1, &source, 0, 1) == SF_BAD_ARGUMENT,
          "an instruction set that there is not");
    refusals();
    int rounds = count > 2 ? std::atoi(arguments[2]) : 60;
    for (int i = 0; i < rounds; i++) {
        linear();
        columns();
        experts();
        softmax_update();
        row_operations();
        for (int isa = 0; isa < SF_ISAS; isa++) {
            attention(isa);
            canvas_attention(isa);
            shared_attention(isa);
            narrow_attention(isa);
        }
    }
    const char *const names[SF_ISAS] = {"portable",    "avx2", "avx_vnni", "avx512_vnni",
                                        "avx512",      "amx",  "neon",     "i8mm"};
    int last = 0;
    for (int isa = 0; isa < SF_ISAS; isa++) last = sf_isa_available(isa) == 1 ? isa : last;
    std::printf("last level: %s\nfuzz: all well\n", names[last]);
}
