// Memory of a call, which the thread keeps for its next ones: memory that goes back to the system costs a
// page fault for every 4096 bytes of the next call.
//
// A thread keeps as much as one call of its own has needed at most, up to 256 MiB, until it ends.  What is
// larger is freed at the end of the call.
#ifndef SFUMATO_WORKSPACE_H
#define SFUMATO_WORKSPACE_H

#include <cstdint>

// At least `bytes` at a multiple of 64, or null; *held is how many there are.  For any thread.
void *borrow(int64_t bytes, int64_t *held);
// What `borrow` gave to this thread last of what it has not given back.
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
