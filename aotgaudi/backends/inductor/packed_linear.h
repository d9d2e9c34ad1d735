// Linear layers over packed weights: bfloat16 with AVX512_BF16. See linear.py and InductorRuntime.prepare.
//
// Packed weights are a sequence of panels. A panel has 16 outputs; for each pair of inputs it holds the pair's weights of
// every output: [K / 2][16][2]. A product of few rows reads its weights once, from the first byte to the last: one stream,
// which memory serves fastest. Each output of a row depends on that row alone: sums are float32, in the order of the inputs.
//
// Weights are bfloat16, or integers of 8 bits, which bfloat16 holds exactly. Integers are widened on their way into registers;
// with many rows they are widened once for all rows.
//
// A prompt's padding is rows of zeros (graphs/step.py): eight of them cost nothing.
#ifndef AOTGAUDI_PACKED_LINEAR
#define AOTGAUDI_PACKED_LINEAR
#include <type_traits>
namespace aotgaudi {

// Scale and bias of a panel's outputs.
struct Finish {
  __m512 scale, more;
  __mmask16 used;
};

template <int64_t M, int64_t N, int64_t K, typename W = c10::BFloat16>
struct PackedLinear {
  using T = c10::BFloat16;
  using Pair = int32_t;                                                       // two inputs
  using WeightPair = std::conditional_t<sizeof(W) == 1, int16_t, int32_t>;    // the weights of two inputs
  static constexpr int64_t P = 16;           // outputs of a panel
  static constexpr int64_t J = (K + 1) / 2;  // pairs of inputs
  static constexpr int64_t ROWS = 16;        // rows whose sums fit into registers
  static constexpr int64_t HALF = ROWS / 2;  // enough rows to hide the latency of sums
  static constexpr int64_t PANELS = (N + P - 1) / P;
  static constexpr bool WIDENS_FIRST = sizeof(W) == 1 && M > ROWS;

  // Prefetches the weights 32 KiB ahead: the hardware prefetcher stops where a pair takes long.
  static inline void fetch(const void* weights) {
    __builtin_prefetch(static_cast<const char*>(weights) + (32 << 10), 0, 2);
  }

  static inline __m512bh load(const int32_t* weights) { return (__m512bh)_mm512_loadu_si512(weights); }
  static inline __m512bh load(const int16_t* weights) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return _mm512_cvtne2ps_pbh(high, low);
  }

  // R rows of one panel: `x` and `output` begin at the first row, `output` at the panel's first output.
  template <int64_t R, bool FIRST, typename Q>
  static inline void rows(const Pair* x, const Q* panel, const Finish& finish, T* output) {
    __m512 sums[R];
#pragma GCC unroll 16
    for (int64_t r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
    for (int64_t j = 0; j < J; ++j) {
      if constexpr (FIRST) fetch(panel + j * P);
      const __m512bh weights = load(panel + j * P);
#pragma GCC unroll 16
      for (int64_t r = 0; r < R; ++r)
        sums[r] = _mm512_dpbf16_ps(sums[r], weights, (__m512bh)_mm512_set1_epi32(x[r * J + j]));
    }
#pragma GCC unroll 16
    for (int64_t r = 0; r < R; ++r) {
      const __m512 sum = sizeof(W) == 1 ? sums[r] * finish.scale : sums[r];
      _mm256_mask_storeu_epi16(output + r * N, finish.used, (__m256i)_mm512_cvtneps_pbh(sum + finish.more));
    }
  }

  // The outputs of R rows of zeros.
  template <int64_t R>
  static inline void no_rows(const Finish& finish, T* output) {
    for (int64_t r = 0; r < R; ++r)
      _mm256_mask_storeu_epi16(output + r * N, finish.used, (__m256i)_mm512_cvtneps_pbh(finish.more));
  }

  // ROWS rows of one panel; `is_zero` says which halves are zeros.
  template <typename Q>
  static inline void some_rows(const Pair* x, const bool* is_zero, const Q* panel, const Finish& finish, T* output) {
    if (!is_zero[1]) return rows<ROWS, false>(x, panel, finish, output);
    if (is_zero[0]) return no_rows<ROWS>(finish, output);
    rows<HALF, false>(x, panel, finish, output);
    no_rows<HALF>(finish, output + HALF * N);
  }

  // All rows of one panel: ROWS at a time, then the rest. `is_zero` says which runs of HALF rows are zeros.
  template <bool FIRST, typename Q>
  static inline void all_rows(const Pair* x, const bool* is_zero, const Q* panel, const Finish& finish, T* output) {
    constexpr int64_t WHOLE = M / ROWS * ROWS, REST = M % ROWS;
    if constexpr (WHOLE > 0) rows<ROWS, FIRST>(x, panel, finish, output);
    for (int64_t m = ROWS; m < WHOLE; m += ROWS)
      some_rows(x + m * J, is_zero + m / HALF, panel, finish, output + m * N);
    if constexpr (REST > 0) rows<REST, FIRST && WHOLE == 0>(x + WHOLE * J, panel, finish, output + WHOLE * N);
  }

  // Whether HALF rows are zeros, of either sign.
  static bool are_zeros(const Pair* x) {
    return std::all_of(x, x + HALF * J, [](Pair pair) { return (pair & 0x7fff7fff) == 0; });
  }

  static inline Finish finish_of(const float* scales, const T* bias, int64_t p) {
    const __mmask16 used = N - p * P >= P ? 0xffff : (1 << (N % P)) - 1;
    Finish finish{_mm512_setzero_ps(), _mm512_setzero_ps(), used};
    if (scales != nullptr) finish.scale = _mm512_maskz_loadu_ps(used, scales + p * P);
    if (bias != nullptr) {
      const __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(used, bias + p * P));
      finish.more = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    }
    return finish;
  }

  // Rows of an odd number of inputs end with a zero, as the panels do.
  static std::unique_ptr<T[]> padded(const T* x) {
    std::unique_ptr<T[]> rows(new T[M * 2 * J]);
    for (int64_t m = 0; m < M; ++m) {
      std::copy(x + m * K, x + (m + 1) * K, rows.get() + m * 2 * J);
      rows[(m + 1) * 2 * J - 1] = T(0);
    }
    return rows;
  }

  // One panel; `wide` has room for its weights in bfloat16 if they are widened first.
  static inline void panel(const Pair* x, const bool* is_zero, const WeightPair* weights, const Finish& finish,
                           int32_t* wide, T* output) {
    if constexpr (WIDENS_FIRST) {
      for (int64_t j = 0; j < J; ++j) {
        fetch(weights + j * P);
        _mm512_storeu_si512(wide + j * P, (__m512i)load(weights + j * P));
      }
      all_rows<false>(x, is_zero, const_cast<const int32_t*>(wide), finish, output);
    } else {
      all_rows<true>(x, is_zero, weights, finish, output);
    }
  }

  // output[M][N] = x[M][K] times the weights, times scales[N] if they are integers, plus bias[N] unless it is null.
  static void run(const T* x, const W* weights, const float* scales, const T* bias, T* output) {
    const std::unique_ptr<T[]> copy = K % 2 == 0 ? nullptr : padded(x);
    const Pair* pairs = reinterpret_cast<const Pair*>(K % 2 == 0 ? x : copy.get());
    const WeightPair* first = reinterpret_cast<const WeightPair*>(weights);
    bool is_zero[M / HALF + 1];
    for (int64_t i = 2; i < M / ROWS * 2; ++i) is_zero[i] = are_zeros(pairs + i * HALF * J);  // The first rows are real.
#pragma omp parallel if (omp_get_max_threads() > 1)
    {
      const std::unique_ptr<int32_t[]> wide(WIDENS_FIRST ? new int32_t[J * P] : nullptr);
#pragma omp for schedule(static)
      for (int64_t p = 0; p < PANELS; ++p)
        panel(pairs, is_zero, first + p * J * P, finish_of(scales, bias, p), wide.get(), output + p * P);
    }
  }
};

// Rows of a packed table [N][K]: a panel has a pair of each of its rows in every 64 bytes.
template <int64_t T, int64_t N, int64_t K>
struct PackedEmbedding {
  using V = c10::BFloat16;
  static constexpr int64_t P = 16, J = (K + 1) / 2;

  // output[T][K] = rows[ids[t]].
  static void run(const int64_t* ids, const V* table, V* output) {
    for (int64_t t = 0; t < T; ++t) {
      const int64_t id = ids[t];
      AOTI_TORCH_CHECK(0 <= id && id < N, "an id is beyond its table");
      const V* row = table + ((id / P) * J * P + id % P) * 2;
      for (int64_t k = 0; k < K; ++k) output[t * K + k] = row[(k / 2) * P * 2 + k % 2];
    }
  }
};

}  // namespace aotgaudi
#endif
