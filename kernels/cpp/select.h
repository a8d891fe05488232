// Order statistics over the slots of one state row: whom to evict, where octiles begin.
#pragma once

#include <cstdint>
#include <vector>

// One build serves all x86-64 machines: the loader picks the clone that fits the processor.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define HISPARSED_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define HISPARSED_CLONES
#endif

namespace hisparsed {

constexpr int kOctiles = 8;
constexpr int kGhostBins = 16;

// Scratch memory of one thread, reused from step to step.
struct Workspace {
    std::vector<uint64_t> missed;    // one bit a position; all zero between requests
    std::vector<uint64_t> summary;   // one bit a word of `missed`
    std::vector<int32_t> miss_cells, misses, chosen, positions, ages;
    std::vector<int32_t> ghosts;
    std::vector<uint64_t> keys, flags;
};

inline uint64_t slot_key(int32_t stamp, int32_t position) {
    return (static_cast<uint64_t>(static_cast<uint32_t>(stamp)) << 32) |
           static_cast<uint32_t>(position);
}

// Keys (stamp, position) of the last slots of the first seven octiles of stack depth; 0 where
// the octile has no end because fewer slots are held.
struct OctileKeys {
    uint64_t key[kOctiles - 1];

    int octile(int32_t stamp, int32_t position) const {
        const uint64_t own = slot_key(stamp, position);
        int octile = 0;
        for (uint64_t last : key) octile += own < last;
        return octile;
    }
};

// Fills work.misses from the bitmap: distinct and ascending. Clears the bitmap on the way.
void collect_misses(Workspace &work);

// Fills work.chosen with `take` slots below `capacity` that are not stamped `now`, ascending:
// empty ones first (lowest slot), then the smallest (stamp, position). As many must exist.
void choose_slots(const int32_t *stamps, const int32_t *positions, int32_t capacity, int32_t now,
                  int32_t take, Workspace &work);

OctileKeys octile_keys(const int32_t *stamps, const int32_t *positions, int32_t capacity,
                       Workspace &work);

// Ghost samples selected later than sample `group`.
int64_t younger_ghosts(const int32_t *stamps, int64_t ghosts, int64_t group);

}  // namespace hisparsed
