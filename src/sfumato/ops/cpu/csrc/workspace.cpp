// The memory that calls borrow; see workspace.h.

#include "workspace.h"

#include <cstdlib>

#include "sfumato.h"

#if defined(__has_feature)  // clang
#if __has_feature(address_sanitizer)
#define SF_ADDRESS_SANITIZER
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define SF_ADDRESS_SANITIZER
#endif

// What is not borrowed may not be touched.
#if defined(SF_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#define HIDE(at, bytes) ASAN_POISON_MEMORY_REGION(at, bytes)
#define SHOW(at, bytes) ASAN_UNPOISON_MEMORY_REGION(at, bytes)
#else
#define HIDE(at, bytes) ((void)0)
#define SHOW(at, bytes) ((void)0)
#endif

namespace {

constexpr int64_t LIMIT = (int64_t)256 << 20;  // bytes that a thread keeps at most
constexpr int64_t ALIGNED = 64;

#if defined(_WIN32)
uint8_t *allocated(int64_t bytes) { return static_cast<uint8_t *>(_aligned_malloc((size_t)bytes, ALIGNED)); }
void freed(void *data) { _aligned_free(data); }
#else
uint8_t *allocated(int64_t bytes) { return static_cast<uint8_t *>(aligned_alloc(ALIGNED, (size_t)bytes)); }
void freed(void *data) { free(data); }
#endif

int64_t rounded(int64_t bytes) { return (bytes + ALIGNED - 1) / ALIGNED * ALIGNED; }

// A thread's memory, borrowed from its beginning on and given back in the opposite order.
struct Arena {
    uint8_t *data = nullptr;
    int64_t size = 0, used = 0;
    int64_t lent = 0, most = 0;  // bytes that are borrowed now, outside of `data` too, and the most so far

    ~Arena() { drop(); }

    void drop() {
        SHOW(data, size);
        freed(data);
        data = nullptr;
        size = 0;
    }

    // Nothing is borrowed: a place for the most that ever was, if that may be kept.
    void grow() {
        if (most <= size || most > LIMIT) return;
        drop();
        data = allocated(most);
        if (!data) return;
        size = most;
        HIDE(data, size);
    }
};

thread_local Arena arena;

}  // namespace

void *borrow(int64_t bytes, int64_t *held) {
    Arena &mine = arena;
    *held = rounded(bytes + ALIGNED);
    if (!mine.lent) mine.grow();
    mine.lent += *held;
    uint8_t *at = mine.data + mine.used;
    if (*held <= mine.size - mine.used) {
        mine.used += *held;
        SHOW(at, bytes);
    } else {
        at = allocated(*held);
    }
    // What is never kept shall not hide the most that can be.
    if (mine.lent <= LIMIT && mine.lent > mine.most) mine.most = mine.lent;
    return at;
}

void give_back(void *data, int64_t held) {
    Arena &mine = arena;
    auto *at = static_cast<uint8_t *>(data);
    mine.lent -= held;
    if (mine.data && at >= mine.data && at < mine.data + mine.size) {
        mine.used -= held;
        HIDE(at, held);
    } else {
        freed(data);
    }
}

extern "C" int64_t sf_workspace_bytes(void) { return arena.size; }
