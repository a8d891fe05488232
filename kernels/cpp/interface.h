// The C interface: what Python passes by ctypes. Mirrored field by field in cpp_structs.py;
// change both and hisparsed_abi_version together. Arrays belong to the caller.
#pragma once

#include <cstdint>

extern "C" {

// ResolverState of one index group; shapes are documented in state.py.
struct ResolverArrays {
    int64_t num_states, max_capacity, max_positions, ghosts;
    int64_t sample_period, ghost_every;
    int32_t *slot_pos, *slot_stamp;
    int32_t *capacity, *step;
    int64_t *counters, *octile, *octile_misses;
    int32_t *ghost_pos;
    int64_t *ghost;
    const int32_t *clock;
};

struct BlockTable {
    const int32_t *blocks;
    int64_t width, stride;  // both in blocks
};

struct ResolveStep {
    int64_t rows, topk, requests, scratch_blocks;
    int64_t block_size, attention_block_stride, host_rows;
    int64_t resident_by_state, index_bytes, threads;
    const int32_t *positions, *request_ids, *state_of_request, *scratch;
    BlockTable source, resident, hot;
    int64_t *physical_rows;
    void *attention_indices;
    int32_t *valid_counts;
    uint8_t *miss_mask;
    int64_t *swap_host, *swap_physical;
    int32_t *swap_counts;
    // Set when the call does not return 0: what was wrong, with its figures.
    int64_t error_figures[4];
};

struct GatherCall {
    const uint8_t *host;
    uint8_t *slab;
    int64_t host_rows, slab_rows;  // how many there are
    int64_t block_size, row_bytes, host_block_bytes, slab_block_bytes, layers;
    const int64_t *host_offsets, *slab_offsets;
    int64_t rows, topk, threads;
    const int64_t *swap_host, *swap_physical;
    const int32_t *swap_counts;
    int64_t error_figures[2];
};

enum Outcome : int32_t {
    kDone = 0,
    kRequestOutside = 1,      // row, request id
    kStateOutside = 2,        // request, state row
    kStateTwice = 3,          // state row, request
    kHotBlocksMissing = 4,    // state row, request, blocks needed, blocks leased
    kSwapRowOutside = 5,      // host row, physical row
    kOutOfMemory = 6,
    kSwapCountOutside = 7,    // row, count
    kCapacityOutside = 8,     // state row, capacity
};

int32_t hisparsed_abi_version();
int32_t hisparsed_resolve(const ResolverArrays *state, ResolveStep *step);
int32_t hisparsed_gather(GatherCall *call);
}
