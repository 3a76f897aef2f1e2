// What the functions of the interface ask of their arguments, before anything is computed of them.
#ifndef SFUMATO_CHECKS_H
#define SFUMATO_CHECKS_H

#include <cstdint>
#include <initializer_list>

#include "sfumato.h"

namespace {

inline bool dtype_ok(int dtype) { return dtype == SF_F32 || dtype == SF_BF16; }

inline bool gating_ok(int gating) { return gating == SF_GELU || gating == SF_SILU; }

// Of keys and values.
inline bool stored_ok(int dtype) { return dtype >= SF_F32 && dtype <= SF_Q8_0_BF16; }

// How many elements a row of d keys or values has; d is a multiple of 32 where it has scales.
inline int64_t stored_width(int dtype, int64_t d) { return dtype >= SF_Q8_0 ? d + d / 16 : d; }

// Scales in panels are read as numbers of two bytes.
inline bool panels_ok(const void *panels) {
    return panels && reinterpret_cast<uintptr_t>(panels) % 2 == 0;
}

// Whether a tensor may have these sizes: none negative, and at most 2^48 elements, more than there
// are addresses.  Bytes of tensors that fit, padded to whole panels, do not overflow 64 bits.
inline bool fits(std::initializer_list<int64_t> sizes) {
    constexpr int64_t most = (int64_t)1 << 48;
    int64_t elements = 1;
    for (const int64_t size : sizes) {
        if (size < 0 || size > most || (size && elements > most / size)) return false;
        elements *= size;
    }
    return true;
}

}  // namespace
#endif
