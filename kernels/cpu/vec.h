// Vectors of one register, by GCC's and Clang's vector extension: what every kernel file is written in.
//
// A kernel file is compiled once per instruction set. All it defines lies in a namespace of that name, and it calls
// nothing inline of the standard library: the linker would take one copy for all, perhaps the AVX-512 one.
//
// T is what is stored (float, double, Bf16, Fp16), A what is computed with: double for double, else float.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "kernels.h"

#define INLINE inline __attribute__((always_inline))
#define LAMBDA __attribute__((always_inline))

namespace fastcross::FASTCROSS_ISA {

#if defined(__AVX512F__)
constexpr int BYTES = 64, MOST_DOTS = 6;  // 4 rows x 6 vectors: 24 sums of 32 registers
#elif defined(__AVX2__)
constexpr int BYTES = 32, MOST_DOTS = 3;
#else
constexpr int BYTES = 16, MOST_DOTS = 3;
#endif
constexpr int ROWS = 4;  // rows of a block, which share each load of a parameter

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
template <class T> struct AccumulationOf {
  using type = float;
};
template <> struct AccumulationOf<double> {
  using type = double;
};
template <class T> using Accumulation = typename AccumulationOf<T>::type;

template <class A, int N> struct Lanes {
  typedef A type __attribute__((vector_size(N * sizeof(A))));
};
template <class A> constexpr int WIDTH = BYTES / sizeof(A);
template <class A> using Vec = typename Lanes<A, WIDTH<A>>::type;
using Bits = Vec<uint32_t>;
using HalfBits = Lanes<uint16_t, WIDTH<float>>::type;

template <class V, class T> INLINE V read(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE Vec<float> load(const float* p) { return read<Vec<float>>(p); }
INLINE Vec<double> load(const double* p) { return read<Vec<double>>(p); }
INLINE Vec<float> load(const Bf16* p) { return Vec<float>(__builtin_convertvector(read<HalfBits>(p), Bits) << 16); }
INLINE void store(float* p, Vec<float> v) { memcpy(p, &v, sizeof v); }
INLINE void store(double* p, Vec<double> v) { memcpy(p, &v, sizeof v); }
INLINE void store(Bf16* p, Vec<float> v) {  // to the nearest, ties to even; NaN stays NaN
  Bits u = Bits(v), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  HalfBits half = __builtin_convertvector(v == v ? rounded : Bits{} + 0x7fc0, HalfBits);
  memcpy(p, &half, sizeof half);
}
#if defined(__AVX512F__)
INLINE Vec<float> load(const Fp16* p) { return Vec<float>(_mm512_cvtph_ps(read<__m256i>(p))); }
INLINE void store(Fp16* p, Vec<float> v) {
  __m256i half = _mm512_cvtps_ph(__m512(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  memcpy(p, &half, sizeof half);
}
#elif defined(__F16C__)
INLINE Vec<float> load(const Fp16* p) { return Vec<float>(_mm256_cvtph_ps(read<__m128i>(p))); }
INLINE void store(Fp16* p, Vec<float> v) {
  __m128i half = _mm256_cvtps_ph(__m256(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  memcpy(p, &half, sizeof half);
}
#else
INLINE Vec<float> load(const Fp16* p) {
  Vec<float> v;
  for (int i = 0; i < WIDTH<float>; i++) v[i] = float(read<_Float16>(p + i));
  return v;
}
INLINE void store(Fp16* p, Vec<float> v) {
  for (int i = 0; i < WIDTH<float>; i++) {
    _Float16 half = _Float16(v[i]);
    memcpy(p + i, &half, sizeof half);
  }
}
#endif

// How the columns of a row are read and written: a whole register of them, or the last few, with zeros beside them.
struct Whole {
  template <class T> INLINE Vec<Accumulation<T>> load(const T* p) const { return FASTCROSS_ISA::load(p); }
  template <class T> INLINE void store(T* p, Vec<Accumulation<T>> v) const { FASTCROSS_ISA::store(p, v); }
};
struct Part {
  int64_t count;
  template <class T> INLINE Vec<Accumulation<T>> load(const T* p) const {
    T all[WIDTH<Accumulation<T>>] = {};
    for (int64_t i = 0; i < count; i++) all[i] = p[i];
    return FASTCROSS_ISA::load(all);
  }
  template <class T> INLINE void store(T* p, Vec<Accumulation<T>> v) const {
    T all[WIDTH<Accumulation<T>>];
    FASTCROSS_ISA::store(all, v);
    for (int64_t i = 0; i < count; i++) p[i] = all[i];
  }
};
#if defined(__AVX512F__)
template <> INLINE Vec<float> Part::load(const float* p) const { return Vec<float>(_mm512_maskz_loadu_ps((1u << count) - 1, p)); }
template <> INLINE void Part::store(float* p, Vec<float> v) const { _mm512_mask_storeu_ps(p, (1u << count) - 1, __m512(v)); }
#endif

// Calls body(first column, how to read and write there) for every register's width of d columns.
template <class A, class F> INLINE void for_columns(int64_t d, F body) {
  int64_t j = 0;
  for (; j + WIDTH<A> <= d; j += WIDTH<A>) body(j, Whole{});
  if (j < d) body(j, Part{d - j});
}
template <class A> INLINE int64_t padded(int64_t d) { return (d + WIDTH<A> - 1) / WIDTH<A> * WIDTH<A>; }

template <class V, size_t... I> INLINE auto halved(V v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, I...) + __builtin_shufflevector(v, v, (I + sizeof...(I))...);
}
template <int N, class V> INLINE auto narrowed(V v) {  // sums of lanes, until N are left
  constexpr int now = sizeof(V) / sizeof(v[0]);
  if constexpr (now == N) return v;
  else return narrowed<N>(halved(v, std::make_index_sequence<now / 2>{}));
}
template <int R> INLINE void totals(const Vec<double>* v, double* out) {
  for (int i = 0; i < R; i++) {
    auto two = narrowed<2>(v[i]);
    out[i] = two[0] + two[1];
  }
}
template <int R> INLINE void totals(const Vec<float>* v, float* out) {  // four at once take half the shuffles
  if constexpr (R == 4) {
    auto a = narrowed<4>(v[0]), b = narrowed<4>(v[1]), c = narrowed<4>(v[2]), d = narrowed<4>(v[3]);
    auto ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    auto cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    auto all = __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    memcpy(out, &all, sizeof all);
  } else {
    for (int i = 0; i < R; i++) {
      auto f = narrowed<4>(v[i]);
      out[i] = (f[0] + f[2]) + (f[1] + f[3]);
    }
  }
}

// out[k * ROWS + i] = row i of x · vector k, for K vectors of A at once
template <int R, int K, class T, class A> INLINE void dots_at_once(const T* x, int64_t stride, const A* w, int64_t d, A* out) {
  Vec<A> sums[K][R] = {};
  for_columns<A>(d, [&](int64_t j, auto at) LAMBDA {
    for (int i = 0; i < R; i++) {
      Vec<A> x_i = at.load(x + i * stride + j);
      for (int k = 0; k < K; k++) sums[k][i] += x_i * at.load(w + k * d + j);
    }
  });
  for (int k = 0; k < K; k++) totals<R>(sums[k], out + k * ROWS);
}
template <int R, class T, class A> INLINE void dots(const T* x, int64_t stride, const A* w, int64_t d, int64_t K, A* out) {
  int64_t k = 0;
  for (; k + MOST_DOTS <= K; k += MOST_DOTS) dots_at_once<R, MOST_DOTS>(x, stride, w + k * d, d, out + k * ROWS);
  for (; k + 3 <= K; k += 3) dots_at_once<R, 3>(x, stride, w + k * d, d, out + k * ROWS);
  for (; k < K; k++) dots_at_once<R, 1>(x, stride, w + k * d, d, out + k * ROWS);
}
// out[i] = row i of x · row i of y
template <int R, class T, class A> INLINE void dots_of_pairs(const T* x, int64_t stride_x, const T* y, int64_t stride_y, int64_t d, A* out) {
  Vec<A> sums[R] = {};
  for_columns<A>(d, [&](int64_t j, auto at) LAMBDA {
    for (int i = 0; i < R; i++) sums[i] += at.load(x + i * stride_x + j) * at.load(y + i * stride_y + j);
  });
  totals<R>(sums, out);
}

template <class A> INLINE void clear(A* p, int64_t count) { memset(p, 0, count * sizeof(A)); }
template <class A> INLINE void add_to(double* totals, const A* sums, int64_t count) {
  for (int64_t j = 0; j < count; j++) totals[j] += sums[j];
}

template <class F> INLINE void for_type(Type type, F body) {  // body(a value of the stored type)
  if (type == Type::f32) body(float{});
  if (type == Type::f64) body(double{});
  if (type == Type::bf16) body(Bf16{});
  if (type == Type::f16) body(Fp16{});
}

}  // namespace fastcross::FASTCROSS_ISA
