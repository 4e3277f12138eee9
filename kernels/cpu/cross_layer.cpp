// One cross layer (eq. 3) over a range of rows.
//
//   forward    s = x·w;  y = s x0 + b + x
//   backward   s = x·w,  ds = g·x0;  dx0 = s g;  dx = g + ds w;  dw = Σ_rows ds x;  db = Σ_rows g
//
// Per row, in units of d elements: forward 2 reads + 1 write, backward 3 reads + 2 writes. s is computed again rather than
// kept. Rows one at a time: four side by side are as many streams for the prefetcher and take 1.5 times as long.
#include "vec.h"

namespace fastcross::FASTCROSS_ISA {
namespace {

constexpr int64_t FLUSH = 256;  // rows that are summed in A before the sum is added to a total in double

template <class T, class A = Accumulation<T>> INLINE void fwd_row(const CrossLayer& n, int64_t r) {
  const T *x0 = (const T*)n.x0.data + r * n.x0.stride, *x = (const T*)n.x.data + r * n.x.stride;
  T* y = (T*)n.out.data + r * n.out.stride;
  const A *w = (const A*)n.w, *b = (const A*)n.b;
  A s;
  dots_at_once<1, 1>(x, 0, w, n.d, &s);
  for_columns<A>(n.d, [&](int64_t j, auto at) LAMBDA {
    Vec<A> b_j = b ? at.load(b + j) : Vec<A>{};
    at.store(y + j, s * at.load(x0 + j) + (at.load(x + j) + b_j));
  });
}

template <class T, class A = Accumulation<T>> INLINE void bwd_row(const CrossLayer& n, int64_t r, A* sums) {
  const T *x0 = (const T*)n.x0.data + r * n.x0.stride, *x = (const T*)n.x.data + r * n.x.stride;
  const T* g = (const T*)n.out.data + r * n.out.stride;
  T *dx0 = (T*)n.dx0.data + r * n.dx0.stride, *dx = (T*)n.dx.data + r * n.dx.stride;
  const A* w = (const A*)n.w;
  A s, ds;
  if (n.need_dx0) dots_at_once<1, 1>(x, 0, w, n.d, &s);
  if (n.need_dx || n.need_dw) dots_of_pairs<1>(g, 0, x0, 0, n.d, &ds);
  A *dw = sums, *db = sums + padded<A>(n.d);
  for_columns<A>(n.d, [&](int64_t j, auto at) LAMBDA {
    Vec<A> g_j = at.load(g + j);
    if (n.need_dx0) at.store(dx0 + j, s * g_j);
    if (n.need_dx) at.store(dx + j, ds * at.load(w + j) + g_j);
    if (n.need_dw) store(dw + j, load(dw + j) + ds * at.load(x + j));
    if (n.need_db) store(db + j, load(db + j) + g_j);
  });
}

}  // namespace

void cross_layer_fwd(const CrossLayer& n, int64_t r, int64_t stop) {
  for_type(n.type, [&](auto t) {
    using T = decltype(t);
    for (; r < stop; r++) fwd_row<T>(n, r);
  });
}

void cross_layer_bwd(const CrossLayer& n, int64_t r, int64_t stop, double* scratch, double* totals) {
  for_type(n.type, [&](auto t) {
    using T = decltype(t);
    using A = Accumulation<T>;
    A* sums = (A*)scratch;
    clear(totals, 2 * n.d);
    while (r < stop) {
      int64_t until = r + FLUSH < stop ? r + FLUSH : stop;
      clear(sums, 2 * padded<A>(n.d));
      for (; r < until; r++) bwd_row<T>(n, r, sums);
      for (int64_t k = 0; k < 2; k++) add_to(totals + k * n.d, sums + k * padded<A>(n.d), n.d);
    }
  });
}

void cross_layer_finish(const CrossLayer& n, const double* totals, int64_t shares, void* dw, void* db) {
  for_type(n.type, [&](auto t) {
    using A = Accumulation<decltype(t)>;
    for (int64_t j = 0; j < n.d; j++) {
      double w = 0, b = 0;
      for (int64_t s = 0; s < shares; s++) {
        w += totals[2 * s * n.d + j];
        b += totals[(2 * s + 1) * n.d + j];
      }
      if (n.need_dw) ((A*)dw)[j] = A(w);
      if (n.need_db) ((A*)db)[j] = A(b);
    }
  });
}

}  // namespace fastcross::FASTCROSS_ISA
