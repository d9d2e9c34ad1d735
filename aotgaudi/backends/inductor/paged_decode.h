// Decode attention over a paged cache, which is read in place. paged_decode.py puts it into units.
//
// One call is one row, one KV head and G of its query heads: they see the tokens of the row's blocks, block after block, with
// a running maximum and total. Sums are float32. A row's result depends on its blocks alone, in their order. A key has D
// numbers and a value V, its token's first; both are D apart from the next token's.
//
// The two products of a block are in float32 or, with AVX512_BF16, over neighbouring pairs of bfloat16.
#ifndef AOTGAUDI_PAGED_DECODE
#define AOTGAUDI_PAGED_DECODE
namespace aotgaudi {

constexpr float kMasked = -1.0e30f;

// The largest of 4, 3, 2, 1 that divides n: the number of accumulators, which must fit into registers.
constexpr int64_t tile_of(int64_t n) { return n % 4 == 0 ? 4 : n % 3 == 0 ? 3 : n % 2 == 0 ? 2 : 1; }

// The products in float32. A key is padded with zeros to DP numbers, a value to VP.
template <typename T, int64_t D, int64_t V, int64_t G, int64_t B>
struct InFloats {
  using Vec = at::vec::Vectorized<float>;
  static constexpr int64_t W = Vec::size();
  static constexpr int64_t C = (D + W - 1) / W;  // vectors of a key
  static constexpr int64_t DP = C * W;
  static constexpr int64_t CV = (V + W - 1) / W;  // vectors of a value
  static constexpr int64_t VP = CV * W;
  static constexpr int64_t BP = (B + W - 1) / W * W;  // scores of a block
  static constexpr int64_t GT = tile_of(G);
  static constexpr int64_t CT = tile_of(CV);

  // The c-th vector of the N numbers at `head`, padded with zeros.
  template <int64_t N>
  static inline Vec load(const T* head, int64_t c) {
    const T* from = head + c * W;
    alignas(64) T tail[W] = {};
    if (N % W != 0 && c == N / W) {
      std::copy(from, head + N, tail);
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

  alignas(64) float query[G * DP];  // times the scaling

  InFloats(const T* heads, float scaling) {
    for (int64_t g = 0; g < G; ++g)
      for (int64_t c = 0; c < C; ++c) (load<D>(heads + g * D, c) * Vec(scaling)).store(query + g * DP + c * W);
  }

  // scores[g][t ... t + W) = query[g] . keys[t]
  inline void score(const T* keys, const T*, int64_t t, float* scores) const {
    const int64_t count = std::min(W, B - t);
    for (int64_t g0 = 0; g0 < G; g0 += GT) {
      alignas(64) float lanes[GT][W * W] = {};
      for (int64_t i = 0; i < count; ++i) {
        const T* key = keys + (t + i) * D;
        Vec sums[GT];
#pragma GCC unroll 4
        for (int64_t g = 0; g < GT; ++g) sums[g] = Vec(0.f);
#pragma GCC unroll 16
        for (int64_t c = 0; c < C; ++c) {
          const Vec k = load<D>(key, c);
#pragma GCC unroll 4
          for (int64_t g = 0; g < GT; ++g)
            sums[g] = at::vec::fmadd(k, Vec::loadu(query + (g0 + g) * DP + c * W), sums[g]);
        }
#pragma GCC unroll 4
        for (int64_t g = 0; g < GT; ++g) sums[g].store(lanes[g] + i * W);
      }
      for (int64_t g = 0; g < GT; ++g) {
        alignas(64) float turned[W * W];
        at::vec::transpose_mxn<float, W, W>(lanes[g], W, turned, W);
        Vec sum = Vec::loadu(turned);
#pragma GCC unroll 16
        for (int64_t i = 1; i < W; ++i) sum = sum + Vec::loadu(turned + i * W);
        sum.store(scores + (g0 + g) * BP + t);
      }
    }
  }

  // out[g] += sum over first <= t < last of weights[g][t] * values[t]
  static inline void add_values(const float* weights, const T* values, int64_t first, int64_t last, float* out) {
    for (int64_t g0 = 0; g0 < G; g0 += GT) {
      for (int64_t c0 = 0; c0 < CV; c0 += CT) {
        Vec sums[GT][CT];
#pragma GCC unroll 4
        for (int64_t g = 0; g < GT; ++g)
#pragma GCC unroll 4
          for (int64_t c = 0; c < CT; ++c) sums[g][c] = Vec::loadu(out + (g0 + g) * VP + (c0 + c) * W);
        for (int64_t t = first; t < last; ++t) {
          Vec value[CT];
#pragma GCC unroll 4
          for (int64_t c = 0; c < CT; ++c) value[c] = load<V>(values + t * D, c0 + c);
#pragma GCC unroll 4
          for (int64_t g = 0; g < GT; ++g) {
            const Vec weight(weights[(g0 + g) * BP + t]);
#pragma GCC unroll 4
            for (int64_t c = 0; c < CT; ++c) sums[g][c] = at::vec::fmadd(weight, value[c], sums[g][c]);
          }
        }
#pragma GCC unroll 4
        for (int64_t g = 0; g < GT; ++g)
#pragma GCC unroll 4
          for (int64_t c = 0; c < CT; ++c) sums[g][c].store(out + (g0 + g) * VP + (c0 + c) * W);
      }
    }
  }
};

template <typename T, int64_t D, int64_t V, int64_t G, int64_t B>
struct Products {
  using type = InFloats<T, D, V, G, B>;
};

#ifdef __AVX512BF16__
// The products over pairs: two numbers of a head of keys, or the numbers of two tokens of values, with rounded weights.
template <int64_t D, int64_t V, int64_t G, int64_t B>
struct InPairs {
  using T = c10::BFloat16;
  using Pair = int32_t;
  static constexpr int64_t P = 16;     // pairs, or sums, of a register
  static constexpr int64_t J = D / 2;  // pairs of a key
  static constexpr int64_t C = V / 32;  // registers of a value
  static constexpr int64_t GT = tile_of(G);
  static constexpr int64_t CT = C % 2 == 0 ? 2 : 1;

  const Pair* query;
  float scaling;

  InPairs(const T* heads, float scale) : query(reinterpret_cast<const Pair*>(heads)), scaling(scale) {}

  // Prefetches the numbers of 16 tokens.
  static inline void fetch(const T* tokens) {
    for (int64_t i = 0; i < P * D; i += 32) __builtin_prefetch(tokens + i, 0, 2);
  }

  // scores[g][t ... t + 16) = query[g] . keys[t]. Prefetches the next keys, and the values of these.
  inline void score(const T* keys, const T* values, int64_t t, float* scores) const {
    fetch(keys + (t + P) * D);
    fetch(values + t * D);
    alignas(64) float turned[J * P];  // a pair of 16 tokens, and the next
    const float* pairs = reinterpret_cast<const float*>(keys + t * D);
    for (int64_t j = 0; j < J; j += P) at::vec::transpose_mxn<float, P, P>(pairs + j, J, turned + j * P, P);
    for (int64_t g0 = 0; g0 < G; g0 += GT) {
      __m512 even[GT], odd[GT];  // No sum waits for itself.
#pragma GCC unroll 4
      for (int64_t g = 0; g < GT; ++g) even[g] = odd[g] = _mm512_setzero_ps();
      for (int64_t j = 0; j < J; j += 2) {
        const __m512bh one = (__m512bh)_mm512_load_ps(turned + j * P);
        const __m512bh other = (__m512bh)_mm512_load_ps(turned + (j + 1) * P);
#pragma GCC unroll 4
        for (int64_t g = 0; g < GT; ++g) {
          const Pair* x = query + (g0 + g) * J + j;
          even[g] = _mm512_dpbf16_ps(even[g], one, (__m512bh)_mm512_set1_epi32(x[0]));
          odd[g] = _mm512_dpbf16_ps(odd[g], other, (__m512bh)_mm512_set1_epi32(x[1]));
        }
      }
#pragma GCC unroll 4
      for (int64_t g = 0; g < GT; ++g)
        _mm512_store_ps(scores + (g0 + g) * B + t, (even[g] + odd[g]) * _mm512_set1_ps(scaling));
    }
  }

  // out[g] += sum over first <= t < last of weights[g][t] * values[t]; behind `last` weights are 0, up to a whole register.
  static inline void add_values(const float* weights, const T* values, int64_t first, int64_t last, float* out) {
    alignas(64) T rounded[G * B];
    for (int64_t g = 0; g < G; ++g)
      for (int64_t t = first; t < last; t += P)
        _mm256_store_si256(reinterpret_cast<__m256i*>(rounded + g * B + t),
                           (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(weights + g * B + t)));
    for (int64_t g0 = 0; g0 < G; g0 += GT)
      for (int64_t c0 = 0; c0 < C; c0 += CT)
        add_tile(reinterpret_cast<const Pair*>(rounded + g0 * B), values + c0 * 32, first, last, out + g0 * V + c0 * 32);
  }

  // GT heads, CT registers. Of a register's 32 numbers, `low` has the sums of 0 to 3, 8 to 11 and so on, `high` the others.
  static inline void add_tile(const Pair* weights, const T* values, int64_t first, int64_t last, float* out) {
    __m512 low[GT][CT], high[GT][CT];
#pragma GCC unroll 4
    for (int64_t g = 0; g < GT; ++g)
#pragma GCC unroll 2
      for (int64_t c = 0; c < CT; ++c) low[g][c] = high[g][c] = _mm512_setzero_ps();
    for (int64_t t = first; t < last; t += 2) {
      __m512bh lows[CT], highs[CT];
#pragma GCC unroll 2
      for (int64_t c = 0; c < CT; ++c) {
        const T* at = values + t * D + c * 32;
        const __m512i one = _mm512_loadu_si512(at);
        const __m512i other = t + 1 < last ? _mm512_loadu_si512(at + D) : _mm512_setzero_si512();
        lows[c] = (__m512bh)_mm512_unpacklo_epi16(one, other);
        highs[c] = (__m512bh)_mm512_unpackhi_epi16(one, other);
      }
#pragma GCC unroll 4
      for (int64_t g = 0; g < GT; ++g) {
        const __m512bh weight = (__m512bh)_mm512_set1_epi32(weights[(g * B + t) / 2]);
#pragma GCC unroll 2
        for (int64_t c = 0; c < CT; ++c) {
          low[g][c] = _mm512_dpbf16_ps(low[g][c], lows[c], weight);
          high[g][c] = _mm512_dpbf16_ps(high[g][c], highs[c], weight);
        }
      }
    }
    const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
#pragma GCC unroll 4
    for (int64_t g = 0; g < GT; ++g)
#pragma GCC unroll 2
      for (int64_t c = 0; c < CT; ++c) {
        float* at = out + g * V + c * 32;
        _mm512_store_ps(at, _mm512_load_ps(at) + _mm512_permutex2var_ps(low[g][c], front, high[g][c]));
        _mm512_store_ps(at + P, _mm512_load_ps(at + P) + _mm512_permutex2var_ps(low[g][c], back, high[g][c]));
      }
  }
};

template <int64_t D, int64_t V, int64_t G, int64_t B>
struct Products<c10::BFloat16, D, V, G, B> {
  using type = std::conditional_t<D % 32 == 0 && V % 32 == 0 && B % 16 == 0, InPairs<D, V, G, B>,
                                  InFloats<c10::BFloat16, D, V, G, B>>;
};
#endif

template <typename T, int64_t D, int64_t V, int64_t G, int64_t B>
struct PagedDecode {
  using Floats = InFloats<T, D, V, G, B>;
  using Vec = typename Floats::Vec;
  static constexpr int64_t W = Floats::W, CV = Floats::CV, VP = Floats::VP, BP = Floats::BP;

  static inline void store(const Vec& value, T* head, int64_t c) {
    const int64_t count = V % W != 0 && c == CV - 1 ? V % W : W;
    if constexpr (std::is_same_v<T, float>) {
      value.store(head + c * W, count);
    } else {
      at::vec::convert_from_float<T>(value, value).store(head + c * W, count);
    }
  }

  // Turns one head's scores of a block into weights, and rescales its total and sums to the new maximum.
  static inline void weigh(float* scores, const bool* seen, int64_t first, int64_t last, int64_t end, float softcap,
                           float& top, float& total, float* out) {
    if (softcap != 0.f)
      for (int64_t t = first; t < end; t += W)
        (Vec(softcap) * (Vec::loadu(scores + t) * Vec(1.f / softcap)).tanh()).store(scores + t);
    for (int64_t t = first; t < end; ++t) scores[t] = t < last && seen[t] ? scores[t] : kMasked;
    Vec largest(top);
    for (int64_t t = first; t < end; t += W) largest = at::vec::maximum(largest, Vec::loadu(scores + t));
    const float now =
        at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, largest);
    Vec sum(0.f);
    for (int64_t t = first; t < end; t += W) {
      const Vec weight = (Vec::loadu(scores + t) - Vec(now)).exp();
      weight.store(scores + t);
      sum = sum + weight;
    }
    const float kept = std::exp(top - now);
    total = total * kept + at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, sum);
    if (kept != 1.f)
      for (int64_t i = 0; i < VP; i += W) (Vec::loadu(out + i) * Vec(kept)).store(out + i);
    top = now;
  }

  // `query` is [G][D], `output` [G][V], `sinks` [G] or null; `keys` and `values` are the head's in block 0.
  template <typename S>
  static void attend(const T* query, const T* keys, const T* values, int64_t block_stride, const int64_t* block_list,
                     const int64_t* block_rows, const bool* seen, int64_t num_blocks, int64_t row, const S* sinks,
                     float scaling, float softcap, T* output) {
    alignas(64) float out[G * VP] = {}, scores[G * BP];
    float top[G], total[G];
    const typename Products<T, D, V, G, B>::type products(query, scaling);
    for (int64_t g = 0; g < G; ++g) {
      top[g] = sinks == nullptr ? kMasked : static_cast<float>(sinks[g]);
      total[g] = sinks == nullptr ? 0.f : 1.f;
    }
    for (int64_t n = 0; n < num_blocks; ++n) {
      if (block_rows[n] != row) continue;
      const bool* block_seen = seen + n * B;
      int64_t first = 0, last = B;
      while (last > 0 && !block_seen[last - 1]) --last;
      if (last == 0) continue;  // padding
      while (!block_seen[first]) ++first;
      first = first / W * W;
      const int64_t end = (last + W - 1) / W * W;
      const int64_t offset = block_list[n] * block_stride;
      for (int64_t t = first; t < end; t += W) products.score(keys + offset, values + offset, t, scores);
      for (int64_t g = 0; g < G; ++g)
        weigh(scores + g * BP, block_seen, first, last, end, softcap, top[g], total[g], out + g * VP);
      products.add_values(scores, values + offset, first, last, out);
    }
    for (int64_t g = 0; g < G; ++g) {
      const Vec share(1.f / std::max(total[g], 1e-30f));
      for (int64_t c = 0; c < CV; ++c) store(Vec::loadu(out + g * VP + c * W) * share, output + g * V, c);
    }
  }
};

}  // namespace aotgaudi
#endif
