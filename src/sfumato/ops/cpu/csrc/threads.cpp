// Regions of several threads, by the functions of an OpenMP runtime that is loaded; see threads.h.

#include "threads.h"

#include <atomic>

#include "sfumato.h"

struct Region {
    int (*body)(Team &, const void *);
    const void *context;
    std::atomic<int64_t> taken{0};
    std::atomic<int> code{SF_OK};
};

namespace {

// As compilers describe a place of the source to LLVM's runtime.
struct Place {
    int32_t reserved = 0, flags = 2, more[2] = {};
    const char *source = ";sfumato;parallel;0;0;;";
};

const Place PLACE;

using Microtask = void (*)(int32_t *, int32_t *, ...);

// In the order of sf_use_threads.
struct Runtime {
    void *fork, *barrier, *thread, *threads, *wanted, *caller;
    bool llvm;

    int number(void *function) const { return reinterpret_cast<int (*)()>(function)(); }
    int32_t caller_number() const { return reinterpret_cast<int32_t (*)(const Place *)>(caller)(&PLACE); }
};

Runtime runtime{};

void enter(Region &region, int thread, int threads) {
    Team team(region, thread, threads);
    const int code = region.body(team, region.context);
    if (code != SF_OK) region.code.store(code, std::memory_order_relaxed);
}

void enter_by_gcc(void *region) {
    enter(*static_cast<Region *>(region), runtime.number(runtime.thread), runtime.number(runtime.threads));
}

void enter_by_llvm(int32_t *, int32_t *, void *region) { enter_by_gcc(region); }

}  // namespace

int run_region(int threads, int (*body)(Team &, const void *), const void *context) {
    Region region{body, context};
    if (threads == 1 || !runtime.fork) {
        enter(region, 0, 1);
    } else if (runtime.llvm) {
        reinterpret_cast<void (*)(const Place *, int32_t, int32_t)>(runtime.wanted)(
            &PLACE, runtime.caller_number(), threads);
        reinterpret_cast<void (*)(const Place *, int32_t, Microtask, ...)>(runtime.fork)(
            &PLACE, 1, reinterpret_cast<Microtask>(enter_by_llvm), &region);
    } else {
        reinterpret_cast<void (*)(void (*)(void *), void *, unsigned, unsigned)>(runtime.fork)(
            enter_by_gcc, &region, (unsigned)threads, 0);
    }
    return region.code.load(std::memory_order_relaxed);
}

void Team::barrier() {
    if (threads == 1) return;
    if (runtime.llvm)
        reinterpret_cast<void (*)(const Place *, int32_t)>(runtime.barrier)(&PLACE, runtime.caller_number());
    else
        reinterpret_cast<void (*)()>(runtime.barrier)();
}

int64_t Team::take() { return region.taken.fetch_add(1, std::memory_order_relaxed); }

extern "C" int sf_use_threads(int kind, void *const *functions) {
    if ((kind != SF_GOMP && kind != SF_KMPC) || !functions) return SF_BAD_ARGUMENT;
    for (int i = 0; i < (kind == SF_KMPC ? 6 : 4); i++)
        if (!functions[i]) return SF_BAD_ARGUMENT;
    runtime = {functions[0], functions[1], functions[2], functions[3], nullptr, nullptr, kind == SF_KMPC};
    if (runtime.llvm) runtime.wanted = functions[4], runtime.caller = functions[5];
    return SF_OK;
}

extern "C" int sf_has_threads(void) { return runtime.fork != nullptr; }
