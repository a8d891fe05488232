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

// How a selected position is served in this step: a slot, loaded or not, or no slot.
constexpr uint16_t kNoSlot = 0xffff, kLoaded = 0x8000, kSlot = 0x7fff;

// Scratch memory of one thread, reused from step to step.
struct Workspace {
    // One bit a position that the step selects; all zero between requests. The word in front
    // answers for position -1, which empty slots hold.
    std::vector<uint32_t> bits;
    std::vector<uint16_t> slot_of;  // by position; junk where the step does not select it
    std::vector<int32_t> cells, hits, misses, chosen, positions, ages;
    std::vector<int32_t> ghosts, old_ghosts;
    std::vector<uint64_t> keys, flags;

    uint32_t *selected() { return bits.data() + 1; }
};

inline bool is_selected(const uint32_t *selected, int32_t position) {
    return selected[position >> 5] >> (position & 31) & 1;
}

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

// Fills work.misses with the positions of the first `words` words of the bitmap, ascending, at most
// `most`, and clears them.
void collect_misses(Workspace &work, int64_t words, int64_t most);

// Fills work.hits with the slots below `capacity` whose positions are selected, ascending.
void list_hits(const int32_t *positions, int32_t capacity, Workspace &work);

// Fills work.chosen with `take` slots below `capacity` that are not stamped `now`, ascending:
// empty ones first (lowest slot), then the smallest (stamp, position). As many must exist.
void choose_slots(const int32_t *stamps, const int32_t *positions, int32_t capacity, int32_t now,
                  int32_t take, Workspace &work);

OctileKeys octile_keys(const int32_t *stamps, const int32_t *positions, int32_t capacity,
                       Workspace &work);

}  // namespace hisparsed
