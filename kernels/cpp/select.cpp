#include "select.h"

#include <algorithm>
#include <climits>
#include <functional>

namespace hisparsed {
namespace {

HISPARSED_CLONES
int32_t count_up_to(const int32_t *values, int32_t count, int32_t limit) {
    int32_t found = 0;
    for (int32_t i = 0; i < count; ++i) found += values[i] <= limit;
    return found;
}

HISPARSED_CLONES
int32_t count_above(const int32_t *values, int64_t count, int32_t limit) {
    int32_t found = 0;
    for (int64_t i = 0; i < count; ++i) found += values[i] > limit;
    return found;
}

HISPARSED_CLONES
int32_t count_equal(const int32_t *values, int64_t count, int32_t wanted) {
    int32_t found = 0;
    for (int64_t i = 0; i < count; ++i) found += values[i] == wanted;
    return found;
}

// Smallest stamp of a held slot: less one, unsigned, an empty slot (0) is the largest of all.
HISPARSED_CLONES
int32_t oldest(const int32_t *stamps, int32_t count) {
    uint32_t low = UINT_MAX;
    for (int32_t i = 0; i < count; ++i) {
        const uint32_t known = static_cast<uint32_t>(stamps[i]) - 1;
        low = known < low ? known : low;
    }
    return static_cast<int32_t>(low + 1);
}

HISPARSED_CLONES
void flag_up_to(const int32_t *values, int32_t count, int32_t limit, uint8_t *flags) {
    for (int32_t i = 0; i < count; ++i) flags[i] = values[i] <= limit;
}

HISPARSED_CLONES
int32_t youngest(const int32_t *stamps, int32_t count) {
    int32_t high = 0;
    for (int32_t i = 0; i < count; ++i) high = stamps[i] > high ? stamps[i] : high;
    return high;
}

// The lowest stamp x with at least `take` slots stamped x or less.
int32_t cut_stamp(const int32_t *stamps, int32_t capacity, int32_t now, int32_t take) {
    if (count_up_to(stamps, capacity, 0) >= take) return 0;
    int32_t low = oldest(stamps, capacity), high = now - 1;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (count_up_to(stamps, capacity, middle) >= take)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// Slots stamped `limit` or less, ascending, at most `most` of them.
void list_up_to(const int32_t *stamps, int32_t capacity, int32_t limit, size_t most,
                Workspace &work) {
    constexpr size_t kFlags = sizeof(uint64_t);
    work.flags.assign((capacity + kFlags - 1) / kFlags, 0);
    flag_up_to(stamps, capacity, limit, reinterpret_cast<uint8_t *>(work.flags.data()));
    work.chosen.clear();
    for (size_t word = 0; word < work.flags.size() && work.chosen.size() < most; ++word) {
        if (work.flags[word] == 0) continue;
        const size_t end = std::min(static_cast<size_t>(capacity), (word + 1) * kFlags);
        for (size_t slot = word * kFlags; slot < end; ++slot)
            if (stamps[slot] <= limit) work.chosen.push_back(static_cast<int32_t>(slot));
    }
}

// Histograms wider than this would cost more than they save.
constexpr int32_t kWidestHistogram = 1 << 16;

OctileKeys sorted_octile_keys(const int32_t *stamps, const int32_t *positions, int32_t capacity,
                              int32_t held, Workspace &work) {
    work.keys.clear();
    for (int32_t i = 0; i < capacity; ++i)
        if (stamps[i] != 0) work.keys.push_back(slot_key(stamps[i], positions[i]));
    std::sort(work.keys.begin(), work.keys.end(), std::greater<uint64_t>());
    OctileKeys result{};
    for (int i = 1; i < kOctiles; ++i) {
        const int32_t rank = (capacity * i + kOctiles - 1) / kOctiles;
        if (rank >= 1 && rank <= held) result.key[i - 1] = work.keys[rank - 1];
    }
    return result;
}

}  // namespace

void choose_slots(const int32_t *stamps, const int32_t *positions, int32_t capacity, int32_t now,
                  int32_t take, Workspace &work) {
    const int32_t cut = cut_stamp(stamps, capacity, now, take);
    list_up_to(stamps, capacity, cut, cut == 0 ? take : capacity, work);
    if (work.chosen.size() == static_cast<size_t>(take)) return;
    if (cut == 0) {
        work.chosen.resize(take);
        return;
    }
    work.positions.clear();
    for (int32_t slot : work.chosen)
        if (stamps[slot] == cut) work.positions.push_back(positions[slot]);
    const size_t rest = take - (work.chosen.size() - work.positions.size());
    std::nth_element(work.positions.begin(), work.positions.begin() + (rest - 1),
                     work.positions.end());
    const int32_t last = work.positions[rest - 1];
    const auto stays = [&](int32_t slot) { return stamps[slot] == cut && positions[slot] > last; };
    work.chosen.erase(std::remove_if(work.chosen.begin(), work.chosen.end(), stays),
                      work.chosen.end());
}

OctileKeys octile_keys(const int32_t *stamps, const int32_t *positions, int32_t capacity,
                       Workspace &work) {
    OctileKeys result{};
    const int32_t held = count_above(stamps, capacity, 0);
    if (held == 0) return result;
    const int32_t low = oldest(stamps, capacity), high = youngest(stamps, capacity);
    if (high - low >= kWidestHistogram)
        return sorted_octile_keys(stamps, positions, capacity, held, work);

    // Count by age; only the stamps that a boundary cuts need their positions in order.
    work.ages.assign(high - low + 1, 0);
    for (int32_t i = 0; i < capacity; ++i)
        if (stamps[i] != 0) ++work.ages[high - stamps[i]];
    struct Boundary {
        int32_t age, within, group;
    };
    Boundary boundaries[kOctiles - 1];
    int32_t younger = 0, age = 0, count = 0, groups = 0;
    for (int i = 1; i < kOctiles; ++i) {
        const int32_t rank = (capacity * i + kOctiles - 1) / kOctiles;
        if (rank < 1 || rank > held) break;
        while (younger + work.ages[age] < rank) younger += work.ages[age++];
        if (count == 0 || boundaries[count - 1].age != age) work.tied[groups++].clear();
        boundaries[count++] = {age, rank - younger, groups - 1};
    }
    std::fill(work.ages.begin(), work.ages.end(), 0);
    for (int i = 0; i < count; ++i) work.ages[boundaries[i].age] = boundaries[i].group + 1;
    for (int32_t i = 0; i < capacity; ++i) {
        if (stamps[i] == 0) continue;
        if (const int32_t group = work.ages[high - stamps[i]])
            work.tied[group - 1].push_back(positions[i]);
    }
    for (int i = 0; i < count; ++i) {
        auto &tied = work.tied[boundaries[i].group];
        const auto last = tied.begin() + (boundaries[i].within - 1);
        std::nth_element(tied.begin(), last, tied.end(), std::greater<int32_t>());
        result.key[i] = slot_key(high - boundaries[i].age, *last);
    }
    return result;
}

int64_t younger_ghosts(const int32_t *stamps, int64_t ghosts, int64_t group) {
    return count_above(stamps, ghosts, stamps[group]) +
           count_equal(stamps + group + 1, ghosts - group - 1, stamps[group]);
}

}  // namespace hisparsed
