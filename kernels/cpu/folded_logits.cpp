// The logits of a cross network whose dots with the parts of x0 were taken before (MATH: folding).
//
//   s_m = base_m + Σ_j table[starts_j + ids_mj]     or, without ids, base_m + table_m
//   α_0 = 1,  α_{l+1} = α_l (1 + s_ml) + c_l;   z_mc = α_L s_m,L+c + c_L+c
//
// Per row it reads k (L + C) numbers of the table, where the embeddings have k n_e, and writes C. A block of rows is summed
// row by row, then turned, so that the recurrence takes a register of rows at once. Bound by the cache misses of the lookup:
// it stops being good where L + C comes near n_e.
#include "vec.h"

namespace fastcross::FASTCROSS_ISA {
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
