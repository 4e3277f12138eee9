// The whole cross network, or its logits, over a range of rows: its closed form, whatever L is. Below, its logits of dots
// that were taken before.
//
//   prepare    β_0 = 0,  β_{l+1} = β_l + b_l;  c_l = β_l·w_l,  c_{L+c} = β_L·v_c
//   forward    p_l = x0·w_l,  q_c = x0·v_c;  α_0 = 1,  α_{l+1} = α_l (1 + p_l) + c_l
//              y = α_L x0 + β_L       or       z_c = α_L q_c + β_L·v_c
//   backward   network: a_L = g·x0          logits: a_L = Σ_c dz_c q_c,  dq_c = α_L dz_c
//              dp_l = a_{l+1} α_l;  dc_l = Σ_rows a_{l+1};  a_l = a_{l+1} (1 + p_l)
//              dx0 = α_L g + Σ_l dp_l w_l + Σ_c dq_c v_c
//   finish     dw_l = Σ_rows dp_l x0 + dc_l β_l;  dv_c = Σ_rows dq_c x0 + (Σ_rows dz_c) β_L
//              db_j = dβ_L + Σ_{l>j} dc_l w_l,  with dβ_L = Σ_rows g  or  Σ_c (Σ_rows dz_c) v_c
//
// Per row, in units of d elements: forward 1 read + 1 write (logits 1 read), backward 2 reads + 1 write (logits 1 + 1).
// From about L = 16 on a CPU computes longer than it waits for memory.
#include "vec.h"

namespace fastcross::FASTCROSS_ISA {
namespace {

constexpr int64_t FLUSH = 256;  // rows that are summed in A before the sum is added to a total in double

// One row at a time is one stream for the prefetcher. Four at a time share each load of the vectors and sums, which pays
// where these leave no room for the row in the L1 cache.
template <class A> INLINE bool one_at_a_time(int64_t vectors, int64_t d) { return vectors * d * int64_t(sizeof(A)) <= 16384; }

template <int R, class A> INLINE void alphas(const CrossNetwork& n, const A* p, double* alpha) {  // (L + 1, ROWS)
  for (int i = 0; i < R; i++) alpha[i] = 1;
  for (int64_t l = 0; l < n.L; l++)
    for (int i = 0; i < R; i++) alpha[(l + 1) * ROWS + i] = alpha[l * ROWS + i] * (1 + double(p[l * ROWS + i])) + ((const A*)n.c)[l];
}

template <int R, class T, class A = Accumulation<T>> INLINE void fwd_block(const CrossNetwork& n, int64_t r, double* scratch) {
  const int64_t K = n.L + n.C;
  const T* x = (const T*)n.x0.data + r * n.x0.stride;
  double* alpha = scratch;
  A* p = (A*)(alpha + (n.L + 1) * ROWS);
  dots<R>(x, n.x0.stride, (const A*)n.w, n.d, n.L, p);
  dots<R>(x, n.x0.stride, (const A*)n.v, n.d, n.C, p + n.L * ROWS);
  alphas<R>(n, p, alpha);
  if (n.p)
    for (int64_t k = 0; k < K; k++) memcpy((A*)n.p + k * n.M + r, p + k * ROWS, R * sizeof(A));
  const double* last = alpha + n.L * ROWS;
  T* out = (T*)n.out.data + r * n.out.stride;
  if (n.C) {
    for (int64_t k = 0; k < n.C; k++)
      for (int i = 0; i < R; i++) {
        A z = A(last[i] * p[(n.L + k) * ROWS + i] + ((const A*)n.c)[n.L + k]);
        Part{1}.store(out + i * n.out.stride + k, Vec<A>{} + z);
      }
    return;
  }
  const A* beta = (const A*)n.beta;
  A a[R];
  for (int i = 0; i < R; i++) a[i] = A(last[i]);
  for_columns<A>(n.d, [&](int64_t j, auto at) LAMBDA {
    Vec<A> beta_j = beta ? at.load(beta + j) : Vec<A>{};
    for (int i = 0; i < R; i++) {
      at.store(out + i * n.out.stride + j, a[i] * at.load(x + i * n.x0.stride + j) + beta_j);
    }
  });
}

template <int R, class T, class A = Accumulation<T>> INLINE void bwd_block(const CrossNetwork& n, int64_t r, double* scratch, A* sums, double* ends) {
  const int64_t K = n.L + n.C, width = padded<A>(n.d);
  const bool is_network = !n.C, need_dx0 = n.need_dx0;
  const bool need_vectors = n.need_dw || n.need_dv, need_g = n.need_db && is_network;
  const T *x = (const T*)n.x0.data + r * n.x0.stride, *g = (const T*)n.out.data + r * n.out.stride;
  T* dx = (T*)n.dx0.data + r * n.dx0.stride;
  double* alpha = scratch;
  A *p = (A*)(alpha + (n.L + 1) * ROWS), *t = p + K * ROWS;  // t: what each vector is multiplied with
  for (int64_t k = 0; k < K; k++) memcpy(p + k * ROWS, (const A*)n.p + k * n.M + r, R * sizeof(A));
  alphas<R>(n, p, alpha);
  const double* last = alpha + n.L * ROWS;
  double a[R] = {};
  if (is_network) {
    A pairs[ROWS];
    dots_of_pairs<R>(x, n.x0.stride, g, n.out.stride, n.d, pairs);
    for (int i = 0; i < R; i++) a[i] = pairs[i];
  }
  for (int64_t k = n.L; k < K; k++)
    for (int i = 0; i < R; i++) {
      double dz = Part{1}.load(g + i * n.out.stride + (k - n.L))[0];
      a[i] += dz * p[k * ROWS + i];
      t[k * ROWS + i] = A(last[i] * dz);
      ends[k] += dz;
    }
  for (int64_t l = n.L - 1; l >= 0; l--)
    for (int i = 0; i < R; i++) {
      t[l * ROWS + i] = A(a[i] * alpha[l * ROWS + i]);
      ends[l] += a[i];
      a[i] *= 1 + double(p[l * ROWS + i]);
    }
  A alpha_L[R];
  for (int i = 0; i < R; i++) alpha_L[i] = A(last[i]);
  for_columns<A>(n.d, [&](int64_t j, auto at) LAMBDA {
    Vec<A> x_j[R], dx_j[R] = {};
    for (int i = 0; i < R; i++) x_j[i] = at.load(x + i * n.x0.stride + j);
    if (is_network) {
      Vec<A> total{};
      for (int i = 0; i < R; i++) {
        Vec<A> g_i = at.load(g + i * n.out.stride + j);
        dx_j[i] = alpha_L[i] * g_i;
        total += g_i;
      }
      if (need_g) store(sums + K * width + j, load(sums + K * width + j) + total);
    }
    auto add = [&](const A* vectors, int64_t first, int64_t count) LAMBDA {
      for (int64_t k = 0; k < count; k++) {
        const A* t_k = t + (first + k) * ROWS;
        A* sum = sums + (first + k) * width + j;
        if (need_dx0) {
          Vec<A> v = at.load(vectors + k * n.d + j);
          for (int i = 0; i < R; i++) dx_j[i] += t_k[i] * v;
        }
        if (need_vectors) {
          Vec<A> s = load(sum);
          for (int i = 0; i < R; i++) s += t_k[i] * x_j[i];
          store(sum, s);
        }
      }
    };
    add((const A*)n.w, 0, n.L);
    add((const A*)n.v, n.L, n.C);
    if (need_dx0)
      for (int i = 0; i < R; i++) at.store(dx + i * n.dx0.stride + j, dx_j[i]);
  });
}

}  // namespace

void cross_network_prepare(const CrossNetwork& n) {
  for_type(n.type, [&](auto t) {
    using A = Accumulation<decltype(t)>;
    const A *w = (const A*)n.w, *b = (const A*)n.b, *v = (const A*)n.v;
    A *c = (A*)n.c, *beta = (A*)n.beta, found[ROWS];
    clear(c, n.L + n.C);
    if (!b) return;
    clear(beta, n.d);
    for (int64_t l = 0; l < n.L; l++) {
      if (l) {  // β_0 = 0
        dots_at_once<1, 1>(beta, 0, w + l * n.d, n.d, found);
        c[l] = found[0];
      }
      for_columns<A>(n.d, [&](int64_t j, auto at) LAMBDA { at.store(beta + j, at.load(beta + j) + at.load(b + l * n.d + j)); });
    }
    for (int64_t k = 0; k < n.C; k++) {
      dots_at_once<1, 1>(beta, 0, v + k * n.d, n.d, found);
      c[n.L + k] = found[0];
    }
  });
}

void cross_network_fwd(const CrossNetwork& n, int64_t r, int64_t stop, double* scratch) {
  for_type(n.type, [&](auto t) {
    using T = decltype(t);
    if (!one_at_a_time<Accumulation<T>>(n.L + n.C, n.d))
      for (; r + ROWS <= stop; r += ROWS) fwd_block<ROWS, T>(n, r, scratch);
    for (; r < stop; r++) fwd_block<1, T>(n, r, scratch);
  });
}

void cross_network_bwd(const CrossNetwork& n, int64_t r, int64_t stop, double* scratch, double* totals) {
  const int64_t K = n.L + n.C;
  for_type(n.type, [&](auto t) {
    using T = decltype(t);
    using A = Accumulation<T>;
    const int64_t width = padded<A>(n.d);
    A* sums = (A*)scratch;
    double *numbers = scratch + (K + 1) * width, *ends = totals + (K + 1) * n.d;
    clear(totals, network_totals(n));
    while (r < stop) {
      int64_t until = r + FLUSH < stop ? r + FLUSH : stop;
      clear(sums, (K + 1) * width);
      if (!one_at_a_time<A>(2 * K + 1, n.d))
        for (; r + ROWS <= until; r += ROWS) bwd_block<ROWS, T>(n, r, numbers, sums, ends);
      for (; r < until; r++) bwd_block<1, T>(n, r, numbers, sums, ends);
      for (int64_t k = 0; k <= K; k++) add_to(totals + k * n.d, sums + k * width, n.d);
    }
  });
}

void cross_network_finish(const CrossNetwork& n, double* totals, int64_t shares, void* dw, void* db, void* dv) {
  const int64_t K = n.L + n.C;
  for (int64_t s = 1; s < shares; s++) add_to(totals, totals + s * network_totals(n), network_totals(n));
  const double* ends = totals + (K + 1) * n.d;
  for_type(n.type, [&](auto t) {
    using A = Accumulation<decltype(t)>;
    const A *w = (const A*)n.w, *b = (const A*)n.b, *v = (const A*)n.v;
    for (int64_t j = 0; j < n.d; j++) {
      double beta = 0;
      for (int64_t k = 0; k < K; k++) {
        // An infinite sum times a β of 0 adds nothing, as in the layers themselves.
        double gradient = totals[k * n.d + j] + (beta == 0 ? 0 : ends[k] * beta);
        if (k >= n.L && n.need_dv) ((A*)dv)[(k - n.L) * n.d + j] = A(gradient);
        if (k < n.L && n.need_dw) ((A*)dw)[k * n.d + j] = A(gradient);
        if (k < n.L && b) beta += b[k * n.d + j];
      }
      if (!n.need_db) continue;
      double dbeta = totals[K * n.d + j];
      for (int64_t k = 0; k < n.C; k++) dbeta += ends[n.L + k] * v[k * n.d + j];
      for (int64_t l = n.L - 1; l >= 0; l--) {
        ((A*)db)[l * n.d + j] = A(dbeta);
        dbeta += ends[l] * w[l * n.d + j];
      }
    }
  });
}

// ---- the logits of a network whose dots with the parts of x0 were taken before (fastcross.fold)
//
//   s_m = base_m + Σ_j table[starts_j + ids_mj]     or, without ids, base_m + table_m
//   α_0 = 1,  α_{l+1} = α_l (1 + s_ml) + c_l;   z_mc = α_L s_m,L+c + c_L+c
//
// Per row it reads k (L + C) numbers of the table, where the embeddings have k n_e, and writes C. A block of rows is summed
// row by row, then turned, so that the recurrence takes a register of rows at once. Bound by the cache misses of the lookup:
// it stops being good where L + C comes near n_e.
namespace {

constexpr int64_t BLOCK = 16;  // rows of one recurrence

template <class A> int64_t block(const FoldedLogits& n, int64_t first, int64_t count, A* sums) {  // (K, BLOCK)
  const int64_t K = n.L + n.C;
  const A *table = (const A*)n.table, *c = (const A*)n.c;
  A row[WIDTH<A>];
  for (int64_t i = 0; i < count; i++) {  // all lookups of the block under way before the first one is waited for
    const int64_t* ids = n.ids + (first + i) * n.stride;
    for (int64_t f = 0; f < n.k; f++) {
      if (uint64_t(ids[f * n.column]) >= uint64_t(n.starts[f + 1] - n.starts[f])) return first + i;
      const A* found = table + (n.starts[f] + ids[f * n.column]) * K;
      __builtin_prefetch(found);
      __builtin_prefetch(found + K - 1);
    }
  }
  for (int64_t i = 0; i < count; i++) {
    const int64_t m = first + i, *ids = n.ids + m * n.stride;
    const A* base = (const A*)n.base.data + m * n.base.stride;
    for_columns<A>(K, [&](int64_t j, auto at) LAMBDA {
      Vec<A> sum = at.load(base + j);
      if (n.by_row) sum += at.load(table + m * K + j);
      for (int64_t f = 0; f < n.k; f++) sum += at.load(table + (n.starts[f] + ids[f * n.column]) * K + j);
      store(row, sum);
      for (int64_t l = j; l < K && l < j + WIDTH<A>; l++) sums[l * BLOCK + i] = row[l - j];
    });
  }
  double alpha[BLOCK];
  for (int64_t i = 0; i < BLOCK; i++) alpha[i] = 1;
  for (int64_t l = 0; l < n.L; l++)
    for (int64_t i = 0; i < BLOCK; i++) alpha[i] = alpha[i] * (1 + double(sums[l * BLOCK + i])) + c[l];
  A* z = (A*)n.z + first * n.C;
  for (int64_t k = 0; k < n.C; k++)
    for (int64_t i = 0; i < count; i++) z[i * n.C + k] = A(alpha[i] * sums[(n.L + k) * BLOCK + i] + c[n.L + k]);
  return -1;
}

}  // namespace

int64_t folded_logits_fwd(const FoldedLogits& n, int64_t start, int64_t stop, double* scratch) {
  int64_t wrong = -1;
  auto all = [&](auto* sums) {
    clear(sums, (n.L + n.C) * BLOCK);
    for (int64_t m = start; m < stop && wrong < 0; m += BLOCK) wrong = block(n, m, stop - m < BLOCK ? stop - m : BLOCK, sums);
  };
  if (n.type == Type::f64) all(scratch);
  else all((float*)scratch);
  return wrong;
}

}  // namespace fastcross::FASTCROSS_ISA
