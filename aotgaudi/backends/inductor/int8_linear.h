// Products of few rows over weights in 8 bits, read in place. quantized_linear.py puts it into units.
//
// A row of activations becomes integers of 14 bits, scaled by the row's largest magnitude, so that products and their sums
// are integers: exact in any order. A row's result depends on no other row, and not on the number of rows.
#ifndef AOTGAUDI_INT8_LINEAR
#define AOTGAUDI_INT8_LINEAR
#include <immintrin.h>
namespace aotgaudi {

// Vectors of 16-bit integers, and of the 32-bit sums of products of neighbours.
struct Lanes {
  using Vec = at::vec::Vectorized<float>;
#if defined(CPU_CAPABILITY_AVX512)
  using V = __m512i;
  static constexpr int64_t MT = 8;
  static inline V zero() { return _mm512_setzero_si512(); }
  static inline V load(const int16_t* from) { return _mm512_loadu_si512(from); }
  static inline V widen(const int8_t* from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static inline V multiply_add(V a, V b, V sums) { return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b)); }
  static inline int32_t total(V sums) { return _mm512_reduce_add_epi32(sums); }
  static inline void round(const Vec& value, int16_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(value)));
  }
#else
  using V = __m256i;
  static constexpr int64_t MT = 4;
  static inline V zero() { return _mm256_setzero_si256(); }
  static inline V load(const int16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static inline V widen(const int8_t* from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static inline V multiply_add(V a, V b, V sums) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
  static inline int32_t total(V sums) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
  }
  static inline void round(const Vec& value, int16_t* to) {
    const __m256i whole = _mm256_cvtps_epi32(value);
    const __m128i low = _mm256_castsi256_si128(whole), high = _mm256_extracti128_si256(whole, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packs_epi32(low, high));
  }
#endif
  static constexpr int64_t W = sizeof(V) / sizeof(int16_t);
};

// source [M][K] of T, weight [N][K], scales [N], bias [N] of T or null; output [M][N] of T.
template <typename T, int64_t M, int64_t N, int64_t K>
struct Int8Linear {
  using Vec = Lanes::Vec;
  using V = Lanes::V;
  static constexpr int64_t W = Lanes::W;
  static constexpr int64_t KP = (K + W - 1) / W * W;
  static constexpr float kLargest = 8191.f;
  static constexpr int64_t kExact = 2048;  // products that a sum can hold: 2048 * 127 * 8191 < 2^31
  static constexpr int64_t kAhead = 4096;  // bytes; measured, docs/benchmarks.md
  static constexpr int64_t MT = Lanes::MT;  // rows and outputs whose sums are in registers
  static constexpr int64_t NT = MT > 4 && M < MT ? 4 : 2;
  static constexpr int64_t kAtOnce = 64;  // outputs of one task
  static constexpr int64_t kTasks = (N + kAtOnce - 1) / kAtOnce;

  static inline Vec load(const T* row, int64_t k) {
    alignas(64) T tail[Vec::size()] = {};
    const T* from = row + k;
    if (k + Vec::size() > K) {
      std::copy(from, row + K, tail);
      from = tail;
    }
    Vec value;
    at::vec::load_to_float<T>(from, value);
    return value;
  }

  // Rounds a row to integers and returns their unit. A row with infinities or NaNs gives no finite results.
  static inline float round(const T* row, int16_t* to) {
    Vec largest(0.f);
    for (int64_t k = 0; k < K; k += Vec::size()) largest = at::vec::maximum(largest, load(row, k).abs());
    const float top = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, largest);
    const Vec factor(top < 1e-30f ? 0.f : kLargest / top);
    for (int64_t k = 0; k < KP; k += Vec::size())
      Lanes::round(k < K ? load(row, k) * factor : Vec(0.f), to + k);
    return top / kLargest;
  }

  // out[m][n] = x[m] . weight[n], for RT rows and CT outputs
  template <int64_t RT, int64_t CT>
  static inline void multiply(const int16_t* x, const int8_t* weight, float (&out)[RT][CT]) {
    for (int64_t first = 0; first < K; first += kExact) {
      const int64_t last = std::min(K, first + kExact);
      V sums[RT][CT];
#pragma GCC unroll 8
      for (int64_t m = 0; m < RT; ++m)
#pragma GCC unroll 8
        for (int64_t n = 0; n < CT; ++n) sums[m][n] = Lanes::zero();
      for (int64_t k = first; k < last; k += W) {
        V value[RT];
#pragma GCC unroll 8
        for (int64_t m = 0; m < RT; ++m) value[m] = Lanes::load(x + m * KP + k);
#pragma GCC unroll 8
        for (int64_t n = 0; n < CT; ++n) {
          const int8_t* from = weight + n * K + k;
          alignas(64) int8_t tail[W] = {};
          if (K % W != 0 && k + W > K) {
            std::copy(from, weight + (n + 1) * K, tail);
            from = tail;
          } else {
            _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_T0);
          }
          const V wide = Lanes::widen(from);
#pragma GCC unroll 8
          for (int64_t m = 0; m < RT; ++m) sums[m][n] = Lanes::multiply_add(value[m], wide, sums[m][n]);
        }
      }
#pragma GCC unroll 8
      for (int64_t m = 0; m < RT; ++m)
#pragma GCC unroll 8
        for (int64_t n = 0; n < CT; ++n) {
          const float total = static_cast<float>(Lanes::total(sums[m][n]));
          out[m][n] = first == 0 ? total : out[m][n] + total;
        }
    }
  }

  struct Call {
    const int8_t* weight;
    const float* scales;
    const T* bias;
    T* output;
    std::vector<int16_t> rows = std::vector<int16_t>(M * KP);
    float units[M];

    template <int64_t RT, int64_t CT>
    inline void tile(int64_t m, int64_t n) const {
      float out[RT][CT];
      multiply<RT, CT>(rows.data() + m * KP, weight + n * K, out);
      for (int64_t i = 0; i < RT; ++i)
        for (int64_t j = 0; j < CT; ++j) {
          const float value = out[i][j] * units[m + i] * scales[n + j];
          output[(m + i) * N + n + j] =
              static_cast<T>(bias == nullptr ? value : value + static_cast<float>(bias[n + j]));
        }
    }

    template <int64_t CT>
    inline void outputs(int64_t n) const {
      int64_t m = 0;
      for (; m + MT <= M; m += MT) tile<MT, CT>(m, n);
      if constexpr (MT == 8 && M % 8 >= 4) {
        tile<4, CT>(m, n);
        m += 4;
      }
      if constexpr (M % 4 >= 2) {
        tile<2, CT>(m, n);
        m += 2;
      }
      if constexpr (M % 2 == 1) tile<1, CT>(m, n);
    }
  };

  static void run(const T* source, const int8_t* weight, const float* scales, const T* bias, T* output) {
    Call call{weight, scales, bias, output};
    for (int64_t m = 0; m < M; ++m) call.units[m] = round(source + m * K, call.rows.data() + m * KP);
#pragma omp parallel for schedule(static) if (kTasks > 1)
    for (int64_t task = 0; task < kTasks; ++task) {
      const int64_t last = std::min(N, (task + 1) * kAtOnce);
      int64_t n = task * kAtOnce;
      for (; n + NT <= last; n += NT) call.template outputs<NT>(n);
      for (; n < last; ++n) call.template outputs<1>(n);
    }
  }
};

}  // namespace aotgaudi
#endif
