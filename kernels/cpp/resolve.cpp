// The resolver for CPU tensors. One turn handles one request from classification to swap list;
// only spills wait for the others, because shared scratch rows are dealt in request order.
#include "interface.h"
#include "pool.h"
#include "run.h"
#include "select.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <utility>
#include <vector>

namespace hisparsed {
namespace {

constexpr int64_t kCellsWorthThreads = 16384;  // below this, waking threads costs more

Workspace &workspace() {
    static thread_local Workspace work;
    return work;
}

// A request that ran out of memory may have left its marks in the bitmap.
void renew_workspace() {
    Workspace fresh;
    std::swap(workspace(), fresh);
}

// `Index` is the type of the attention indices.
template <typename Index>
class Resolver {
public:
    Resolver(const ResolverArrays &state, const ResolveStep &step)
        : state_(state), step_(step), size_(step.block_size) {}

    int32_t find_runs(int64_t figures[4]);
    void resolve_run(Run &run) const;
    void deal_scratch();
    std::vector<Run> runs;

private:
    struct Tables {
        const int32_t *source, *resident, *hot;
    };

    bool open_step(Run &run, int32_t capacity) const;
    int64_t classify(Run &run, Workspace &work, const Tables &tables, int64_t totals[]) const;
    void plan(Run &run, Workspace &work, const Tables &tables, int64_t words,
              int64_t totals[]) const;
    void stamp_hits(const Run &run, Workspace &work, bool due) const;
    void move_ghosts(const Run &run, Workspace &work, bool due) const;
    void answer_cells(const Run &run, const Workspace &work, const int32_t *hot) const;
    void write_swap_counts(const Run &run, int64_t total) const;
    int64_t host_row(const int32_t *source, int32_t position) const;

    void write(int64_t cell, Place place) const {
        step_.physical_rows[cell] = place.block * step_.block_size + place.offset;
        static_cast<Index *>(step_.attention_indices)[cell] =
            static_cast<Index>(place.block * step_.attention_block_stride + place.offset);
    }
    void write_nowhere(int64_t cell) const {
        step_.physical_rows[cell] = -1;
        static_cast<Index *>(step_.attention_indices)[cell] = -1;
        step_.miss_mask[cell] = 0;
    }
    Place hot_place(const int32_t *hot, int32_t slot) const {
        const int32_t index = size_.block(slot);
        return {hot[index], slot - index * size_.size};
    }
    int32_t *slots_of(int32_t *array, int64_t row) const {
        return array + row * state_.max_capacity;
    }

    const ResolverArrays &state_;
    const ResolveStep &step_;
    BlockSize size_;
};

template <typename Index>
int32_t Resolver<Index>::find_runs(int64_t figures[4]) {
    int64_t previous = -1;
    for (int64_t row = 0; row < step_.rows; ++row) {
        const int64_t request = step_.request_ids[row];
        if (request >= step_.requests) {
            figures[0] = row, figures[1] = request;
            return kRequestOutside;
        }
        const int64_t state = request < 0 ? -1 : step_.state_of_request[request];
        if (state >= state_.num_states) {
            figures[0] = request, figures[1] = state;
            return kStateOutside;
        }
        step_.swap_counts[row] = 0;
        step_.valid_counts[row] = 0;
        if (state < 0) {
            for (int64_t k = 0; k < step_.topk; ++k) write_nowhere(row * step_.topk + k);
            previous = -1;
        } else if (request == previous) {
            ++runs.back().rows;
        } else {
            Run run;
            run.request = request, run.state = state, run.first_row = row, run.rows = 1;
            runs.push_back(std::move(run));
            previous = request;
        }
    }
    std::vector<std::pair<int64_t, int64_t>> owners;
    for (const Run &run : runs) owners.emplace_back(run.state, run.request);
    std::sort(owners.begin(), owners.end());
    for (size_t i = 1; i < owners.size(); ++i) {
        if (owners[i].first == owners[i - 1].first) {
            figures[0] = owners[i].first, figures[1] = owners[i].second;
            return kStateTwice;
        }
    }
    return kDone;
}

template <typename Index>
int64_t Resolver<Index>::host_row(const int32_t *source, int32_t position) const {
    const int32_t page = size_.block(position);
    if (page >= step_.source.width || source[page] <= 0) return -1;
    const int64_t row =
        static_cast<int64_t>(source[page]) * size_.size + (position - page * size_.size);
    return row < step_.host_rows ? row : -1;
}

// A capacity that the hot table does not cover would address blocks of other requests.
template <typename Index>
bool Resolver<Index>::open_step(Run &run, int32_t capacity) const {
    if (capacity < 0 || capacity > state_.max_capacity) {
        run.outcome = kCapacityOutside;
        run.figures[0] = run.state, run.figures[1] = capacity;
        return false;
    }
    const int32_t *hot = step_.hot.blocks + run.request * step_.hot.stride;
    const int64_t needed = (capacity + step_.block_size - 1) / step_.block_size;
    int64_t leased = 0;
    while (leased < step_.hot.width && hot[leased] > 0) ++leased;
    if (leased >= needed) return true;
    run.outcome = kHotBlocksMissing;
    const int64_t figures[] = {run.state, run.request, needed, leased};
    std::copy(figures, figures + 4, run.figures);
    return false;
}

template <typename Index>
void Resolver<Index>::resolve_run(Run &run) const {
    Workspace &work = workspace();
    const size_t positions = static_cast<size_t>(state_.max_positions);
    if (work.slot_of.size() < positions) {
        work.bits.resize(positions / 32 + 2);
        work.slot_of.resize(positions);
    }
    const int64_t resident_row = step_.resident_by_state ? run.state : run.request;
    const Tables tables = {step_.source.blocks + run.request * step_.source.stride,
                           step_.resident.blocks + resident_row * step_.resident.stride,
                           step_.hot.blocks + run.request * step_.hot.stride};
    int64_t totals[kCounters] = {};
    const int64_t words = classify(run, work, tables, totals);
    if (run.outcome != kDone) return;
    if (words > 0) plan(run, work, tables, words, totals);
    int64_t *counters = state_.counters + run.state * kCounters;
    for (int i = 0; i < kCounters; ++i) counters[i] += totals[i];
}

// One pass over the cells: resident rows are answered, and what the host backs is selected in the
// bitmap, which forms the union of the rows. Returns the words of the bitmap that are in use.
// Everything the loop reads is a local: its stores could otherwise change the fields it would
// read again.
template <typename Index>
int64_t Resolver<Index>::classify(Run &run, Workspace &work, const Tables &tables,
                                  int64_t totals[]) const {
    const BlockSize size = size_;
    const int64_t topk = step_.topk, stride = step_.attention_block_stride;
    const int64_t source_pages = step_.source.width, resident_pages = step_.resident.width;
    const int64_t max_positions = state_.max_positions, host_rows = step_.host_rows;
    const Tables table = tables;
    const int32_t capacity = state_.capacity[run.state];
    const uint32_t every = static_cast<uint32_t>(state_.ghost_every);
    uint32_t *selected = work.selected();
    work.ghosts.clear();
    work.cells.resize(run.rows * topk);
    int32_t *cells = work.cells.data();
    int64_t backed = 0, resident = 0;
    int32_t top = -1;

    for (int64_t row = 0; row < run.rows; ++row) {
        const int64_t first = (run.first_row + row) * topk;
        const int32_t *positions = step_.positions + first;
        int64_t *physical_rows = step_.physical_rows + first;
        Index *indices = static_cast<Index *>(step_.attention_indices) + first;
        std::memset(step_.miss_mask + first, 0, topk);
        int32_t valid = 0;
        for (int64_t k = 0; k < topk; ++k) {
            const int32_t position = positions[k];
            int64_t physical = -1, index = -1;
            if (position >= 0) {
                const int32_t page = size.block(position);
                const int64_t block = page < resident_pages ? table.resident[page] : 0;
                const int64_t offset = position - static_cast<int64_t>(page) * size.size;
                if (block > 0) {
                    physical = block * size.size + offset;
                    index = block * stride + offset;
                    ++valid;
                } else {
                    const int64_t source = page < source_pages ? table.source[page] : 0;
                    if (source > 0 && source * size.size + offset < host_rows &&
                        position < max_positions) {
                        if (backed == 0 && !open_step(run, capacity)) return 0;
                        selected[position >> 5] |= 1u << (position & 31);
                        cells[backed++] = static_cast<int32_t>(row * topk + k);
                        top = std::max(top, position);
                        if (is_ghost(position, every)) work.ghosts.push_back(position);
                        continue;  // answered once its slot is known
                    }
                }
            }
            physical_rows[k] = physical;
            indices[k] = static_cast<Index>(index);
        }
        resident += valid;
        step_.valid_counts[run.first_row + row] = valid;
    }
    work.cells.resize(backed);
    totals[kReferences] = backed + resident;
    totals[kResident] = resident;
    return top < 0 ? 0 : (top >> 5) + 1;
}

template <typename Index>
void Resolver<Index>::plan(Run &run, Workspace &work, const Tables &tables, int64_t words,
                           int64_t totals[]) const {
    int32_t *stamps = slots_of(state_.slot_stamp, run.state);
    int32_t *positions = slots_of(state_.slot_pos, run.state);
    uint16_t *slot_of = work.slot_of.data();
    const int32_t capacity = state_.capacity[run.state];
    const int32_t now = ++state_.step[run.state];
    const bool due = *state_.clock % state_.sample_period == 0;

    list_hits(positions, capacity, work);
    move_ghosts(run, work, due);
    stamp_hits(run, work, due);
    const int32_t hits = static_cast<int32_t>(work.hits.size());
    collect_misses(work, words, work.cells.size());
    const int32_t missing = static_cast<int32_t>(work.misses.size());
    if (due) state_.octile_misses[run.state] += missing;

    const int32_t take = std::min(missing, capacity - hits);
    if (take > 0) choose_slots(stamps, positions, capacity, now, take, work);
    const int64_t first_cell = run.first_row * step_.topk;
    for (int32_t i = 0; i < take; ++i) {
        const int32_t slot = work.chosen[i], position = work.misses[i];
        positions[slot] = position;
        stamps[slot] = now;
        slot_of[position] = static_cast<uint16_t>(slot | kLoaded);
        const Place place = hot_place(tables.hot, slot);
        step_.swap_host[first_cell + i] = host_row(tables.source, position);
        step_.swap_physical[first_cell + i] = place.block * size_.size + place.offset;
    }
    totals[kHits] = hits;
    totals[kLoads] = take;
    run.spills.assign(work.misses.begin() + take, work.misses.end());
    for (int32_t position : run.spills) slot_of[position] = kNoSlot;
    answer_cells(run, work, tables.hot);
    write_swap_counts(run, take);
}

// Takes the hits out of the bitmap, which leaves the misses.
template <typename Index>
void Resolver<Index>::stamp_hits(const Run &run, Workspace &work, bool due) const {
    int32_t *stamps = slots_of(state_.slot_stamp, run.state);
    const int32_t *positions = slots_of(state_.slot_pos, run.state);
    const int32_t now = state_.step[run.state];
    uint32_t *selected = work.selected();
    if (due) {
        int64_t *octile = state_.octile + run.state * kOctiles;
        const OctileKeys octiles =
            octile_keys(stamps, positions, state_.capacity[run.state], work);
        for (int32_t slot : work.hits) ++octile[octiles.octile(stamps[slot], positions[slot])];
    }
    for (int32_t slot : work.hits) {
        const int32_t position = positions[slot];
        stamps[slot] = now;
        work.slot_of[position] = static_cast<uint16_t>(slot);
        selected[position >> 5] &= ~(1u << (position & 31));
    }
}

// Every cell that the host backs looks up how its position is served; spills wait.
template <typename Index>
void Resolver<Index>::answer_cells(const Run &run, const Workspace &work,
                                   const int32_t *hot) const {
    const BlockSize size = size_;
    const int64_t topk = step_.topk, stride = step_.attention_block_stride;
    const int64_t first_cell = run.first_row * topk;
    const int32_t *positions = step_.positions + first_cell;
    int64_t *physical_rows = step_.physical_rows + first_cell;
    Index *indices = static_cast<Index *>(step_.attention_indices) + first_cell;
    uint8_t *miss_mask = step_.miss_mask + first_cell;
    int32_t *valid_counts = step_.valid_counts + run.first_row;
    const uint16_t *slot_of = work.slot_of.data();
    int64_t row = 0, end = topk;
    int32_t valid = 0;
    for (int32_t cell : work.cells) {
        const uint16_t place = slot_of[positions[cell]];
        if (place == kNoSlot) {
            physical_rows[cell] = -1;
            indices[cell] = -1;
            continue;
        }
        while (cell >= end) {
            valid_counts[row++] += valid;
            end += topk;
            valid = 0;
        }
        const int32_t slot = place & kSlot;
        const int32_t index = size.block(slot);
        const int64_t block = hot[index];
        const int64_t offset = slot - static_cast<int64_t>(index) * size.size;
        physical_rows[cell] = block * size.size + offset;
        indices[cell] = static_cast<Index>(block * stride + offset);
        miss_mask[cell] = (place & kLoaded) != 0;
        ++valid;
    }
    if (valid > 0) valid_counts[row] += valid;
}

// Selected samples go to the front, the highest first; the last ones fall off the end.
template <typename Index>
void Resolver<Index>::move_ghosts(const Run &run, Workspace &work, bool due) const {
    int32_t *list = state_.ghost_pos + run.state * state_.ghosts;
    int64_t *bins = state_.ghost + run.state * (kGhostBins + 1);
    const uint32_t *selected = work.selected();
    work.old_ghosts.clear();
    int64_t alive = 0, again = 0;
    for (int64_t i = 0; i < state_.ghosts; ++i) {
        const int32_t position = list[i];
        if (position < 0) continue;
        if (is_selected(selected, position)) {
            ++again;
            if (due) {
                const int64_t depth = alive * state_.ghost_every;
                ++bins[std::min<int64_t>(depth * kGhostBins / state_.max_capacity, kGhostBins)];
            }
        } else {
            work.old_ghosts.push_back(position);
        }
        ++alive;
    }
    std::sort(work.ghosts.begin(), work.ghosts.end(), std::greater<int32_t>());
    work.ghosts.erase(std::unique(work.ghosts.begin(), work.ghosts.end()), work.ghosts.end());
    if (due) bins[kGhostBins] += static_cast<int64_t>(work.ghosts.size()) - again;
    work.ghosts.insert(work.ghosts.end(), work.old_ghosts.begin(), work.old_ghosts.end());
    work.ghosts.resize(state_.ghosts, -1);
    std::copy(work.ghosts.begin(), work.ghosts.end(), list);
}

template <typename Index>
void Resolver<Index>::write_swap_counts(const Run &run, int64_t total) const {
    for (int64_t row = run.first_row; row < run.first_row + run.rows; ++row) {
        const int64_t here = std::min(total, step_.topk);
        step_.swap_counts[row] = static_cast<int32_t>(here);
        total -= here;
    }
}

template <typename Index>
void Resolver<Index>::deal_scratch() {
    int64_t usable = 0;
    while (usable < step_.scratch_blocks && step_.scratch[usable] > 0) ++usable;
    usable *= step_.block_size;
    int64_t next = 0;
    for (Run &run : runs) {
        if (run.spills.empty()) continue;
        const int64_t stored = std::min<int64_t>(run.spills.size(), usable - next);
        int64_t *counters = state_.counters + run.state * kCounters;
        counters[kSpills] += stored;
        counters[kDropped] += static_cast<int64_t>(run.spills.size()) - stored;
        if (stored == 0) continue;

        const int32_t *source = step_.source.blocks + run.request * step_.source.stride;
        const auto place = [&](int64_t index) -> Place {
            return {step_.scratch[(next + index) / step_.block_size],
                    (next + index) % step_.block_size};
        };
        const int64_t first_cell = run.first_row * step_.topk;
        int64_t loaded = 0;
        for (int64_t row = 0; row < run.rows; ++row)
            loaded += step_.swap_counts[run.first_row + row];
        for (int64_t i = 0; i < stored; ++i) {
            const Place to = place(i);
            step_.swap_host[first_cell + loaded + i] = host_row(source, run.spills[i]);
            step_.swap_physical[first_cell + loaded + i] = to.block * size_.size + to.offset;
        }
        write_swap_counts(run, loaded + stored);
        const auto end = run.spills.begin() + stored;
        for (int64_t cell = first_cell; cell < first_cell + run.rows * step_.topk; ++cell) {
            const int32_t position = step_.positions[cell];
            if (step_.physical_rows[cell] >= 0 || position < 0) continue;
            const auto found = std::lower_bound(run.spills.begin(), end, position);
            if (found == end || *found != position) continue;
            write(cell, place(found - run.spills.begin()));
            step_.miss_mask[cell] = 1;
            ++step_.valid_counts[cell / step_.topk];
        }
        next += stored;
    }
}

template <typename Index>
int32_t resolve(const ResolverArrays &state, ResolveStep &step) {
    Resolver<Index> resolver(state, step);
    if (const int32_t outcome = resolver.find_runs(step.error_figures)) return outcome;
    auto &runs = resolver.runs;
    const bool large = step.rows * step.topk >= kCellsWorthThreads;
    parallel_for(runs.size(), large ? step.threads : 1, [&](int64_t index) {
        try {
            resolver.resolve_run(runs[index]);
        } catch (const std::bad_alloc &) {
            runs[index].outcome = kOutOfMemory;
            renew_workspace();
        }
    });
    resolver.deal_scratch();
    for (const Run &run : runs) {
        if (run.outcome == kDone) continue;
        std::copy(run.figures, run.figures + 4, step.error_figures);
        return run.outcome;
    }
    return kDone;
}

}  // namespace
}  // namespace hisparsed

extern "C" int32_t hisparsed_abi_version() { return 3; }

extern "C" int32_t hisparsed_resolve(const ResolverArrays *state, ResolveStep *step) try {
    return step->index_bytes == 4 ? hisparsed::resolve<int32_t>(*state, *step)
                                  : hisparsed::resolve<int64_t>(*state, *step);
} catch (const std::bad_alloc &) {
    return kOutOfMemory;
}
