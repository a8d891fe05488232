// Row copies from the host pool to the slab: one swap list, every layer of the index group.
#include "interface.h"
#include "pool.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

namespace hisparsed {
namespace {

constexpr int64_t kEntriesATurn = 64;
constexpr int64_t kBytesWorthThreads = 256 << 10;
constexpr int64_t kPrefetchAhead = 4;
constexpr int64_t kLineBytes = 64;

struct Copy {
    int64_t from, to;  // bytes, without the layer's offset
};

int64_t row_start(int64_t row, int64_t block_size, int64_t block_bytes, int64_t row_bytes) {
    return row / block_size * block_bytes + row % block_size * row_bytes;
}

// Lists the copies of all rows; stops, with the figures, at what cannot be.
Outcome list_copies(GatherCall &call, std::vector<Copy> &copies) {
    for (int64_t row = 0; row < call.rows; ++row) {
        if (call.swap_counts[row] < 0 || call.swap_counts[row] > call.topk) {
            call.error_figures[0] = row, call.error_figures[1] = call.swap_counts[row];
            return kSwapCountOutside;
        }
        for (int64_t i = 0; i < call.swap_counts[row]; ++i) {
            const int64_t host = call.swap_host[row * call.topk + i];
            const int64_t physical = call.swap_physical[row * call.topk + i];
            if (host < 0 || physical < 0 || host >= call.host_rows || physical >= call.slab_rows) {
                call.error_figures[0] = host, call.error_figures[1] = physical;
                return kSwapRowOutside;
            }
            copies.push_back(
                {row_start(host, call.block_size, call.host_block_bytes, call.row_bytes),
                 row_start(physical, call.block_size, call.slab_block_bytes, call.row_bytes)});
        }
    }
    return kDone;
}

void copy_some(const GatherCall &call, const Copy *copies, int64_t count, int64_t layer) {
    const uint8_t *host = call.host + call.host_offsets[layer];
    uint8_t *slab = call.slab + call.slab_offsets[layer];
    for (int64_t i = 0; i < count; ++i) {
        if (i + kPrefetchAhead < count) {
            const uint8_t *soon = host + copies[i + kPrefetchAhead].from;
            for (int64_t byte = 0; byte < call.row_bytes; byte += kLineBytes)
                __builtin_prefetch(soon + byte);
        }
        std::memcpy(slab + copies[i].to, host + copies[i].from, call.row_bytes);
    }
}

}  // namespace
}  // namespace hisparsed

extern "C" int32_t hisparsed_gather(GatherCall *call) try {
    using namespace hisparsed;
    static thread_local std::vector<Copy> copies;
    copies.clear();
    if (const Outcome outcome = list_copies(*call, copies)) return outcome;
    const int64_t entries = copies.size();
    const int64_t turns = (entries + kEntriesATurn - 1) / kEntriesATurn;
    const bool large = entries * call->layers * call->row_bytes >= kBytesWorthThreads;
    const Copy *list = copies.data();
    parallel_for(turns * call->layers, large ? call->threads : 1, [&](int64_t turn) {
        const int64_t first = turn % turns * kEntriesATurn;
        copy_some(*call, list + first, std::min(kEntriesATurn, entries - first), turn / turns);
    });
    return kDone;
} catch (const std::bad_alloc &) {
    return kOutOfMemory;
}
