// What the kernels are given: addresses, sizes and strides, all of them checked by the bindings. Nothing here knows torch.
#pragma once
#include <cstdint>

namespace fastcross {

enum class Type { f32, f64, bf16, f16 };  // of rows; parameters and sums are double for f64, else float

struct Rows {  // (M, d), unit stride between columns; the stride between rows is in elements
  void* data = nullptr;
  int64_t stride = 0;
};

struct CrossLayer {
  Type type;
  int64_t M, d;
  Rows x0, x, out, dx0, dx;  // out: y or, backward, its gradient
  const void *w, *b;         // (d,); b or null
  bool need_dx0, need_dx, need_dw, need_db;
};

struct CrossNetwork {
  Type type;
  int64_t M, d, L, C;     // C = 0: the network, y (M, d); else its logits, z (M, C)
  Rows x0, out, dx0;      // out: y or z or, backward, its gradient
  const void *w, *b, *v;  // (L, d), (L, d) or null, (C, d) or null
  void* c;                // (L + C,): β_l·w_l and β_L·v_c; zeros without biases
  void* beta;             // (d,): β_L; null without biases
  void* p;                // (L + C, M): x0·w_l and x0·v_c; null: not kept
  bool need_dx0, need_dw, need_db, need_dv;
};

static inline int64_t network_totals(const CrossNetwork& n) { return (n.L + n.C + 1) * n.d + n.L + n.C; }

enum class Activation { none, relu, tanh };

struct Product {  // of x0 and what a GEMM gave: steps of DCN-V2's layers
  Type type;
  int64_t M, d;
  Rows x0, x, u, g, y, dx0;  // u: of 2 d columns where it has a gate; backward: y is du, and dx0 is null if not needed
  const void* b;             // (d,) or null
  Activation f;
  double diag;
  bool first, last;  // backward: dx0 is written, not added to; g belongs to dx0 too
};
struct Experts {  // K of rank r: what they give, weighed
  Type type;
  int64_t M, K, r;
  void *h, *dh;      // (K, M, r)
  Rows q;            // (M, K r); backward its gradient
  Rows logits;       // (M, K); null: of a single expert
  Rows dlogits;      // (M, K) or null
  const void* bias;  // (K,) or null
  Activation f;
};
struct Fcn {
  Type type;
  int64_t M, d;
  Rows x0, x, h, y, dh, dx0;        // h, dh: d/2 columns; backward: y is g
  const void *b, *norm_w, *norm_b;  // (d,), (d/2,), (d/2,)
  double eps;
  bool exponential, first, last;
};

struct Table {  // of one feature: single-valued where offsets is null
  void* data;
  int64_t height, width, column;  // column: where it begins in x0
  const int64_t *ids, *offsets;   // (M,) with a stride, or (N,) and the (M,) rows' first values
  int64_t stride, N;
  const void* weights;  // (N,) in the accumulation type, or null
};
struct Embedding {
  Type type;
  int64_t M, K;
  const Table* tables;
  Rows x0;
  bool mean;
};

struct FoldedLogits {  // of a cross network whose dots were taken before: f32 or f64
  Type type;
  int64_t M, k, L, C;
  const void *table, *c;        // (height, L + C), (L + C,)
  bool by_row;                  // row m of the table is row m's; k = 0
  const int64_t *ids, *starts;  // (M, k), (k + 1,)
  int64_t stride, column;       // of ids
  Rows base;                    // (M, L + C); stride 0: one row for all
  void* z;                      // (M, C)
};

struct RowUpdate {  // of one table; rows ascend, values stand at the first of equal ones
  Type type;
  int64_t height, width, N;
  void *w, *first, *second;  // moments, like w; row-wise: first is (height,)
  const int64_t* rows;
  const void* g;  // (N, width)
  double rate, scale, shrink, decay1, decay2, eps;
  bool row_wise;
};

// All kernels, a line each: result, name and arguments. Functions over [start, stop) write nothing outside of their share,
// so any thread may run any of them. Totals, sums over rows in double, are written by the share that computed them, and
// added up by `finish` in the order of the shares.
#define FASTCROSS_KERNELS(KERNEL)                                                                                             \
  KERNEL(void, cross_layer_fwd, (const CrossLayer&, int64_t start, int64_t stop))                                             \
  /* totals (2, d): Σ ds x, Σ g */                                                                                            \
  KERNEL(void, cross_layer_bwd, (const CrossLayer&, int64_t start, int64_t stop, double* scratch, double* totals))            \
  KERNEL(void, cross_layer_finish, (const CrossLayer&, const double* totals, int64_t shares, void* dw, void* db))             \
  KERNEL(void, cross_network_prepare, (const CrossNetwork&))                                                                  \
  KERNEL(void, cross_network_fwd, (const CrossNetwork&, int64_t start, int64_t stop, double* scratch))                        \
  /* totals, K = L + C: (K + 1, d): Σ dp_l x0, Σ dq_c x0, Σ g; then (K,): Σ a_{l+1}, Σ dz_c */                                \
  KERNEL(void, cross_network_bwd, (const CrossNetwork&, int64_t start, int64_t stop, double* scratch, double* totals))        \
  KERNEL(void, cross_network_finish, (const CrossNetwork&, double* totals, int64_t shares, void* dw, void* db, void* dv))     \
  KERNEL(void, embedding_fwd, (const Embedding&, int64_t start, int64_t stop))                                                \
  KERNEL(int64_t, embedding_bwd, (const Embedding&, const Table&, int64_t* scratch, int64_t* rows, void* values, bool dense)) \
  /* the first row with an id that is not in its table, or -1 */                                                              \
  KERNEL(int64_t, folded_logits_fwd, (const FoldedLogits&, int64_t start, int64_t stop, double* scratch))                     \
  KERNEL(void, product_fwd, (const Product&, int64_t start, int64_t stop))                                                    \
  /* totals (d,): Σ du; null where it is not needed */                                                                        \
  KERNEL(void, product_bwd, (const Product&, int64_t start, int64_t stop, double* scratch, double* totals))                   \
  KERNEL(void, gated_fwd, (const Product&, int64_t start, int64_t stop))                                                      \
  KERNEL(void, gated_bwd, (const Product&, int64_t start, int64_t stop, double* scratch, double* totals))                     \
  KERNEL(void, activate_fwd, (const Experts&, int64_t start, int64_t stop))                                                   \
  KERNEL(void, activate_bwd, (const Experts&, int64_t start, int64_t stop))                                                   \
  KERNEL(void, experts_fwd, (const Experts&, int64_t start, int64_t stop, double* scratch))                                   \
  KERNEL(void, experts_bwd, (const Experts&, int64_t start, int64_t stop, double* scratch))                                   \
  KERNEL(void, fcn_fwd, (const Fcn&, int64_t start, int64_t stop))                                                            \
  /* totals (2, d): Σ dz; Σ n dm and Σ dm */                                                                                  \
  KERNEL(void, fcn_bwd, (const Fcn&, int64_t start, int64_t stop, double* scratch, double* totals))                           \
  KERNEL(void, adam_rows, (const RowUpdate&, int64_t start, int64_t stop))                                                    \
  KERNEL(void, adagrad_rows, (const RowUpdate&, int64_t start, int64_t stop))                                                 \
  KERNEL(void, sgd_rows, (const RowUpdate&, int64_t start, int64_t stop))

// Of each instruction set a namespace with these functions, and a table of them.
#define FASTCROSS_DECLARED(result, name, arguments) result name arguments;
#define FASTCROSS_POINTER(result, name, arguments) result(*name) arguments;
#define FASTCROSS_ENTRY(result, name, arguments) name,
struct Kernels {
  const char* name;
  FASTCROSS_KERNELS(FASTCROSS_POINTER)
};
#define FASTCROSS_DECLARE(ISA)                                                  \
  namespace ISA {                                                               \
  FASTCROSS_KERNELS(FASTCROSS_DECLARED)                                         \
  inline Kernels table() { return {#ISA, FASTCROSS_KERNELS(FASTCROSS_ENTRY)}; } \
  }
FASTCROSS_DECLARE(baseline)
#if defined(__x86_64__)
FASTCROSS_DECLARE(avx2)
FASTCROSS_DECLARE(avx512)
#endif

}  // namespace fastcross
