// Memory of a call, freed at its end.
#ifndef SFUMATO_WORKSPACE_H
#define SFUMATO_WORKSPACE_H

#include <cstdint>

// At least `bytes` at a multiple of 64, or null; *held is how many there are.  For any thread.
void *borrow(int64_t bytes, int64_t *held);
// What `borrow` gave.
void give_back(void *data, int64_t held);

namespace {

// Borrowed memory, given back at the end.
struct Borrowed {
    int64_t held;
    uint8_t *data;
    explicit Borrowed(int64_t bytes) : held(0), data(static_cast<uint8_t *>(borrow(bytes, &held))) {}
    ~Borrowed() { give_back(data, held); }
    Borrowed(const Borrowed &) = delete;
    Borrowed &operator=(const Borrowed &) = delete;
};

}  // namespace

#endif
