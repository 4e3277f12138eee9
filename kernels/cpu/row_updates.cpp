// Updates of the rows of a table that its gradient names, entries [start, stop) of the gradient.
//
//   adam      m += (1-β₁)(g-m);  v += (1-β₂)(g²-v);  w = shrink w - rate m / (√v scale + ε)
//   adagrad   s += g²;  w -= rate g / (√s + ε)          row-wise: s is one number per row, the mean of g² is added
//   sgd       w -= rate g
//
// The corrections of m̂ and v̂ are in the rate and in the scale; AdamW's decay is in shrink, which is 1 for Adam. Rows
// ascend and may repeat: of equal ones the first has the gradient, the others are passed over. Nearly every row is a
// cache miss: the next one is prefetched.
#include "vec.h"

namespace fastcross::FASTCROSS_ISA {
namespace {

template <class A> INLINE Vec<A> root(Vec<A> v) {
  for (int i = 0; i < WIDTH<A>; i++) v[i] = sizeof(A) == 4 ? A(__builtin_sqrtf(float(v[i]))) : A(__builtin_sqrt(double(v[i])));
  return v;
}
#if defined(__AVX512F__)
template <> INLINE Vec<float> root<float>(Vec<float> v) { return Vec<float>(_mm512_sqrt_ps(__m512(v))); }
#endif

// body(entry, first element of its row) for each entry that is the first of its row
template <class T, class F> INLINE void for_rows(const RowUpdate& u, int64_t start, int64_t stop, F body) {
  for (int64_t n = start; n < stop; n++) {
    if (n + 1 < stop)
      for (int64_t i = 0; i < u.width; i += 64 / sizeof(T)) {
        int64_t ahead = u.rows[n + 1] * u.width + i;
        __builtin_prefetch((T*)u.w + ahead, 1);
        if (u.first && !u.row_wise) __builtin_prefetch((T*)u.first + ahead, 1);
        if (u.second) __builtin_prefetch((T*)u.second + ahead, 1);
      }
    if (n == 0 || u.rows[n] != u.rows[n - 1]) body(n, u.rows[n] * u.width);
  }
}

}  // namespace

void adam_rows(const RowUpdate& u, int64_t start, int64_t stop) {
  for_type(u.type, [&](auto type) {
    using T = decltype(type);
    using A = Accumulation<T>;
    const A rate = A(u.rate), scale = A(u.scale), shrink = A(u.shrink), eps = A(u.eps), decay1 = A(u.decay1), decay2 = A(u.decay2);
    for_rows<T>(u, start, stop, [&](int64_t n, int64_t row) LAMBDA {
      T *w = (T*)u.w + row, *m = (T*)u.first + row, *v = (T*)u.second + row;
      const T* g = (const T*)u.g + n * u.width;
      for_columns<A>(u.width, [&](int64_t j, auto at) LAMBDA {
        Vec<A> g_j = at.load(g + j), m_j = at.load(m + j), v_j = at.load(v + j);
        m_j += decay1 * (g_j - m_j);
        v_j += decay2 * (g_j * g_j - v_j);
        at.store(m + j, m_j);
        at.store(v + j, v_j);
        at.store(w + j, shrink * at.load(w + j) - rate * m_j / (root<A>(v_j) * scale + eps));
      });
    });
  });
}

void adagrad_rows(const RowUpdate& u, int64_t start, int64_t stop) {
  for_type(u.type, [&](auto type) {
    using T = decltype(type);
    using A = Accumulation<T>;
    const A rate = A(u.rate), eps = A(u.eps);
    for_rows<T>(u, start, stop, [&](int64_t n, int64_t row) LAMBDA {
      T *w = (T*)u.w + row, *s = (T*)u.first + (u.row_wise ? u.rows[n] : row);
      const T* g = (const T*)u.g + n * u.width;
      A mean[ROWS] = {};
      if (u.row_wise) {
        dots_of_pairs<1>(g, 0, g, 0, u.width, mean);
        mean[0] = Part{1}.load(s)[0] + mean[0] / A(u.width);
        Part{1}.store(s, Vec<A>{} + mean[0]);
      }
      for_columns<A>(u.width, [&](int64_t j, auto at) LAMBDA {
        Vec<A> g_j = at.load(g + j), s_j = Vec<A>{} + mean[0];
        if (!u.row_wise) {
          s_j = at.load(s + j) + g_j * g_j;
          at.store(s + j, s_j);
        }
        at.store(w + j, at.load(w + j) - rate * g_j / (root<A>(s_j) + eps));
      });
    });
  });
}

void sgd_rows(const RowUpdate& u, int64_t start, int64_t stop) {
  for_type(u.type, [&](auto type) {
    using T = decltype(type);
    using A = Accumulation<T>;
    for_rows<T>(u, start, stop, [&](int64_t n, int64_t row) LAMBDA {
      T* w = (T*)u.w + row;
      const T* g = (const T*)u.g + n * u.width;
      for_columns<A>(u.width, [&](int64_t j, auto at) LAMBDA { at.store(w + j, at.load(w + j) - A(u.rate) * at.load(g + j)); });
    });
  });
}

}  // namespace fastcross::FASTCROSS_ISA
