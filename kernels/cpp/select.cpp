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

// The n-th smallest (from 1) of `values`. Bisection with a vectorised count
// beats std::nth_element here, whose branches depend on the data.
int32_t nth_smallest(const std::vector<int32_t> &values, int32_t n) {
    const auto ends = std::minmax_element(values.begin(), values.end());
    int32_t low = *ends.first, high = *ends.second;
    const int32_t count = static_cast<int32_t>(values.size());
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (count_up_to(values.data(), count, middle) >= n)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
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

// The positions of the `count` slots stamped `stamp`, in slot order.
void list_positions(const int32_t *stamps, const int32_t *positions, int32_t capacity,
                    int32_t stamp, int32_t count, Workspace &work) {
    work.positions.resize(count + 1);  // one more, so that the store needs no branch
    int32_t *listed = work.positions.data();
    int32_t found = 0;
    for (int32_t i = 0; i < capacity; ++i) {
        listed[found] = positions[i];
        found += stamps[i] == stamp;
    }
    work.positions.resize(count);
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

void collect_misses(Workspace &work) {
    work.misses.clear();
    for (size_t part = 0; part < work.summary.size(); ++part) {
        for (uint64_t words = work.summary[part]; words != 0; words &= words - 1) {
            const size_t word = part * 64 + __builtin_ctzll(words);
            for (uint64_t bits = work.missed[word]; bits != 0; bits &= bits - 1)
                work.misses.push_back(static_cast<int32_t>(word * 64 + __builtin_ctzll(bits)));
            work.missed[word] = 0;
        }
        work.summary[part] = 0;
    }
}

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
    const size_t younger = work.chosen.size() - work.positions.size();
    const int32_t last = nth_smallest(work.positions, take - static_cast<int32_t>(younger));
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

    // Count by age, in two histograms since neighbours are often of one age and would wait for
    // each other's store. Only the stamps that a boundary cuts need their positions in order.
    const int32_t ages = high - low + 1;
    work.ages.assign(2 * static_cast<size_t>(ages), 0);
    for (int32_t i = 0; i < capacity; ++i)
        if (stamps[i] != 0) ++work.ages[high - stamps[i] + (i & 1) * ages];
    int32_t younger = 0, age = 0, listed = -1;
    for (int i = 1; i < kOctiles; ++i) {
        const int32_t rank = (capacity * i + kOctiles - 1) / kOctiles;
        if (rank < 1 || rank > held) break;
        int32_t here = work.ages[age] + work.ages[age + ages];
        while (younger + here < rank) {
            younger += here;
            ++age;
            here = work.ages[age] + work.ages[age + ages];
        }
        if (age != listed) list_positions(stamps, positions, capacity, high - age, here, work);
        listed = age;
        const int32_t last = nth_smallest(work.positions, here - (rank - younger) + 1);
        result.key[i - 1] = slot_key(high - age, last);
    }
    return result;
}

int64_t younger_ghosts(const int32_t *stamps, int64_t ghosts, int64_t group) {
    return count_above(stamps, ghosts, stamps[group]) +
           count_equal(stamps + group + 1, ghosts - group - 1, stamps[group]);
}

}  // namespace hisparsed
