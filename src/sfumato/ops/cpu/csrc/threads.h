// The threads of a call: those of the OpenMP runtime that torch computes with, and no others.
//
// The library is compiled without OpenMP and linked to no runtime of it.  sf_use_threads gives it the functions
// of one; without them every call runs on the thread that makes it.
#ifndef SFUMATO_THREADS_H
#define SFUMATO_THREADS_H

#include <cstdint>

struct Region;

// What one thread of a region sees: its number, how many threads there are, and what they share.
class Team {
  public:
    Team(Region &region, int thread, int threads) : region(region), thread(thread), threads(threads) {}

    // Waits until every thread of the region has come here.
    void barrier();

    // body(i) for 0..count - 1, of which each thread takes neighbours.
    template <typename Body>
    void static_for(int64_t count, const Body &body) const {
        const int64_t share = count / threads, more = count % threads;
        const int64_t begin = thread * share + (thread < more ? thread : more);
        for (int64_t i = begin; i < begin + share + (thread < more); i++) body(i);
    }

    // The same, where a thread that is free takes the next `chunk`.  A barrier lies between two of these.
    template <typename Body>
    void dynamic_for(int64_t count, int64_t chunk, const Body &body) {
        const int64_t chunks = (count + chunk - 1) / chunk;
        for (int64_t taken; (taken = take() - before) < chunks;)
            for (int64_t i = taken * chunk; i < count && i < (taken + 1) * chunk; i++) body(i);
        before += chunks + threads;  // each thread has taken one chunk that does not exist
    }

  private:
    int64_t take();

    Region &region;
    int64_t thread, threads, before = 0;
};

// Runs body(team, context) on so many threads; SF_OK, or what one of them returned instead.
int run_region(int threads, int (*body)(Team &, const void *), const void *context);

namespace {

// The same with a body that takes a Team & and returns SF_OK or an error.
template <typename Body>
int parallel(int threads, const Body &body) {
    const auto run = [](Team &team, const void *context) -> int {
        return (*static_cast<const Body *>(context))(team);
    };
    return run_region(threads, run, &body);
}

// body(i) for 0..count - 1, of which each of the threads takes neighbours.
template <typename Body>
void parallel_for(int threads, int64_t count, const Body &body) {
    parallel(threads, [&](Team &team) {
        team.static_for(count, body);
        return 0;
    });
}

}  // namespace

#endif
