// Samples the token of one row. sample_tokens.py puts it into units; graphs/sample_tokens.py defines the result.
//
// It never sorts the vocabulary. A row is a list of candidates that filters shorten. The bounds that filters need (the k-th
// largest value, the smallest weight of a nucleus) come from `cut`, which splits a range into eight again and again and looks
// only at the right eighth. Candidates stay in the vocabulary's order.
#ifndef AOTGAUDI_SAMPLE_TOKENS
#define AOTGAUDI_SAMPLE_TOKENS
namespace aotgaudi {

using Vec = at::vec::Vectorized<float>;
using Doubles = at::vec::VectorizedN<double, 2>;
constexpr int64_t W = Vec::size();
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Floats as integers in the same order, and back.
inline int64_t key_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits >= 0 ? bits : bits ^ 0x7fffffff;
}
inline float value_of(int64_t key) {
  int32_t bits = static_cast<int32_t>(key);
  if (bits < 0) bits ^= 0x7fffffff;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The true lanes of a comparison's result.
inline uint32_t lanes(const Vec& mask) { return ~static_cast<uint32_t>(mask.zero_mask()) & ((1u << W) - 1); }

inline Doubles widen(const Vec& value) { return at::vec::convert<double, 2, float, 1>(at::vec::VectorizedN<float, 1>(value)); }
inline double total(const Doubles& sums) {
  double lane[W], sum = 0;
  sums.store(lane);
  for (int64_t i = 0; i < W; ++i) sum += lane[i];
  return sum;
}

// Fills the last vector of `values` up with -inf, so that whole vectors can be read.
inline void pad(float* values, int64_t n) {
  while (n % W != 0) values[n++] = kNothing;
}

inline double sum(const float* values, int64_t n) {
  Doubles sums(0.0);
  int64_t i = 0;
  for (; i + W <= n; i += W) sums = sums + widen(Vec::loadu(values + i));
  double rest = 0;
  for (; i < n; ++i) rest += values[i];
  return total(sums) + rest;
}

// Writes the lanes of `value` that `found` names one after another, and those of `ids` unless it is null. Returns their number.
// It may write to W places. The time does not depend on `found`.
inline int64_t pack(const Vec& value, const int32_t* ids, uint32_t found, float* to, int32_t* to_ids) {
#if defined(CPU_CAPABILITY_AVX512)
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(found, value));
  if (ids != nullptr) _mm512_storeu_si512(to_ids, _mm512_maskz_compress_epi32(found, _mm512_loadu_si512(ids)));
  return __builtin_popcount(found);
#else
  float lane[W];
  value.store(lane);
  int64_t n = 0;
  for (int64_t i = 0; i < W; ++i) {
    to[n] = lane[i];
    if (ids != nullptr) to_ids[n] = ids[i];
    n += found >> i & 1;
  }
  return n;
#endif
}

// Moves the values in [`least`, `end`) and their ids to `to` and `to_ids`, which may be the same arrays.
inline int64_t keep(const float* values, const int32_t* ids, int64_t n, float least, float end, float* to, int32_t* to_ids) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += W) {
    const Vec value = Vec::loadu(values + i);
    uint32_t found = lanes((value >= Vec(least)) & (value < Vec(end)));
    if (n - i < W) found &= (1u << (n - i)) - 1;
    if (found == 0) continue;
    if (ids == nullptr) kept += pack(value, nullptr, found, to + kept, nullptr);
    else kept += pack(value, ids + i, found, to + kept, to_ids + kept);
  }
  return kept;
}

constexpr int64_t kParts = 8;

// sums[p] = how many values (kMass: the sum of those) are no less than least[p]. `values` is padded.
template <bool kMass>
inline void weigh(const float* values, int64_t n, const float* least, double* sums) {
  using Sums = std::conditional_t<kMass, Doubles, Vec>;
  Vec bounds[kParts];
  Sums lane_sums[kParts];
#pragma GCC unroll 8
  for (int64_t p = 1; p < kParts; ++p) {
    bounds[p] = Vec(least[p]);
    if constexpr (kMass) lane_sums[p] = Doubles(0.0); else lane_sums[p] = Vec(0.f);
  }
  const Vec one(1.f);
  for (int64_t i = 0; i < n; i += W) {
    const Vec value = Vec::loadu(values + i);
#pragma GCC unroll 8
    for (int64_t p = 1; p < kParts; ++p) {
      if constexpr (kMass) lane_sums[p] = lane_sums[p] + widen((value >= bounds[p]) & value);
      else lane_sums[p] = lane_sums[p] + ((value >= bounds[p]) & one);
    }
  }
  for (int64_t p = 1; p < kParts; ++p) {
    if constexpr (kMass) sums[p] = total(lane_sums[p]); else sums[p] = total(widen(lane_sums[p]));
  }
}

// The largest t such that `wanted` values are at least t (kMass: such that these values sum to `wanted`); the smallest value
// if all together are too few. The result is one of the values, of which there is at least one. `values` is padded, and
// `room` has the same size. With kMass no value is negative.
template <bool kMass>
inline float cut(const float* values, int64_t n, double wanted, float* room) {
  double above = 0;  // Number (kMass: sum) of the values from `end` on.
  for (;;) {
    Vec smallest(values[0]), largest(values[0]);
    for (int64_t i = 0; i + W <= n; i += W) {
      smallest = at::vec::minimum(smallest, Vec::loadu(values + i));
      largest = at::vec::maximum(largest, Vec::loadu(values + i));
    }
    float low = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::minimum(a, b); }, smallest);
    float high = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, largest);
    for (int64_t i = n / W * W; i < n; ++i) {
      low = std::min(low, values[i]);
      high = std::max(high, values[i]);
    }
    if (low == high) return low;
    const int64_t first = key_of(low), end = key_of(high) + 1, step = std::max<int64_t>(1, (end - first) / kParts);
    float least[kParts + 1];
    double sums[kParts + 1];
    for (int64_t p = 0; p < kParts; ++p) least[p] = value_of(std::min(first + p * step, end));
    least[kParts] = value_of(end);
    weigh<kMass>(values, n, least, sums);
    sums[kParts] = 0;
    int64_t part = 0;
    while (part + 1 < kParts && above + sums[part + 1] >= wanted) ++part;
    above += sums[part + 1];
    n = keep(values, nullptr, n, least[part], least[part + 1], room, nullptr);
    if (n == 0) return least[part];
    pad(room, n);
    values = room;
  }
}

// The index of the first value whose cumulative weight exceeds the share `noise` of the total.
inline int64_t pick(const float* weights, int64_t n, double noise, double* sums) {
  constexpr int64_t kBlock = 256;
  double all = 0;
  for (int64_t b = 0; b * kBlock < n; ++b) all += sums[b] = sum(weights + b * kBlock, std::min(kBlock, n - b * kBlock));
  const double wanted = noise * all;
  double before = 0;
  for (int64_t b = 0; b * kBlock < n; before += sums[b++]) {
    if (before + sums[b] <= wanted) continue;
    double cumulative = before;
    for (int64_t i = b * kBlock; i < std::min(n, (b + 1) * kBlock); ++i)
      if ((cumulative += weights[i]) > wanted) return i;
  }
  while (n > 1 && !(weights[n - 1] > 0)) --n;  // Rounding can lead here if the noise is close to 1.
  return n - 1;
}

// A row's filters; the defaults keep all tokens.
struct Filter {
  int64_t top_k = 0;
  float top_p = 1;
  float min_p = 0;
};

template <typename T, int64_t V>
class Row {
  static constexpr int64_t kVectors = (V + W - 1) / W;
  static constexpr int64_t kGroup = 16;  // vectors, whose lanes are a group each
  static constexpr int64_t kGroups = (kVectors + kGroup - 1) / kGroup * W;
  static constexpr int64_t kFullGroups = kVectors / kGroup * W;

  struct Room {
    float values[kVectors * W], spare[kVectors * W], groups[kGroups];
    int32_t ids[kVectors * W];
    double sums[kVectors * W / 256 + 1];
  };
  std::unique_ptr<Room> room_{new Room};
  Room& room = *room_;

  static inline Vec load(const T* logits, int64_t v) {
    const T* from = logits + v * W;
    alignas(64) T tail[W];
    if (V % W != 0 && v == kVectors - 1) {
      std::fill(std::copy(from, logits + V, tail), tail + W, static_cast<T>(kNothing));
      from = tail;
    }
    if constexpr (std::is_same_v<T, float>) {
      return Vec::loadu(from);
    } else {
      Vec value;
      at::vec::load_to_float<T>(from, value);
      return value;
    }
  }

  // The largest of each group, and of all; NaN if any is.
  inline float find_largest(const T* logits) {
    Vec largest(kNothing);
    for (int64_t g = 0; g * W < kGroups; ++g) {
      Vec of_group(kNothing);
      for (int64_t v = g * kGroup; v < std::min(kVectors, (g + 1) * kGroup); ++v)
        of_group = at::vec::maximum(of_group, load(logits, v));
      of_group.store(room.groups + g * W);
      largest = at::vec::maximum(largest, of_group);
    }
    return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, largest);
  }

  // The first of the largest, or the first NaN.
  inline int64_t find_first(const T* logits, float largest) {
    const auto is_it = [&](float value) { return value == largest || (std::isnan(value) && std::isnan(largest)); };
    for (int64_t g = 0; g * W < kGroups; ++g) {
      if (!std::any_of(room.groups + g * W, room.groups + (g + 1) * W, is_it)) continue;
      for (int64_t i = g * kGroup * W; i < std::min(V, (g + 1) * kGroup * W); ++i)
        if (is_it(static_cast<float>(logits[i]))) return i;
    }
    return 0;
  }

  // The tokens of at least `least` become the candidates.
  inline int64_t take(const T* logits, float least) {
    int64_t n = 0;
    for (int64_t v = 0; v < kVectors; ++v) {
      const Vec value = load(logits, v);
      uint32_t found = lanes(value >= Vec(least));
      if (V % W != 0 && v == kVectors - 1) found &= (1u << (V % W)) - 1;
      if (found == 0) continue;
      int32_t ids[W];
      for (int64_t i = 0; i < W; ++i) ids[i] = v * W + i;
      n += pack(value, ids, found, room.values + n, room.ids + n);
    }
    return n;
  }

  inline int64_t keep_from(int64_t n, float least) {
    return keep(room.values, room.ids, n, least, std::numeric_limits<float>::infinity(), room.values, room.ids);
  }

  // The candidates after top-k. If the largest values of k groups are at least `least`, so is the k-th largest value.
  inline int64_t take_top(const T* logits, int64_t k) {
    const bool is_filtered = k > 0 && k < V;
    const int64_t n = take(logits, is_filtered && k <= kFullGroups ? cut<false>(room.groups, kGroups, k, room.spare) : kNothing);
    if (!is_filtered || n == k) return n;
    pad(room.values, n);
    return keep_from(n, cut<false>(room.values, n, k, room.spare));
  }

  // The candidates after top-p. Weights below an even share of what may be dropped are dropped at once.
  inline int64_t keep_nucleus(int64_t n, float top_p) {
    const double all = sum(room.values, n);
    const float surely_out = 0.999 * (1.0 - top_p) * all / n;
    const int64_t m = keep(room.values, nullptr, n, surely_out, 2.f, room.spare, nullptr);
    pad(room.spare, m);
    return keep_from(n, cut<true>(room.spare, m, top_p * all, room.spare));
  }

 public:
  int64_t sample(const T* logits, float temperature, double noise, const Filter& filter) {
    const float largest = find_largest(logits);
    if (!(temperature > 0)) return find_first(logits, largest);
    if (!std::isfinite(largest)) return 0;
    int64_t n = take_top(logits, filter.top_k);
    const Vec scale(std::min(1.f / temperature, std::numeric_limits<float>::max()));
    for (int64_t i = 0; i < n; i += W)
      ((Vec::loadu(room.values + i) - Vec(largest)) * scale).exp_u20().store(room.values + i);
    if (filter.min_p > 0) n = keep_from(n, std::min(filter.min_p, 1.f));
    if (filter.top_p < 1) n = keep_nucleus(n, filter.top_p);
    return room.ids[pick(room.values, n, noise, room.sums)];
  }
};

}  // namespace aotgaudi
#endif
