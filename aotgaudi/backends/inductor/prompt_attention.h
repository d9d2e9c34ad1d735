// Attention of prompts: bfloat16 with AVX512_BF16. prompt_attention.py puts it into units.
//
// Keys and values are first packed into panels like the weights of linear layers (packed_linear.h): a panel has 16 tokens of
// keys, or 16 numbers of values. Then 16 rows at a time go over chunks of keys, with a running maximum and total. A row
// is a query of one head, and rows of all heads that share a KV head are neighbours. Keys that none of 16 rows sees cost
// nothing, and a row that sees nothing gets zeros. Scores and sums are float32, weights bfloat16.
#ifndef AOTGAUDI_PROMPT_ATTENTION
#define AOTGAUDI_PROMPT_ATTENTION
namespace aotgaudi {

template <int64_t D, int64_t G>
struct PromptAttention {
  using T = c10::BFloat16;
  using Pair = int32_t;  // two numbers
  using Vec = at::vec::Vectorized<float>;
  static constexpr int64_t P = 16;            // of a panel; also rows that are computed together
  static constexpr int64_t J = (D + 1) / 2;   // pairs of a head
  static constexpr int64_t C = (D + P - 1) / P;  // panels of values
  static constexpr int64_t CHUNK = 8;         // panels of keys
  static constexpr int64_t KEYS = CHUNK * P;

  // Sizes of a step: `q` queries and `k` keys of `K` heads a row.
  struct Sizes {
    int64_t q, k, K;
    int64_t num_panels() const { return (k + P - 1) / P; }
  };

  // Sixteen numbers of a head from the d-th on, as 32-bit words; zeros past its end, or without a head.
  static inline __m512i words(const T* head, int64_t d) {
    const __mmask16 there = head == nullptr ? 0 : D - d >= P ? 0xffff : (1 << (D - d)) - 1;
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, head + d));
  }

  // A panel of 16 keys [16][D] as [J][16][2], padded with zeros.
  static void lay_out_keys(const T* keys, int64_t count, T* panel) {
    if constexpr (D % 2 == 0) {
      const __mmask16 there = count >= P ? 0xffff : (1 << count) - 1;
      const __m512i tokens = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
      const __m512i at = _mm512_mullo_epi32(tokens, _mm512_set1_epi32(J));
      for (int64_t j = 0; j < J; ++j)
        _mm512_storeu_si512(panel + j * P * 2,
                            _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, at, keys + j * 2, 4));
    } else {
      std::fill(panel, panel + J * P * 2, T(0));
      for (int64_t t = 0; t < std::min(count, P); ++t)
        for (int64_t d = 0; d < D; ++d) panel[(d / 2 * P + t) * 2 + d % 2] = keys[t * D + d];
    }
  }

  // A panel of 16 values [16][D] as [C][8][16][2].
  static void lay_out_values(const T* values, int64_t count, T* panel) {
    for (int64_t t = 0; t < P; t += 2)
      for (int64_t c = 0; c < C; ++c) {
        const __m512i one = words(t < count ? values + t * D : nullptr, c * P);
        const __m512i other = words(t + 1 < count ? values + (t + 1) * D : nullptr, c * P);
        _mm512_storeu_si512(panel + (c * (P / 2) + t / 2) * P * 2,
                            _mm512_or_si512(one, _mm512_slli_epi32(other, 16)));
      }
  }

  // sums[16 rows][16] += x[16 rows][count pairs] times a panel; `stride` is that of rows of x, in pairs.
  static inline void multiply(const Pair* x, int64_t stride, const T* panel, int64_t count, __m512* sums) {
    for (int64_t j = 0; j < count; ++j) {
      const __m512bh weights = (__m512bh)_mm512_loadu_si512(panel + j * P * 2);
#pragma GCC unroll 16
      for (int64_t r = 0; r < P; ++r)
        sums[r] = _mm512_dpbf16_ps(sums[r], weights, (__m512bh)_mm512_set1_epi32(x[r * stride + j]));
    }
  }

  // The running results of 16 rows.
  struct Rows {
    alignas(64) T query[P * 2 * J] = {};
    alignas(64) float out[P][C * P] = {};
    alignas(64) float scores[P][KEYS];
    alignas(64) T weights[P][KEYS];
    const bool* seen[P];  // of each row; null without a row
    float top[P], total[P] = {};
  };

  // Which of 16 keys a row sees.
  static inline __mmask16 seen_by(const bool* seen, int64_t count) {
    if (seen == nullptr) return 0;
    const __mmask16 there = count >= P ? 0xffff : (1 << count) - 1;
    const __m128i flags = _mm_maskz_loadu_epi8(there, seen);
    return _mm_test_epi8_mask(flags, flags);
  }

  // Scores of a panel's keys, minus infinity where a row does not see one. Returns whether any row sees any.
  static inline bool score(Rows& rows, const T* key_panel, int64_t first, int64_t count, float scaling, int64_t at) {
    __mmask16 seen[P], any = 0;
    for (int64_t r = 0; r < P; ++r) {
      seen[r] = seen_by(rows.seen[r] == nullptr ? nullptr : rows.seen[r] + first, count);
      any |= seen[r];
    }
    const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    if (any == 0) {
      for (int64_t r = 0; r < P; ++r) _mm512_store_ps(rows.scores[r] + at, hidden);
      return false;
    }
    __m512 sums[P];
#pragma GCC unroll 16
    for (int64_t r = 0; r < P; ++r) sums[r] = _mm512_setzero_ps();
    multiply(reinterpret_cast<const Pair*>(rows.query), J, key_panel, J, sums);
    const __m512 scale = _mm512_set1_ps(scaling);
#pragma GCC unroll 16
    for (int64_t r = 0; r < P; ++r)
      _mm512_store_ps(rows.scores[r] + at, _mm512_mask_mul_ps(hidden, seen[r], sums[r], scale));
    return true;
  }

  // Turns a row's scores of keys `first` to `last` into weights, and rescales its sums to the new maximum.
  static inline void weigh(Rows& rows, int64_t r, int64_t first, int64_t last) {
    Vec largest(rows.top[r]);
    for (int64_t t = first; t < last; t += P) largest = at::vec::maximum(largest, Vec::loadu(rows.scores[r] + t));
    const float now = _mm512_reduce_max_ps(largest);
    const bool is_blind = now == -std::numeric_limits<float>::infinity();  // It has seen nothing yet.
    Vec sum(0.f);
    for (int64_t t = first; t < last; t += P) {
      const Vec weight = is_blind ? Vec(0.f) : (Vec::loadu(rows.scores[r] + t) - Vec(now)).exp_u20();
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows.weights[r] + t), (__m256i)_mm512_cvtneps_pbh(weight));
      sum = sum + weight;
    }
    if (is_blind) return;
    const float kept = std::exp(rows.top[r] - now);
    rows.total[r] = rows.total[r] * kept + _mm512_reduce_add_ps(sum);
    rows.top[r] = now;
    if (kept != 1.f)
      for (int64_t i = 0; i < C * P; i += P) (Vec::loadu(rows.out[r] + i) * Vec(kept)).store(rows.out[r] + i);
  }

  // Goes over the keys of a head; `key_panels` and `value_panels` are the head's.
  static void attend(Rows& rows, const T* key_panels, const T* value_panels, const Sizes& sizes, float scaling) {
    for (int64_t p0 = 0; p0 < sizes.num_panels(); p0 += CHUNK) {
      const int64_t num = std::min(CHUNK, sizes.num_panels() - p0);
      int64_t first = num, last = 0;  // Panels that any row sees.
      for (int64_t p = 0; p < num; ++p) {
        const int64_t key = (p0 + p) * P;
        if (!score(rows, key_panels + (p0 + p) * J * P * 2, key, sizes.k - key, scaling, p * P)) continue;
        first = std::min(first, p);
        last = p + 1;
      }
      if (last == 0) continue;
      for (int64_t r = 0; r < P; ++r) weigh(rows, r, first * P, last * P);
      for (int64_t c = 0; c < C; ++c) {
        __m512 sums[P];
#pragma GCC unroll 16
        for (int64_t r = 0; r < P; ++r) sums[r] = _mm512_load_ps(rows.out[r] + c * P);
        for (int64_t p = first; p < last; ++p)
          multiply(reinterpret_cast<const Pair*>(rows.weights[0] + p * P), KEYS / 2,
                   value_panels + ((p0 + p) * C + c) * P * P, P / 2, sums);
#pragma GCC unroll 16
        for (int64_t r = 0; r < P; ++r) _mm512_store_ps(rows.out[r] + c * P, sums[r]);
      }
    }
  }

  // 16 rows of one KV head, from the row `first` on; `query` and `output` are [q][K][G][D], `seen` is [q][k].
  static void compute(const T* query, const T* key_panels, const T* value_panels, const bool* seen, int64_t first,
                      int64_t head, const Sizes& sizes, float scaling, T* output) {
    Rows rows;
    const auto place = [&](int64_t r) { return (((first + r) / G * sizes.K + head) * G + (first + r) % G) * D; };
    const int64_t count = std::min(P, sizes.q * G - first);
    for (int64_t r = 0; r < P; ++r) {
      rows.top[r] = -std::numeric_limits<float>::infinity();
      rows.seen[r] = r < count ? seen + (first + r) / G * sizes.k : nullptr;
      if (r < count) std::copy(query + place(r), query + place(r) + D, rows.query + r * 2 * J);
    }
    attend(rows, key_panels, value_panels, sizes, scaling);
    for (int64_t r = 0; r < count; ++r) {
      const float share = rows.total[r] > 0.f ? 1.f / rows.total[r] : 0.f;
      for (int64_t d = 0; d < D; ++d) output[place(r) + d] = static_cast<T>(rows.out[r][d] * share);
    }
  }

  // `query` and `output` are [b][q][K * G][D], `keys` and `values` [b][K][k][D], `seen` is [b][q][k].
  static void run(const T* query, const T* keys, const T* values, const bool* seen, int64_t b, const Sizes& sizes,
                  float scaling, T* output) {
    const int64_t num_panels = sizes.num_panels(), heads = b * sizes.K, tiles = (sizes.q * G + P - 1) / P;
    const int64_t key_size = J * P * 2, value_size = C * P * P;
    const std::unique_ptr<T[]> key_panels(new T[heads * num_panels * key_size]);
    const std::unique_ptr<T[]> value_panels(new T[heads * num_panels * value_size]);
#pragma omp parallel if (omp_get_max_threads() > 1)
    {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < heads * num_panels; ++i) {
        const int64_t first = i % num_panels * P, from = (i / num_panels * sizes.k + first) * D;
        lay_out_keys(keys + from, sizes.k - first, key_panels.get() + i * key_size);
        lay_out_values(values + from, sizes.k - first, value_panels.get() + i * value_size);
      }
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < heads * tiles; ++i) {
        const int64_t head = i / tiles, row = head / sizes.K, at = row * sizes.q * sizes.K * G * D;
        compute(query + at, key_panels.get() + head * num_panels * key_size,
                value_panels.get() + head * num_panels * value_size, seen + row * sizes.q * sizes.k, i % tiles * P,
                head % sizes.K, sizes, scaling, output + at);
      }
    }
  }
};

}  // namespace aotgaudi
#endif
