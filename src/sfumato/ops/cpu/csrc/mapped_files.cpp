// What happens when a page of a mapped model file cannot be read (SIGBUS): one line, and the end.

#include "sfumato.h"

#if defined(_WIN32)

extern "C" int sf_watch(const void *, int64_t, const char *, int) { return SF_UNSUPPORTED; }
extern "C" void sf_unwatch(int) {}

#else

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>

namespace {

constexpr int FILES = 1024;  // at a time
constexpr int NAME = 512;    // bytes, of a longer name its end

// The handler reads this in the middle of anything: no memory, no locks, system calls alone.
struct Watched {
    std::atomic<uintptr_t> begin{0}, end{0};  // begin 0: the place is free
    int exit_code = 0;
    char name[NAME] = {};
};

Watched watched[FILES];
std::mutex changing;  // of those who watch; never taken by the handler
bool installed = false;
struct sigaction before;

const Watched *file_at(uintptr_t address) {
    for (const Watched &file : watched) {
        const uintptr_t begin = file.begin.load(std::memory_order_acquire);
        if (begin && address >= begin && address < file.end.load(std::memory_order_relaxed))
            return &file;
    }
    return nullptr;
}

int append(char *line, int at, const char *text) {
    while (*text) line[at++] = *text++;
    return at;
}

[[noreturn]] void tell_and_exit(const Watched &file) {
    char line[NAME + 256];
    int at = append(line, 0, "sfumato: error: ");
    at = append(line, at, file.name);
    at = append(line, at,
                ": a part of this file cannot be read any more: it was made shorter while its model "
                "was in use, or its disk failed; restore the file and start again\n");
    ssize_t written = write(STDERR_FILENO, line, at);
    (void)written;
    _exit(file.exit_code);
}

void pass_on(int number, siginfo_t *info, void *context) {
    if (before.sa_flags & SA_SIGINFO) {
        if (before.sa_sigaction) return before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        return before.sa_handler(number);
    }
    // The system's own answer: a fault comes again when this handler returns, a sent signal does not.
    sigaction(number, &before, nullptr);
    if (info->si_code <= 0) raise(number);
}

// A file whose last byte cannot be read: write says so where a plain read would be a fault.
const Watched *truncated_file() {
    const int kept = errno;
    int ends[2];
    if (pipe(ends) != 0) return nullptr;
    const Watched *found = nullptr;
    for (const Watched &file : watched) {
        if (!file.begin.load(std::memory_order_acquire)) continue;
        const auto last = file.end.load(std::memory_order_relaxed) - 1;
        if (write(ends[1], reinterpret_cast<const void *>(last), 1) < 0 && errno == EFAULT)
            found = &file;
    }
    close(ends[0]);
    close(ends[1]);
    errno = kept;
    return found;
}

// A signal that was sent has no address. faulthandler, where it was enabled after this handler was
// installed, writes its report of a fault and then sends the signal to this one.
void on_bus_error(int number, siginfo_t *info, void *context) {
    const bool fault = info->si_code > 0;
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    if (const Watched *file = fault ? file_at(address) : truncated_file()) tell_and_exit(*file);
    pass_on(number, info, context);
}

bool install() {
    struct sigaction action = {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGBUS, &action, &before) == 0;
}

}  // namespace

extern "C" int sf_watch(const void *data, int64_t bytes, const char *name, int exit_code) {
    if (!data || bytes <= 0 || !name) return SF_BAD_ARGUMENT;
    const std::lock_guard<std::mutex> lock(changing);
    if (!installed && !(installed = install())) return SF_UNSUPPORTED;
    for (int i = 0; i < FILES; i++) {
        Watched &file = watched[i];
        if (file.begin.load(std::memory_order_relaxed)) continue;
        const size_t length = strlen(name);
        const size_t skipped = length < NAME ? 0 : length - (NAME - 1);
        memcpy(file.name, name + skipped, length - skipped + 1);
        file.exit_code = exit_code;
        const auto begin = reinterpret_cast<uintptr_t>(data);
        file.end.store(begin + bytes, std::memory_order_relaxed);
        file.begin.store(begin, std::memory_order_release);
        return i;
    }
    return SF_NO_MEMORY;
}

extern "C" void sf_unwatch(int number) {
    if (number < 0 || number >= FILES) return;
    const std::lock_guard<std::mutex> lock(changing);
    watched[number].begin.store(0, std::memory_order_release);
}

#endif
