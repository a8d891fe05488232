// A small pool of threads for loops whose turns are independent.
#pragma once

#include <cstdint>
#include <functional>

namespace hisparsed {

// Calls body(i) for 0 <= i < count on up to `threads` threads, the caller among them. A caller
// that finds the pool busy, and a single turn, run inline. The body must not throw.
void parallel_for(int64_t count, int64_t threads, const std::function<void(int64_t)> &body);

}  // namespace hisparsed
