// Linear layers over weights in panels: bfloat16 with AVX512_BF16. See linear.py and InductorRuntime.prepare.
//
// A panel has 16 outputs; it holds, for each pair of inputs, the pair's weights of every output: [K / 2][16][2]. A product
// of few rows reads its weights once, from the first byte to the last: one stream, which is what memory is fastest at. What
// an output of a row is depends on that row alone, in whatever company: sums are float32, in the order of the inputs.
#ifndef AOTGAUDI_PANELS
#define AOTGAUDI_PANELS
namespace aotgaudi {

template <int64_t M, int64_t N, int64_t K>
struct Panels {
  using T = c10::BFloat16;
  using Pair = int32_t;
  static constexpr int64_t P = 16;           // outputs of a panel
  static constexpr int64_t J = (K + 1) / 2;  // pairs of inputs
  static constexpr int64_t ROWS = 16;        // whose sums fit into registers
  static constexpr int64_t PANELS = (N + P - 1) / P;

  // Asks for the weights that come 32 KiB later: the machine's own foresight ends where a pair takes long.
  static inline void fetch(const Pair* weights) { __builtin_prefetch(weights + (32 << 10) / sizeof(Pair), 0, 2); }

  // R rows of one panel: `x` and `output` begin at the first row, `output` and `bias` at the panel's first output.
  template <int64_t R, bool FIRST>
  static inline void rows(const Pair* x, const Pair* panel, __m512 bias, __mmask16 used, T* output) {
    __m512 sums[R];
#pragma GCC unroll 16
    for (int64_t r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
    for (int64_t j = 0; j < J; ++j) {
      if constexpr (FIRST) fetch(panel + j * P);
      const __m512bh weights = (__m512bh)_mm512_loadu_si512(panel + j * P);
#pragma GCC unroll 16
      for (int64_t r = 0; r < R; ++r)
        sums[r] = _mm512_dpbf16_ps(sums[r], weights, (__m512bh)_mm512_set1_epi32(x[r * J + j]));
    }
#pragma GCC unroll 16
    for (int64_t r = 0; r < R; ++r)
      _mm256_mask_storeu_epi16(output + r * N, used, (__m256i)_mm512_cvtneps_pbh(sums[r] + bias));
  }

  // The rows from `m` on: R at a time as far as they go, then half as many.
  template <int64_t R, bool FIRST>
  static inline void all_rows(int64_t m, const Pair* x, const Pair* panel, __m512 bias, __mmask16 used, T* output) {
    if constexpr (M % (2 * R) >= R || (R == ROWS && M >= R)) {
      rows<R, FIRST>(x + m * J, panel, bias, used, output + m * N);
      m += R;
      for (; R == ROWS && m + R <= M; m += R) rows<R, false>(x + m * J, panel, bias, used, output + m * N);
      if constexpr (R > 1) all_rows<R / 2, false>(m, x, panel, bias, used, output);
    } else if constexpr (R > 1) {
      all_rows<R / 2, FIRST>(m, x, panel, bias, used, output);
    }
  }

  static inline __m512 bias_of(const T* bias, __mmask16 used) {
    if (bias == nullptr) return _mm512_setzero_ps();
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(used, bias));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
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

  // output[M][N] = x[M][K] times the weights, plus bias[N] unless that is null.
  static void run(const T* x, const T* weights, const T* bias, T* output) {
    const std::unique_ptr<T[]> copy = K % 2 == 0 ? nullptr : padded(x);
    const Pair* pairs = reinterpret_cast<const Pair*>(K % 2 == 0 ? x : copy.get());
#pragma omp parallel for schedule(static) if (omp_get_max_threads() > 1)
    for (int64_t p = 0; p < PANELS; ++p) {
      const __mmask16 used = N - p * P >= P ? 0xffff : (1 << (N % P)) - 1;
      const __m512 more = bias_of(bias == nullptr ? nullptr : bias + p * P, used);
      all_rows<ROWS, true>(0, pairs, reinterpret_cast<const Pair*>(weights) + p * J * P, more, used, output + p * P);
    }
  }
};

// Rows of a table [N][K] in panels: of one row each panel has a pair in every 64 bytes.
template <int64_t T, int64_t N, int64_t K>
struct RowsOfPanels {
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
