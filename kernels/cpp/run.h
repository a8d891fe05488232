// One request's part of a step, and the small arithmetic that its cells share.
#pragma once

#include "interface.h"

#include <vector>

namespace hisparsed {

// Columns of the counters, in the order of state.py.
enum Counter { kReferences, kResident, kHits, kLoads, kSpills, kDropped, kCounters };

struct Place {
    int64_t block, offset;
};

// Divides by the block size: a shift where it is a power of two.
struct BlockSize {
    int32_t size, shift;

    explicit BlockSize(int64_t rows) : size(static_cast<int32_t>(rows)), shift(-1) {
        if ((size & (size - 1)) == 0) shift = __builtin_ctz(size);
    }
    int32_t block(int32_t row) const { return shift >= 0 ? row >> shift : row / size; }
};

// The same samples as ghosts.py: one hashed place in every group of `every` positions.
inline bool is_ghost(int32_t position, uint32_t every) {
    const uint32_t group = static_cast<uint32_t>(position) >> __builtin_ctz(every);
    return ((group * 0x9E3779B1u >> 16 ^ static_cast<uint32_t>(position)) & (every - 1)) == 0;
}

struct Run {
    int64_t request, state, first_row, rows;
    std::vector<int32_t> spills;  // positions, ascending
    int32_t outcome = kDone;
    int64_t figures[4] = {};
};

}  // namespace hisparsed
