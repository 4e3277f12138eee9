// Embedding and stacking (eq. 1 and 2): rows of tables gathered into x0, and their gradients summed.
//
//   forward    x0[m, columns of table k] = table_k[ids[m, k]]
//              x0[m, columns of a bag]   = Σ_n coefficient_n table[ids_n]     over the values n of row m
//   backward   for each distinct id, ascending: Σ coefficient_n dx0[row of n] over the values n that share it
//
// coefficient_n is the value's weight (1 without weights); for "mean" over the sum of the row's weights, 0 where that is 0.
// Ids and offsets were checked by the caller. Nearly every row is a cache miss: the next one is prefetched.
#include "vec.h"

namespace fastcross::FASTCROSS_ISA {
namespace {

template <class A> INLINE A weight(const Table& t, int64_t n) { return t.weights ? ((const A*)t.weights)[n] : A(1); }

// What the weights of row m are multiplied with, m's values being [first, last).
template <class A> INLINE A factor(const Table& t, bool mean, int64_t first, int64_t last) {
  if (!mean) return 1;
  A total = 0;
  for (int64_t n = first; n < last; n++) total += weight<A>(t, n);
  return total == 0 ? A(0) : 1 / total;
}

INLINE int64_t end_of(const Table& t, int64_t m, int64_t M) { return m + 1 < M ? t.offsets[m + 1] : t.N; }

constexpr int BITS = 11;  // 2048 counters fit the L1 cache, and two passes sort a vocabulary of 4 million

// A stable sort of the positions 0 … N - 1 by their ids; scratch is (2 N,), and order (N,) or scratch's other half.
const int64_t* sorted(const Table& t, int64_t N, int64_t* scratch) {
  int64_t *order = scratch, *other = scratch + N;
  for (int64_t n = 0; n < N; n++) order[n] = n;
  for (int shift = 0; shift == 0 || (t.height - 1) >> shift; shift += BITS) {
    int64_t places[(1 << BITS) + 1] = {};
    for (int64_t n = 0; n < N; n++) places[((t.ids[n * t.stride] >> shift) & ((1 << BITS) - 1)) + 1]++;
    for (int i = 0; i < 1 << BITS; i++) places[i + 1] += places[i];
    for (int64_t n = 0; n < N; n++) other[places[(t.ids[order[n] * t.stride] >> shift) & ((1 << BITS) - 1)]++] = order[n];
    int64_t* swapped = order;
    order = other;
    other = swapped;
  }
  return order;
}

}  // namespace

void embedding_fwd(const Embedding& e, int64_t start, int64_t stop) {
  for_type(e.type, [&](auto type) {
    using T = decltype(type);
    using A = Accumulation<T>;
    for (int64_t m = start; m < stop; m++)
      for (int64_t k = 0; k < e.K; k++) {
        const Table& t = e.tables[k];
        T* out = (T*)e.x0.data + m * e.x0.stride + t.column;
        const T* table = (const T*)t.data;
        if (!t.offsets) {
          if (m + 1 < stop)
            for (int64_t i = 0; i < t.width; i += 64 / sizeof(T)) __builtin_prefetch(table + t.ids[(m + 1) * t.stride] * t.width + i);
          memcpy(out, table + t.ids[m * t.stride] * t.width, t.width * sizeof(T));
          continue;
        }
        int64_t first = t.offsets[m], last = end_of(t, m, e.M);
        A scale = factor<A>(t, e.mean, first, last);
        for_columns<A>(t.width, [&](int64_t j, auto at) LAMBDA {
          Vec<A> sum{};
          for (int64_t n = first; n < last; n++) sum += (scale * weight<A>(t, n)) * at.load(table + t.ids[n * t.stride] * t.width + j);
          at.store(out + j, sum);
        });
      }
  });
}

// One table's gradient. Returns how many distinct ids there are; -1 where one is not in the table.
// values: (N, width), a row for each distinct id; or (height, width) if it is dense, of which other rows are not written.
// scratch: (4 N,).
int64_t embedding_bwd(const Embedding& e, const Table& t, int64_t* scratch, int64_t* rows, void* values, bool dense) {
  int64_t N = t.offsets ? t.N : e.M, found = 0;
  for (int64_t n = 0; n < N; n++)
    if (uint64_t(t.ids[n * t.stride]) >= uint64_t(t.height)) return -1;
  const int64_t* order = sorted(t, N, scratch);
  int64_t* row_of = scratch + 2 * N;
  for_type(e.type, [&](auto type) {
    using T = decltype(type);
    using A = Accumulation<T>;
    A* coefficients = (A*)(scratch + 3 * N);
    if (t.offsets)
      for (int64_t m = 0; m < e.M; m++) {
        int64_t first = t.offsets[m], last = end_of(t, m, e.M);
        A scale = factor<A>(t, e.mean, first, last);
        for (int64_t n = first; n < last; n++) {
          row_of[n] = m;
          coefficients[n] = scale * weight<A>(t, n);
        }
      }
    const T* dx0 = (const T*)e.x0.data + t.column;
    for (int64_t start = 0, stop = 0; start < N; start = stop, found++) {
      int64_t id = t.ids[order[start] * t.stride];
      while (stop < N && t.ids[order[stop] * t.stride] == id) stop++;
      T* out = (T*)values + (dense ? id : found) * t.width;
      if (!dense) rows[found] = id;
      for_columns<A>(t.width, [&](int64_t j, auto at) LAMBDA {
        Vec<A> sum{};
        for (int64_t i = start; i < stop; i++) {
          int64_t n = order[i];
          if (t.offsets) sum += coefficients[n] * at.load(dx0 + row_of[n] * e.x0.stride + j);
          else sum += at.load(dx0 + n * e.x0.stride + j);
        }
        at.store(out + j, sum);
      });
    }
  });
  return found;
}

}  // namespace fastcross::FASTCROSS_ISA
