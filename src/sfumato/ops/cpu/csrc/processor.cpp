// What the processor and the system can run, asked for directly: compilers know the names of features
// only from some version on (clang "f16c" from 19), and none of them asks the system for AMX's tiles.

#include "level.h"
#include "sfumato.h"

#if defined(__x86_64__)

#include <cpuid.h>

#include <cstdint>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

struct Registers {
    uint32_t a = 0, b = 0, c = 0, d = 0;
    Registers(uint32_t leaf, uint32_t part) {
        if (!__get_cpuid_count(leaf, part, &a, &b, &c, &d)) a = b = c = d = 0;
    }
};

bool all(uint32_t word, uint32_t bits) { return (word & bits) == bits; }

// Whether the system keeps registers of tiles for this process, which Linux does when asked.
bool has_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

struct Processor {
    bool avx2 = false, avx_vnni = false, avx512 = false, bf16 = false, amx = false;

    Processor() {
        const Registers one(1, 0), seven(7, 0), more(7, 1);
        constexpr uint32_t FMA = 1u << 12, XSAVE = 1u << 27, AVX = 1u << 28, F16C = 1u << 29;
        if (!all(one.c, FMA | XSAVE | AVX | F16C)) return;
        uint32_t kept, upper;  // the registers that the system keeps
        __asm__("xgetbv" : "=a"(kept), "=d"(upper) : "c"(0));
        avx2 = all(kept, 0x6) && all(seven.b, 1u << 5);
        avx_vnni = avx2 && all(more.a, 1u << 4);
        constexpr uint32_t F = 1u << 16, DQ = 1u << 17, BW = 1u << 30, VL = 1u << 31, VNNI = 1u << 11;
        avx512 = avx2 && all(kept, 0xe6) && all(seven.b, F | DQ | BW | VL) && all(seven.c, VNNI);
        bf16 = avx512 && all(more.a, 1u << 5);
        constexpr uint32_t AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
#if defined(SF_EMULATE_TILES)
        amx = bf16;
#else
        amx = bf16 && all(kept, 0x60000) && all(seven.d, AMX_BF16 | AMX_TILE) && has_tiles();
#endif
    }
};

const Processor &processor() {
    static const Processor asked;
    return asked;
}

}  // namespace

extern "C" int sf_has_bf16(void) { return processor().bf16; }

extern "C" int processor_runs(int isa) {
    switch (isa) {
        case SF_PORTABLE: return 1;
        case SF_AVX2: return processor().avx2;
        case SF_AVX_VNNI: return processor().avx_vnni;
        case SF_AVX512_VNNI:
        case SF_AVX512: return processor().avx512;
        case SF_AMX: return processor().amx;
        default: return -1;
    }
}

#elif defined(__aarch64__)

#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace {

struct Processor {
    bool dot = false, i8mm = false;

    Processor() {
#if defined(__linux__)
        // The numbers of the bits are part of Linux's interface; older headers lack some names.
        constexpr unsigned long DOT = 1ul << 20, I8MM = 1ul << 13, BF16 = 1ul << 14;
        const unsigned long more = getauxval(AT_HWCAP2);
        dot = getauxval(AT_HWCAP) & DOT;
        i8mm = dot && (more & I8MM) && (more & BF16);
#elif defined(__APPLE__)
        const auto has = [](const char *name) {
            int value = 0;
            size_t size = sizeof value;
            return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
        };
        dot = has("hw.optional.arm.FEAT_DotProd");
        i8mm = dot && has("hw.optional.arm.FEAT_I8MM") && has("hw.optional.arm.FEAT_BF16");
#endif
    }
};

const Processor &processor() {
    static const Processor asked;
    return asked;
}

}  // namespace

extern "C" int sf_has_bf16(void) { return 0; }  // AVX512-BF16, which x86 alone has

extern "C" int processor_runs(int isa) {
    switch (isa) {
        case SF_PORTABLE: return 1;
        case SF_NEON: return processor().dot;
        case SF_I8MM: return processor().i8mm;
        default: return -1;
    }
}

#else

extern "C" int sf_has_bf16(void) { return 0; }

extern "C" int processor_runs(int isa) { return isa == SF_PORTABLE ? 1 : -1; }

#endif
