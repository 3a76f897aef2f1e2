// The memory that calls borrow; see workspace.h.

#include "workspace.h"

#include <cstdlib>
#include <mutex>

namespace {

constexpr int64_t LIMIT = (int64_t)256 << 20;  // bytes kept at most
constexpr int MOST = 64;                       // pieces kept at most

struct Piece {
    void *data;
    int64_t held;
};

std::mutex guard;
Piece kept[MOST];  // the one kept longest first
int count = 0;
int64_t total = 0;

void remove(int index) {
    total -= kept[index].held;
    for (count--; index < count; index++) kept[index] = kept[index + 1];
}

}  // namespace

void *borrow(int64_t bytes, int64_t *held) {
    {
        const std::lock_guard<std::mutex> lock(guard);
        // A piece of much more would be missing where so much is asked for.
        const int64_t most = 2 * bytes + (1 << 20);
        int best = -1;
        for (int i = 0; i < count; i++)
            if (kept[i].held >= bytes && kept[i].held <= most &&
                (best < 0 || kept[i].held < kept[best].held))
                best = i;
        if (best >= 0) {
            const Piece piece = kept[best];
            remove(best);
            *held = piece.held;
            return piece.data;
        }
    }
    *held = (bytes + 64 + 4095) / 4096 * 4096;
    return aligned_alloc(64, (size_t)*held);
}

void give_back(void *data, int64_t held) {
    if (!data) return;
    void *freed[MOST];
    int freeing = 0;
    {
        const std::lock_guard<std::mutex> lock(guard);
        // What was kept longest goes first: shapes that are no longer in use.
        while (count && held <= LIMIT && (count == MOST || total + held > LIMIT)) {
            freed[freeing++] = kept[0].data;
            remove(0);
        }
        if (held <= LIMIT) {
            kept[count++] = {data, held};
            total += held;
            data = nullptr;
        }
    }
    for (int i = 0; i < freeing; i++) free(freed[i]);
    free(data);
}
