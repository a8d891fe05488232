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

// Smallest stamp of a held slot; empty ones (0) are left out.
HISPARSED_CLONES
int32_t oldest(const int32_t *stamps, int32_t count) {
    int32_t low = INT_MAX;
    for (int32_t i = 0; i < count; ++i) {
        const int32_t known = stamps[i] == 0 ? INT_MAX : stamps[i];
        low = known < low ? known : low;
    }
    return low;
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
    int32_t cut_position = INT_MAX;
    if (cut > 0) {
        const int32_t rest = take - count_up_to(stamps, capacity, cut - 1);
        work.positions.clear();
        for (int32_t i = 0; i < capacity; ++i)
            if (stamps[i] == cut) work.positions.push_back(positions[i]);
        std::nth_element(work.positions.begin(), work.positions.begin() + (rest - 1),
                         work.positions.end());
        cut_position = work.positions[rest - 1];
    }
    // One more, so that the store below needs no branch.
    if (work.chosen.size() <= static_cast<size_t>(capacity)) work.chosen.resize(capacity + 1);
    int32_t *chosen = work.chosen.data();
    int32_t found = 0;
    for (int32_t i = 0; i < capacity; ++i) {
        chosen[found] = i;
        found += (stamps[i] < cut) | ((stamps[i] == cut) & (positions[i] <= cut_position));
    }
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
    int32_t younger = 0, age = 0;
    for (int i = 1; i < kOctiles; ++i) {
        const int32_t rank = (capacity * i + kOctiles - 1) / kOctiles;
        if (rank < 1 || rank > held) break;
        while (younger + work.ages[age] < rank) younger += work.ages[age++];
        const int32_t stamp = high - age, within = rank - younger;
        work.positions.clear();
        for (int32_t slot = 0; slot < capacity; ++slot)
            if (stamps[slot] == stamp) work.positions.push_back(positions[slot]);
        std::nth_element(work.positions.begin(), work.positions.begin() + (within - 1),
                         work.positions.end(), std::greater<int32_t>());
        result.key[i - 1] = slot_key(stamp, work.positions[within - 1]);
    }
    return result;
}

int64_t younger_ghosts(const int32_t *stamps, int64_t ghosts, int64_t group) {
    return count_above(stamps, ghosts, stamps[group]) +
           count_equal(stamps + group + 1, ghosts - group - 1, stamps[group]);
}

}  // namespace hisparsed
