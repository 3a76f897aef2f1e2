// Random numbers for fuzz.cpp, and what it holds results to.
#ifndef SFUMATO_FUZZ_H
#define SFUMATO_FUZZ_H

#include <cmath>
#include <cstdint>
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

float from_bf16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// Numbers as a call takes or gives them: float32, or bfloat16.
struct Numbers {
    int dtype;
    std::vector<float> wide;
    std::vector<uint16_t> half;

    explicit Numbers(int64_t count) : dtype((int)pick(SF_F32, SF_BF16)) {
        if (dtype == SF_F32)
            wide.resize(count);
        else
            half.resize(count);
    }

    // Cut off to bfloat16 where that is what they are.
    explicit Numbers(const std::vector<float> &from) : Numbers((int64_t)from.size()) {
        wide = dtype == SF_F32 ? from : wide;
        for (size_t i = 0; i < half.size(); i++) memcpy(&half[i], (const char *)&from[i] + 2, 2);
    }

    // Where there are none, an address all the same.
    void *data() {
        static float none;
        void *at = dtype == SF_F32 ? (void *)wide.data() : (void *)half.data();
        return at ? at : &none;
    }

    std::vector<float> floats() const {
        std::vector<float> out = wide;
        for (uint16_t x : half) out.push_back(from_bf16(x));
        return out;
    }
};

// Infinities, and NaN of any low bits, which arithmetic on bits could take for something else.
float no_number() {
    const uint32_t bits = (uint32_t)pick(0, 1) << 31 | 0x7f800000 | (pick(0, 3) ? source() >> 9 : 0);
    float x;
    memcpy(&x, &bits, 4);
    return x;
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

}  // namespace
#endif
