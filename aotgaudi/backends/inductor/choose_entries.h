// The choice of a query's k best entries, of equal ones the oldest. choose_entries.py puts it into units.
#ifndef AOTGAUDI_CHOOSE_ENTRIES
#define AOTGAUDI_CHOOSE_ENTRIES
#include <algorithm>
#include <cmath>
#include <vector>
namespace aotgaudi {

// Whether entry `a` is chosen before entry `b`. NaN is larger than every number.
struct Better {
  const float* scores;
  bool operator()(int64_t a, int64_t b) const {
    const float x = scores[a], y = scores[b];
    const bool is_nan = std::isnan(x), other_is_nan = std::isnan(y);
    if (is_nan != other_is_nan) return is_nan;
    if (!is_nan && x != y) return x > y;
    return a < b;
  }
};

// Choices of one thread, row after row.
struct Choice {
  std::vector<int64_t> candidates;

  inline void choose(const float* scores, const bool* seen, int64_t size, int64_t k, bool* chosen) {
    candidates.clear();
    for (int64_t i = 0; i < size; ++i)
      if (seen[i]) candidates.push_back(i);
    const int64_t count = candidates.size();
    if (count <= k) {
      std::copy(seen, seen + size, chosen);
      return;
    }
    std::fill(chosen, chosen + size, false);
    std::nth_element(candidates.begin(), candidates.begin() + k, candidates.end(), Better{scores});
    for (int64_t i = 0; i < k; ++i) chosen[candidates[i]] = true;
  }
};

}  // namespace aotgaudi
#endif
