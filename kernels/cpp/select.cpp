#include "select.h"

#include <algorithm>
#include <climits>
#include <functional>

#if defined(__x86_64__) && defined(__GNUC__)
#define HISPARSED_GATHER
#include <immintrin.h>
#endif

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
void flag_used(const uint32_t *__restrict words, int64_t count, uint8_t *__restrict flags) {
    for (int64_t i = 0; i < count; ++i) flags[i] = words[i] != 0;
}

// Lists the slots from `first` to `count` whose positions are selected; returns how many they are.
int32_t list_selected(const uint32_t *selected, const int32_t *positions, int32_t first,
                      int32_t count, int32_t *listed) {
    int32_t found = 0;
    for (int32_t slot = first; slot < count; ++slot) {
        listed[found] = slot;
        found += is_selected(selected, positions[slot]);
    }
    return found;
}

#ifdef HISPARSED_GATHER
// The same with eight look-ups at a time, which the compiler does not make of the loop above.
__attribute__((target("avx2"))) int32_t list_selected_by_gather(const uint32_t *selected,
                                                                const int32_t *positions,
                                                                int32_t count, int32_t *listed) {
    const __m256i low = _mm256_set1_epi32(31);
    int32_t found = 0, slot = 0;
    for (; slot + 64 <= count; slot += 64) {
        uint64_t mask = 0;
        for (int32_t part = 0; part < 64; part += 8) {
            const __m256i position =
                _mm256_loadu_si256(reinterpret_cast<const __m256i *>(positions + slot + part));
            const __m256i words = _mm256_i32gather_epi32(reinterpret_cast<const int *>(selected),
                                                         _mm256_srai_epi32(position, 5), 4);
            // Shifted so that the bit of each position is the sign.
            const __m256i bits = _mm256_sllv_epi32(words, _mm256_andnot_si256(position, low));
            mask |= static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(bits))) << part;
        }
        for (; mask != 0; mask &= mask - 1) listed[found++] = slot + __builtin_ctzll(mask);
    }
    return found + list_selected(selected, positions, slot, count, listed + found);
}
#endif

constexpr int64_t kFlagsAWord = sizeof(uint64_t), kFlagsAMask = 64;

// Zeroed flags for `count` values, in whole masks.
uint8_t *clear_flags(Workspace &work, int64_t count) {
    const int64_t masks = (count + kFlagsAMask - 1) / kFlagsAMask;
    work.flags.assign(masks * (kFlagsAMask / kFlagsAWord), 0);
    return reinterpret_cast<uint8_t *>(work.flags.data());
}

// Calls each(i) for every flag i that is 1, ascending; few are, and a mask skips the others.
template <typename Each>
void for_flags(const Workspace &work, const Each &each) {
    for (size_t first = 0; first < work.flags.size(); first += kFlagsAMask / kFlagsAWord) {
        uint64_t mask = 0;
        for (int64_t i = 0; i < kFlagsAMask / kFlagsAWord; ++i)
            mask |= work.flags[first + i] * 0x0102040810204080ull >> 56 << (8 * i);
        for (; mask != 0; mask &= mask - 1) each(first * kFlagsAWord + __builtin_ctzll(mask));
    }
}

// Slots up to the last held one.
int32_t held_end(const int32_t *positions, int32_t capacity) {
    while (capacity > 0 && positions[capacity - 1] < 0) --capacity;
    return capacity;
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

// Slots stamped `limit` or less, ascending, at most `most` of them and a few more.
void list_up_to(const int32_t *stamps, int32_t capacity, int32_t limit, int32_t most,
                Workspace &work) {
    constexpr int32_t kFlags = sizeof(uint64_t);
    const int32_t words = (capacity + kFlags - 1) / kFlags;
    work.flags.assign(words, 0);
    flag_up_to(stamps, capacity, limit, reinterpret_cast<uint8_t *>(work.flags.data()));
    work.chosen.resize(std::min(most, capacity) + kFlags);  // so that the store needs no branch
    int32_t *listed = work.chosen.data(), found = 0;
    for (int32_t word = 0; word < words && found < most; ++word) {
        uint64_t flags = work.flags[word];
        if (flags == 0) continue;
        for (int32_t slot = word * kFlags; slot < (word + 1) * kFlags; ++slot, flags >>= 8) {
            listed[found] = slot;
            found += flags & 1;
        }
    }
    work.chosen.resize(found);
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

void collect_misses(Workspace &work, int64_t words, int64_t most) {
    uint32_t *selected = work.selected();
    flag_used(selected, words, clear_flags(work, words));
    work.misses.resize(most);
    int32_t *listed = work.misses.data();
    int64_t found = 0;
    for_flags(work, [&](int64_t word) {
        for (uint32_t bits = selected[word]; bits != 0; bits &= bits - 1)
            listed[found++] = static_cast<int32_t>(word * 32 + __builtin_ctz(bits));
        selected[word] = 0;
    });
    work.misses.resize(found);
}

void list_hits(const int32_t *positions, int32_t capacity, Workspace &work) {
    const int32_t end = held_end(positions, capacity);
    work.hits.resize(end + 1);  // one more, so that the store needs no branch
    int32_t *listed = work.hits.data();
    int32_t found;
#ifdef HISPARSED_GATHER
    static const bool gathers = __builtin_cpu_supports("avx2");
    found = gathers ? list_selected_by_gather(work.selected(), positions, end, listed)
                    : list_selected(work.selected(), positions, 0, end, listed);
#else
    found = list_selected(work.selected(), positions, 0, end, listed);
#endif
    work.hits.resize(found);
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
    work.positions.resize(work.chosen.size() + 1);
    int32_t *equal = work.positions.data();
    size_t found = 0;
    for (int32_t slot : work.chosen) {
        equal[found] = positions[slot];
        found += stamps[slot] == cut;
    }
    work.positions.resize(found);
    const size_t younger = work.chosen.size() - found;
    const int32_t last = nth_smallest(work.positions, take - static_cast<int32_t>(younger));
    int32_t *kept = work.chosen.data();
    size_t left = 0;
    for (int32_t slot : work.chosen) {
        kept[left] = slot;
        left += stamps[slot] != cut || positions[slot] <= last;
    }
    work.chosen.resize(left);
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

}  // namespace hisparsed
