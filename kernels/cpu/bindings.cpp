// fastcross's operators for the CPU, on PyTorch's stable ABI: what is checked, allocated and shared out to threads before
// a kernel gets addresses. The schemas are in fastcross/ops/, one file per operator.
//
// How rows are shared out follows from shapes alone, so sums have the same bits for any number of threads.
#include <pthread.h>
#include <sys/mman.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace fastcross {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- the instruction set

struct Kernels {
  const char* name;
#define POINTER(function) decltype(&baseline::function) function
  POINTER(cross_layer_fwd);
  POINTER(cross_layer_bwd);
  POINTER(cross_layer_finish);
  POINTER(cross_network_prepare);
  POINTER(cross_network_fwd);
  POINTER(cross_network_bwd);
  POINTER(cross_network_finish);
  POINTER(embedding_fwd);
  POINTER(embedding_bwd);
  POINTER(product_fwd);
  POINTER(product_bwd);
  POINTER(gated_fwd);
  POINTER(gated_bwd);
  POINTER(activate_fwd);
  POINTER(activate_bwd);
  POINTER(experts_fwd);
  POINTER(experts_bwd);
  POINTER(fcn_fwd);
  POINTER(fcn_bwd);
  POINTER(adam_rows);
  POINTER(adagrad_rows);
  POINTER(sgd_rows);
#undef POINTER
};
#define KERNELS(ISA)                                                                                                       \
  Kernels {                                                                                                                \
    #ISA, ISA::cross_layer_fwd, ISA::cross_layer_bwd, ISA::cross_layer_finish, ISA::cross_network_prepare,                 \
        ISA::cross_network_fwd, ISA::cross_network_bwd, ISA::cross_network_finish, ISA::embedding_fwd, ISA::embedding_bwd, \
        ISA::product_fwd, ISA::product_bwd, ISA::gated_fwd, ISA::gated_bwd, ISA::activate_fwd, ISA::activate_bwd,          \
        ISA::experts_fwd, ISA::experts_bwd,                                                                                \
        ISA::fcn_fwd, ISA::fcn_bwd, ISA::adam_rows, ISA::adagrad_rows, ISA::sgd_rows                                       \
  }

const std::vector<Kernels>& supported() {  // by this processor, the best first
  static const std::vector<Kernels> found = [] {
    std::vector<Kernels> all;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      all.push_back(KERNELS(avx512));
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) all.push_back(KERNELS(avx2));
#endif
    all.push_back(KERNELS(baseline));
    return all;
  }();
  return found;
}
std::atomic<const Kernels*> chosen{&supported().front()};
const Kernels& kernels() { return *chosen.load(std::memory_order_relaxed); }

// ---- checks

template <class... Parts> void check(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

std::string shape(const Tensor& t) {
  std::string text = "(";
  for (int64_t i = 0; i < t.dim(); i++) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + ")";
}

Type type_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return Type::f32;
    case ScalarType::Double:
      return Type::f64;
    case ScalarType::BFloat16:
      return Type::bf16;
    case ScalarType::Half:
      return Type::f16;
    default:
      check(false, "the CPU kernels take float32, float64, bfloat16 and float16; got dtype number ", int(t.scalar_type()));
  }
  return Type::f32;
}
ScalarType accumulation(Type type) { return type == Type::f64 ? ScalarType::Double : ScalarType::Float; }
int64_t bytes_of(ScalarType type) { return type == ScalarType::Double || type == ScalarType::Long ? 8 : type == ScalarType::Float ? 4 : 2; }

// The address of a tensor of this dtype and shape, once all of it was seen to lie within its storage.
void* address(const char* name, const Tensor& t, ScalarType dtype, std::initializer_list<int64_t> sizes) {
  bool fits = t.is_cpu() && t.scalar_type() == dtype && t.dim() == int64_t(sizes.size());
  int64_t last = t.storage_offset(), i = 0;
  for (int64_t size : sizes) {
    fits = fits && t.size(i) == size;
    if (fits) last += (size - 1) * t.stride(i);
    i++;
  }
  check(fits, name, " is not of the dtype, device and shape that the other operands ask for; got ", shape(t));
  int64_t bytes = 0;
  aoti_torch_get_storage_size(t.get(), &bytes);
  check(t.numel() == 0 || (last + 1) * bytes_of(dtype) <= bytes, name, " needs ", (last + 1) * bytes_of(dtype), " bytes of memory; its storage has ",
        bytes);
  return t.data_ptr();
}
Tensor unit_columns(const Tensor& t) { return t.dim() != 2 || t.stride(1) == 1 || t.size(1) == 1 ? t : torch::stable::contiguous(t); }
// Rows as the kernels read them: with unit column stride, and in float64 where a parameter is.
bool is_double(const OptionalTensor& t) { return t && t->scalar_type() == ScalarType::Double; }
template <class... Parameters> Tensor as_rows(const Tensor& x, const Parameters&... parameters) {
  const bool widens = x.scalar_type() != ScalarType::Double && (is_double(parameters) || ...);
  return unit_columns(widens ? torch::stable::to(x, ScalarType::Double) : x);
}
Rows rows(const char* name, const Tensor& t, ScalarType dtype, int64_t M, int64_t d) { return {address(name, t, dtype, {M, d}), t.stride(0)}; }
// A parameter as the kernels read it: contiguous, in the accumulation dtype.
Tensor parameter(const Tensor& t, ScalarType dtype) {
  Tensor cast = t.scalar_type() == dtype ? t : torch::stable::to(t, dtype);
  return cast.is_contiguous() ? cast : torch::stable::contiguous(cast);
}

// ---- results

// Large results are written once, into memory that is mostly fresh: where Linux leaves it to the program, in pages of 2 MiB.
// Filled page by page of 4 KiB it takes longer to fetch than the kernels take to fill it.
void use_huge_pages([[maybe_unused]] const Tensor& t) {
#if defined(MADV_HUGEPAGE)
  constexpr int64_t PAGE = 2 << 20;
  int64_t bytes = 0;
  aoti_torch_get_storage_size(t.get(), &bytes);
  if (bytes < 2 * PAGE) return;
  const int64_t start = (int64_t(t.data_ptr()) + PAGE - 1) / PAGE * PAGE, stop = (int64_t(t.data_ptr()) + bytes) / PAGE * PAGE;
  madvise((void*)start, stop - start, MADV_HUGEPAGE);
#endif
}
Tensor empty(ScalarType dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides) {
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(),
                                                         torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                                                         aoti_torch_device_type_cpu(), 0, &made));
  Tensor t(made);
  use_huge_pages(t);
  return t;
}
Tensor empty(ScalarType dtype, std::vector<int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (int64_t i = int64_t(sizes.size()) - 2; i >= 0; i--) strides[i] = strides[i + 1] * std::max<int64_t>(1, sizes[i + 1]);
  return empty(dtype, sizes, strides);
}
constexpr int64_t MOST_PADDING = 64;  // a row stride within so many elements of d is padding, which results keep
Tensor empty_rows(const Tensor& x, bool needed = true) {
  if (!needed) return empty(x.scalar_type(), {0});
  int64_t d = x.size(1), stride = x.stride(0);
  return empty(x.scalar_type(), {x.size(0), d}, {d < stride && stride <= d + MOST_PADDING ? stride : d, 1});
}
// Rows in the dtype, and with the padding, of the operand that they belong to.
Tensor rows_like(const Tensor& made, const Tensor& x) {
  if (made.scalar_type() == x.scalar_type()) return made;
  Tensor cast = empty_rows(unit_columns(x), made.dim() == 2);
  if (made.dim() == 2) torch::stable::copy_(cast, made);
  return cast;
}
// A gradient in the dtype of its parameter.
Tensor like(const Tensor& gradient, const Tensor& t) {
  return gradient.scalar_type() == t.scalar_type() ? gradient : torch::stable::to(gradient, t.scalar_type());
}

// ---- shares of rows

// A forked process has none of the OpenMP threads that PyTorch started before, and would wait for them.
bool is_forked = false;
[[maybe_unused]] const int watched = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });

template <class F> void parallel_for(int64_t start, int64_t stop, int64_t grain, const F& body) {
  if (!is_forked && stop - start > grain) torch::stable::parallel_for(start, stop, grain, body);
  else if (start < stop) body(start, stop);
}

std::unique_ptr<double[]> doubles(int64_t count) { return std::unique_ptr<double[]>(new double[count]); }

int64_t grain(int64_t work) { return std::max<int64_t>(4, (65536 / work + 3) / 4 * 4); }  // rows worth a thread

// Of M rows with so much work each: about 2^18 to a share, 32 at the most. A share has sums of its own, which cost as
// much as a dozen rows: 32 rows at the least.
struct Shares {
  int64_t count, rows, M;
  Shares(int64_t M, int64_t work) : M(M) {
    count = std::clamp<int64_t>(std::min(M * work >> 18, M / 32), 1, 32);
    rows = ((M + count - 1) / count + 3) / 4 * 4;
    count = std::max<int64_t>(1, (M + rows - 1) / std::max<int64_t>(1, rows));
  }
  int64_t start(int64_t share) const { return std::min(M, share * rows); }
};

// ---- the cross layer

CrossLayer cross_layer(const Tensor& x0, const Tensor& x, const Tensor& w, const OptionalTensor& b, const Tensor& out) {
  CrossLayer n{};
  n.type = type_of(x0), n.M = x0.size(0), n.d = x0.size(1);
  const auto stored = x0.scalar_type(), dtype = accumulation(n.type);
  n.x0 = rows("x0", x0, stored, n.M, n.d), n.x = rows("x", x, stored, n.M, n.d);
  n.out = rows("y", out, stored, n.M, n.d);
  n.w = address("w", w, dtype, {n.d});
  n.b = b ? address("b", *b, dtype, {n.d}) : nullptr;
  return n;
}
OptionalTensor parameter(const OptionalTensor& t, ScalarType dtype) { return t ? OptionalTensor(parameter(*t, dtype)) : OptionalTensor(); }

Tensor cross_layer_fwd(const Tensor& x0_, const Tensor& x_, const Tensor& w_, const OptionalTensor& b_) {
  const Tensor x0 = as_rows(x0_, w_, b_), x = as_rows(x_, w_, b_), y = empty_rows(x0);
  const auto dtype = accumulation(type_of(x0));
  const Tensor w = parameter(w_, dtype);
  const OptionalTensor b = parameter(b_, dtype);
  const CrossLayer n = cross_layer(x0, x, w, b, y);
  parallel_for(0, n.M, grain(2 * n.d), [&](int64_t start, int64_t stop) { kernels().cross_layer_fwd(n, start, stop); });
  return rows_like(y, x0_);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_layer_bwd(const Tensor& dy_, const Tensor& x0_, const Tensor& x_, const Tensor& w_,
                                                           const OptionalTensor& b_, std::vector<bool> needs) {
  check(needs.size() == 4, "needs must be 4; got ", needs.size());
  const Tensor dy = as_rows(dy_, w_, b_), x0 = as_rows(x0_, w_, b_), x = as_rows(x_, w_, b_);
  const auto dtype = accumulation(type_of(x0));
  const Tensor w = parameter(w_, dtype);
  CrossLayer n = cross_layer(x0, x, w, std::nullopt, dy);
  n.need_dx0 = needs[0], n.need_dx = needs[1], n.need_dw = needs[2], n.need_db = needs[3];
  const Tensor dx0 = empty_rows(x0, n.need_dx0), dx = empty_rows(x, n.need_dx);
  const Tensor dw = empty(dtype, {n.need_dw ? n.d : 0}), db = empty(dtype, {n.need_db ? n.d : 0});
  if (n.need_dx0) n.dx0 = {dx0.data_ptr(), dx0.stride(0)};
  if (n.need_dx) n.dx = {dx.data_ptr(), dx.stride(0)};
  const Shares shares(n.M, 4 * n.d);
  auto totals = doubles(shares.count * 2 * n.d);
  parallel_for(0, shares.count, 1, [&](int64_t share, int64_t stop) {
    auto scratch = doubles(2 * (n.d + 16));
    for (; share < stop; share++) kernels().cross_layer_bwd(n, shares.start(share), shares.start(share + 1), scratch.get(), &totals[share * 2 * n.d]);
  });
  kernels().cross_layer_finish(n, totals.get(), shares.count, dw.data_ptr(), db.data_ptr());
  return {rows_like(dx0, x0_), rows_like(dx, x_), like(dw, w_), like(db, b_ ? *b_ : w_)};
}

// ---- the cross network and its logits

struct Network {  // with the memory of what is common to all rows
  CrossNetwork n{};
  Tensor x0, w;
  OptionalTensor b, v;
  std::unique_ptr<double[]> common;
  ScalarType dtype;

  Network(const Tensor& x0_, const Tensor& w_, const OptionalTensor& b_, const OptionalTensor& v_) : x0(as_rows(x0_, w_, b_, v_)) {
    n.type = type_of(x0);
    dtype = accumulation(n.type);
    w = parameter(w_, dtype), b = parameter(b_, dtype), v = parameter(v_, dtype);
    n.M = x0.size(0), n.d = x0.size(1), n.L = w.size(0), n.C = v ? v->size(0) : 0;
    n.x0 = rows("x0", x0, x0.scalar_type(), n.M, n.d);
    n.w = address("w", w, dtype, {n.L, n.d});
    n.b = b ? address("b", *b, dtype, {n.L, n.d}) : nullptr;
    n.v = v ? address("v", *v, dtype, {n.C, n.d}) : nullptr;
    common = doubles(n.L + n.C + (b ? n.d : 0));
    n.c = common.get();
    n.beta = b ? common.get() + n.L + n.C : nullptr;
    kernels().cross_network_prepare(n);
  }
  int64_t numbers() const { return 4 * (3 * (n.L + n.C) + 4); }  // of a block of rows
  Rows out(const Tensor& t) const { return rows("the output", t, x0.scalar_type(), n.M, n.C ? n.C : n.d); }

  std::tuple<Tensor, Tensor> forward(bool keep_p) {
    Tensor made = n.C ? empty(x0.scalar_type(), {n.M, n.C}) : empty_rows(x0);
    Tensor p = keep_p ? empty(dtype, {n.L + n.C, n.M}) : empty(dtype, {0});
    n.out = out(made), n.p = keep_p ? p.data_ptr() : nullptr;
    parallel_for(0, n.M, grain((n.L + n.C + 1) * n.d), [&](int64_t start, int64_t stop) {
      auto scratch = doubles(numbers());
      kernels().cross_network_fwd(n, start, stop, scratch.get());
    });
    return {made, p};
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& dout_, const Tensor& p, std::vector<bool> needs) {
    const int64_t K = n.L + n.C;
    const Tensor dout = as_rows(dout_, w, b, v);
    n.out = out(dout);
    check(p.is_contiguous(), "p must be contiguous");
    n.p = address("p", p, dtype, {K, n.M});
    n.need_dx0 = needs[0], n.need_dw = needs[1], n.need_db = needs[2], n.need_dv = n.C && needs[3];
    const Tensor dx0 = empty_rows(x0, n.need_dx0);
    if (n.need_dx0) n.dx0 = {dx0.data_ptr(), dx0.stride(0)};
    auto gradient = [&](bool needed, int64_t count) { return needed ? empty(dtype, {count, n.d}) : empty(dtype, {0}); };
    const Tensor dw = gradient(n.need_dw, n.L), db = gradient(n.need_db, n.L), dv = gradient(n.need_dv, n.C);
    const Shares shares(n.M, (2 * K + 3) * n.d);
    auto totals = doubles(shares.count * network_totals(n));
    parallel_for(0, shares.count, 1, [&](int64_t share, int64_t stop) {
      auto scratch = doubles((K + 1) * (n.d + 16) + numbers());
      for (; share < stop; share++)
        kernels().cross_network_bwd(n, shares.start(share), shares.start(share + 1), scratch.get(), &totals[share * network_totals(n)]);
    });
    kernels().cross_network_finish(n, totals.get(), shares.count, dw.data_ptr(), db.data_ptr(), dv.data_ptr());
    return {dx0, dw, db, dv};
  }
};

std::tuple<Tensor, Tensor> cross_network_fwd(const Tensor& x0, const Tensor& w, const OptionalTensor& b, bool keep_p) {
  auto [y, p] = Network(x0, w, b, std::nullopt).forward(keep_p);
  return {rows_like(y, x0), p};
}
std::tuple<Tensor, Tensor> cross_logits_fwd(const Tensor& x0, const Tensor& w, const OptionalTensor& b, const Tensor& v, bool keep_p) {
  auto [z, p] = Network(x0, w, b, v).forward(keep_p);
  return {like(z, x0), p};
}
std::tuple<Tensor, Tensor, Tensor> cross_network_bwd(const Tensor& dy, const Tensor& x0, const Tensor& w, const OptionalTensor& b, const Tensor& p,
                                                     std::vector<bool> needs) {
  check(needs.size() == 3, "needs must be 3; got ", needs.size());
  auto [dx0, dw, db, dv] = Network(x0, w, b, std::nullopt).backward(dy, p, needs);
  return {rows_like(dx0, x0), like(dw, w), like(db, b ? *b : w)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> cross_logits_bwd(const Tensor& dz, const Tensor& x0, const Tensor& w, const OptionalTensor& b,
                                                            const Tensor& v, const Tensor& p, std::vector<bool> needs) {
  check(needs.size() == 4, "needs must be 4; got ", needs.size());
  auto [dx0, dw, db, dv] = Network(x0, w, b, v).backward(dz, p, needs);
  return {rows_like(dx0, x0), like(dw, w), like(db, b ? *b : w), like(dv, v)};
}

// ---- embedding

constexpr int64_t ALIGNMENT = 16;  // rows of x0 begin at multiples of so many elements

struct Features {  // the tables' descriptions, with the tensors that they point into
  Embedding e{};
  std::vector<Table> tables;
  std::vector<Tensor> kept;

  const int64_t* integers(const char* name, const Tensor& t, int64_t count) {
    kept.push_back(torch::stable::contiguous(t));
    return (const int64_t*)address(name, kept.back(), ScalarType::Long, {count});
  }
  // Heights and widths of all tables; ids (M, K), then each bag's values, offsets and weights.
  Features(Type type, const std::string& pooling, const Tensor& ids, const std::vector<Tensor>& values, const std::vector<Tensor>& offsets,
           const std::vector<OptionalTensor>& weights, const std::vector<int64_t>& sizes) {
    const int64_t M = ids.size(0), singles = ids.size(1), K = singles + int64_t(values.size());
    check(int64_t(sizes.size()) == 2 * K && offsets.size() == values.size() && weights.size() == values.size(), "there must be a table for each of ",
          singles, " features and ", values.size(), " bags");
    const int64_t* all = (const int64_t*)address("ids", ids, ScalarType::Long, {M, singles});
    int64_t column = 0;
    for (int64_t k = 0; k < K; k++) {
      Table t{nullptr, sizes[2 * k], sizes[2 * k + 1], column, nullptr, nullptr, 1, M, nullptr};
      if (k < singles) {
        t.ids = all + k * ids.stride(1), t.stride = ids.stride(0);
      } else {
        const int64_t i = k - singles;
        t.N = values[i].numel();
        t.ids = integers("values", values[i], t.N), t.offsets = integers("offsets", offsets[i], M);
        if (weights[i]) {
          kept.push_back(parameter(*weights[i], accumulation(type)));
          t.weights = address("weights", kept.back(), accumulation(type), {t.N});
        }
        int64_t before = 0;
        for (int64_t m = 0; m < M; m++) {
          check(t.offsets[m] >= before && t.offsets[m] <= t.N && (m || !t.offsets[m]), "feature ", k,
                "'s offsets must start at 0 and rise to at most ", t.N, "; got ", t.offsets[m], " in row ", m);
          before = t.offsets[m];
        }
        check(M || !t.N, "feature ", k, "'s offsets must start at 0 and rise to at most ", t.N, "; got none");
      }
      column += t.width;
      tables.push_back(t);
    }
    e = {type, M, K, tables.data(), {}, pooling == "mean"};
  }
  int64_t width() const { return tables.empty() ? 0 : tables.back().column + tables.back().width; }
  void check_ids() const {
    for (int64_t k = 0; k < e.K; k++) {
      const Table& t = tables[k];
      for (int64_t n = 0; n < t.N; n++)
        check(uint64_t(t.ids[n * t.stride]) < uint64_t(t.height), "feature ", k, " has ", t.height, " ids, 0 to ", t.height - 1, "; got id ",
              t.ids[n * t.stride], t.offsets ? " in value " : " in row ", n);
    }
  }
};

Tensor embedding_stack_fwd(const Tensor& dense, const Tensor& ids, const std::vector<Tensor>& values, const std::vector<Tensor>& offsets,
                           const std::vector<OptionalTensor>& weights, const std::vector<Tensor>& tables, std::string pooling) {
  const Tensor& first = tables.empty() ? dense : tables[0];
  std::vector<int64_t> sizes;
  for (const Tensor& table : tables) sizes.insert(sizes.end(), {table.size(0), table.size(1)});
  Features f(type_of(first), pooling, ids, values, offsets, weights, sizes);
  for (int64_t k = 0; k < f.e.K; k++) {
    check(tables[k].is_contiguous(), "tables must be contiguous");
    f.tables[k].data = address("a table", tables[k], first.scalar_type(), {f.tables[k].height, f.tables[k].width});
  }
  f.check_ids();
  const int64_t M = f.e.M, d = f.width() + dense.size(1), stride = (d + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  Tensor x0 = empty(first.scalar_type(), {M, d}, {stride, 1});
  f.e.x0 = {x0.data_ptr(), stride};
  parallel_for(0, M, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, d)),
               [&](int64_t start, int64_t stop) { kernels().embedding_fwd(f.e, start, stop); });
  if (dense.size(1)) {
    Tensor last = torch::stable::narrow(x0, 1, f.width(), dense.size(1));
    torch::stable::copy_(last, dense);
  }
  return x0;
}

// For each table its distinct ids, ascending, and a row of gradients for each; or, dense, a gradient of its own size.
std::vector<Tensor> embedding_stack_bwd(const Tensor& dx0_, const Tensor& ids, const std::vector<Tensor>& values, const std::vector<Tensor>& offsets,
                                        const std::vector<OptionalTensor>& weights, std::vector<int64_t> sizes, std::vector<bool> needs,
                                        std::string pooling, bool dense) {
  const Tensor dx0 = unit_columns(dx0_);
  Features f(type_of(dx0), pooling, ids, values, offsets, weights, sizes);
  check(int64_t(needs.size()) == f.e.K && f.width() <= dx0.size(1), "dx0 must have ", f.width(), " columns of tables; got ", shape(dx0));
  f.e.x0 = rows("dx0", dx0, dx0.scalar_type(), f.e.M, dx0.size(1));
  std::vector<Tensor> found, gradients;
  for (int64_t k = 0; k < f.e.K; k++) {
    const Table& t = f.tables[k];
    const int64_t most = needs[k] && !dense ? std::min(t.N, t.height) : 0;
    found.push_back(empty(ScalarType::Long, {most}));
    gradients.push_back(!needs[k] ? empty(dx0.scalar_type(), {0}) : empty(dx0.scalar_type(), {dense ? t.height : most, t.width}));
    if (dense && needs[k]) torch::stable::zero_(gradients.back());
  }
  std::vector<int64_t> counts(f.e.K, 0);
  parallel_for(0, f.e.K, 1, [&](int64_t k, int64_t stop) {
    for (; k < stop; k++) {
      if (!needs[k]) continue;
      std::unique_ptr<int64_t[]> scratch(new int64_t[4 * f.tables[k].N + 1]);
      counts[k] = kernels().embedding_bwd(f.e, f.tables[k], scratch.get(), (int64_t*)found[k].data_ptr(), gradients[k].data_ptr(), dense);
    }
  });
  std::vector<Tensor> result;
  for (int64_t k = 0; k < f.e.K; k++) {
    check(counts[k] >= 0, "feature ", k, " has ", f.tables[k].height, " ids; got others: they were changed since the forward pass");
    if (!dense) result.push_back(torch::stable::narrow(found[k], 0, 0, counts[k]));
    result.push_back(dense || !needs[k] ? gradients[k] : torch::stable::narrow(gradients[k], 0, 0, counts[k]));
  }
  return result;
}

// ---- steps of DCN-V2's layers, between GEMMs

Activation activation(const std::string& name) {
  check(name == "none" || name == "relu" || name == "tanh", "activation must be none, relu or tanh; got ", name);
  return name == "relu" ? Activation::relu : name == "tanh" ? Activation::tanh : Activation::none;
}
Rows optional_rows(const char* name, const OptionalTensor& t, ScalarType dtype, int64_t M, int64_t d) {
  return t ? rows(name, *t, dtype, M, d) : Rows{};
}
// Every row to a share; each share's sums, in their order, are added to `total` (float64), if there is one.
template <class F> void sum_over_rows(int64_t M, int64_t work, int64_t count, int64_t scratch, const OptionalTensor& total, const F& kernel) {
  double* to = total ? (double*)address("sums", *total, ScalarType::Double, {count}) : nullptr;
  check(!total || total->is_contiguous(), "sums must be contiguous");
  const Shares shares(M, work);
  auto totals = doubles(to ? shares.count * count : 0);
  parallel_for(0, shares.count, 1, [&](int64_t share, int64_t stop) {
    auto memory = doubles(scratch);
    for (; share < stop; share++) kernel(shares.start(share), shares.start(share + 1), memory.get(), to ? &totals[share * count] : nullptr);
  });
  for (int64_t share = 0; to && share < shares.count; share++)
    for (int64_t j = 0; j < count; j++) to[j] += totals[share * count + j];
}

struct ProductStep {  // with the parameter as it is read
  Product n{};
  OptionalTensor b;
  ProductStep(const Tensor& x0, const Tensor& u, const OptionalTensor& b_, int64_t columns) {
    const auto stored = x0.scalar_type(), dtype = accumulation(n.type = type_of(x0));
    n.M = x0.size(0), n.d = x0.size(1);
    n.x0 = rows("x0", x0, stored, n.M, n.d), n.u = rows("u", u, stored, n.M, columns * n.d);
    b = parameter(b_, dtype);
    n.b = b ? address("b", *b, dtype, {n.d}) : nullptr;
  }
  void fwd(const Tensor& x, const Tensor& y, void (*kernel)(const Product&, int64_t, int64_t)) {
    n.x = rows("x", x, x.scalar_type(), n.M, n.d), n.y = rows("y", y, y.scalar_type(), n.M, n.d);
    check(x.scalar_type() == y.scalar_type() && type_of(y) == n.type, "x, y and x0 must have one dtype");
    parallel_for(0, n.M, grain(4 * n.d), [&](int64_t start, int64_t stop) { kernel(n, start, stop); });
  }
  void bwd(const Tensor& g, const Tensor& du, int64_t columns, const OptionalTensor& dx0, const OptionalTensor& db, bool first, bool last,
           void (*kernel)(const Product&, int64_t, int64_t, double*, double*)) {
    check(type_of(g) == n.type && type_of(du) == n.type, "gradients must have the dtype of x0");
    n.g = rows("g", g, g.scalar_type(), n.M, n.d), n.y = rows("du", du, g.scalar_type(), n.M, columns * n.d);
    n.dx0 = optional_rows("dx0", dx0, g.scalar_type(), n.M, n.d);
    n.first = first, n.last = last;
    sum_over_rows(n.M, 8 * n.d, n.d, n.d + 16, db,
                  [&](int64_t start, int64_t stop, double* scratch, double* totals) { kernel(n, start, stop, scratch, totals); });
  }
};

void product_fwd(const Tensor& x0, const Tensor& u, const OptionalTensor& b, const Tensor& x, std::string f, double diag, const Tensor& y) {
  ProductStep step(x0, u, b, 1);
  step.n.f = activation(f), step.n.diag = diag;
  step.fwd(x, y, kernels().product_fwd);
}
void product_bwd(const Tensor& g, const Tensor& x0, const Tensor& u, const OptionalTensor& b, const Tensor& x, std::string f, double diag,
                 const Tensor& du, const OptionalTensor& dx0, const OptionalTensor& db, bool first, bool last) {
  ProductStep step(x0, u, b, 1);
  step.n.f = activation(f), step.n.diag = diag;
  step.n.x = rows("x", x, x0.scalar_type(), step.n.M, step.n.d);
  step.bwd(g, du, 1, dx0, db, first, last, kernels().product_bwd);
}
void gated_fwd(const Tensor& x0, const Tensor& ut, const OptionalTensor& b, const Tensor& x, const Tensor& y) {
  ProductStep(x0, ut, b, 2).fwd(x, y, kernels().gated_fwd);
}
void gated_bwd(const Tensor& g, const Tensor& x0, const Tensor& ut, const OptionalTensor& b, const Tensor& dut, const OptionalTensor& dx0,
               const OptionalTensor& db, bool first, bool last) {
  ProductStep(x0, ut, b, 2).bwd(g, dut, 2, dx0, db, first, last, kernels().gated_bwd);
}

struct ExpertsStep {
  Experts n{};
  ScalarType stored;
  OptionalTensor bias;
  ExpertsStep(const Tensor& h, const Tensor& q, const OptionalTensor& logits, const OptionalTensor& bias_, const std::string& f)
      : stored(h.scalar_type()) {
    n.type = type_of(h), n.f = activation(f);
    check(h.dim() == 3, "h must be (K, M, r); got ", shape(h));
    n.K = h.size(0), n.M = h.size(1), n.r = h.size(2);
    n.h = whole("h", h);
    n.q = rows("q", q, stored, n.M, n.K * n.r);
    n.logits = optional_rows("logits", logits, stored, n.M, n.K);
    bias = parameter(bias_, accumulation(n.type));
    n.bias = bias ? address("gate_bias", *bias, accumulation(n.type), {n.K}) : nullptr;
  }
  void* whole(const char* name, const Tensor& t) const {
    check(t.is_contiguous(), name, " must be contiguous");
    return address(name, t, stored, {n.K, n.M, n.r});
  }
  void run(void (*kernel)(const Experts&, int64_t, int64_t)) {
    parallel_for(0, n.M, grain(4 * n.K * n.r), [&](int64_t start, int64_t stop) { kernel(n, start, stop); });
  }
  void run(void (*kernel)(const Experts&, int64_t, int64_t, double*)) {
    check(n.logits.data || n.K == 1, "logits are missing, of ", n.K, " experts");
    parallel_for(0, n.M, grain(4 * n.K * n.r), [&](int64_t start, int64_t stop) {
      auto scratch = doubles(2 * n.K + 16);
      kernel(n, start, stop, scratch.get());
    });
  }
};

void activate_fwd(const Tensor& a, std::string f, const Tensor& e) {
  ExpertsStep(e, a, std::nullopt, std::nullopt, f).run(kernels().activate_fwd);
}
void activate_bwd(const Tensor& de, const Tensor& e, std::string f, const Tensor& da) {
  ExpertsStep step(e, da, std::nullopt, std::nullopt, f);
  step.n.dh = step.whole("de", de);
  step.run(kernels().activate_bwd);
}
void experts_fwd(const Tensor& h, const OptionalTensor& logits, const OptionalTensor& gate_bias, std::string f, const Tensor& q) {
  ExpertsStep(h, q, logits, gate_bias, f).run(kernels().experts_fwd);
}
void experts_bwd(const Tensor& dq, const Tensor& h, const OptionalTensor& logits, const OptionalTensor& gate_bias, std::string f, const Tensor& dh,
                 const OptionalTensor& dlogits) {
  ExpertsStep step(h, dq, logits, gate_bias, f);
  step.n.dh = step.whole("dh", dh);
  step.n.dlogits = optional_rows("dlogits", dlogits, step.stored, step.n.M, step.n.K);
  step.run(kernels().experts_bwd);
}

struct FcnStep {
  Fcn n{};
  Tensor b, norm_w, norm_b;
  FcnStep(const Tensor& x0, const Tensor& h, const Tensor& b_, const Tensor& w_, const Tensor& c_, const Tensor& x, const Tensor& y, bool exponential,
          double eps)
      : b(parameter(b_, accumulation(type_of(x0)))), norm_w(parameter(w_, b.scalar_type())), norm_b(parameter(c_, b.scalar_type())) {
    const auto stored = x0.scalar_type(), dtype = b.scalar_type();
    n.type = type_of(x0), n.M = x0.size(0), n.d = x0.size(1), n.eps = eps, n.exponential = exponential;
    n.x0 = rows("x0", x0, stored, n.M, n.d), n.h = rows("h", h, stored, n.M, n.d / 2);
    n.x = rows("x", x, stored, n.M, n.d), n.y = rows("y", y, stored, n.M, n.d);
    n.b = address("b", b, dtype, {n.d});
    n.norm_w = address("norm_w", norm_w, dtype, {n.d / 2}), n.norm_b = address("norm_b", norm_b, dtype, {n.d / 2});
  }
};

void fcn_fwd(const Tensor& x0, const Tensor& h, const Tensor& b, const Tensor& norm_w, const Tensor& norm_b, const Tensor& x, bool exponential,
             double eps, const Tensor& y) {
  FcnStep step(x0, h, b, norm_w, norm_b, x, y, exponential, eps);
  parallel_for(0, step.n.M, grain(4 * step.n.d), [&](int64_t start, int64_t stop) { kernels().fcn_fwd(step.n, start, stop); });
}
void fcn_bwd(const Tensor& g, const Tensor& x0, const Tensor& h, const Tensor& b, const Tensor& norm_w, const Tensor& norm_b, const Tensor& x,
             bool exponential, double eps, const Tensor& dh, const OptionalTensor& dx0, const Tensor& sums, bool first, bool last) {
  FcnStep step(x0, h, b, norm_w, norm_b, x, g, exponential, eps);
  Fcn& n = step.n;
  n.dh = rows("dh", dh, x0.scalar_type(), n.M, n.d / 2), n.dx0 = optional_rows("dx0", dx0, x0.scalar_type(), n.M, n.d);
  n.first = first, n.last = last;
  sum_over_rows(n.M, 8 * n.d, 2 * n.d, 3 * n.d + 64, sums,
                [&](int64_t start, int64_t stop, double* scratch, double* totals) { kernels().fcn_bwd(n, start, stop, scratch, totals); });
}

// ---- updates of rows

using Tensors = std::vector<Tensor>;

// Calls update(table) for a share of the rows of each table, once all was seen to fit; moments are like the tables, or one
// number for each row.
template <class F>
void update_rows(const Tensors& tables, const Tensors& first, const Tensors& second, const Tensors& rows, const Tensors& g, RowUpdate numbers,
                 F kernel) {
  const size_t K = tables.size();
  auto is_like = [&](const Tensors& t) { return t.empty() || t.size() == K; };
  check(rows.size() == K && g.size() == K && is_like(first) && is_like(second), "there must be as many rows and moments as tables, ", K);
  std::vector<RowUpdate> updates(K, numbers);
  for (size_t k = 0; k < K; k++) {
    RowUpdate& u = updates[k];
    const Tensor& table = tables[k];
    const auto dtype = table.scalar_type();
    check(table.dim() == 2, "a table must be (height, width); got ", shape(table));
    u.type = type_of(table), u.height = table.size(0), u.width = table.size(1), u.N = rows[k].numel();
    for (const Tensor* t : {&table, &rows[k], &g[k]}) check(t->is_contiguous(), "tables and gradients must be contiguous");
    u.w = address("a table", table, dtype, {u.height, u.width});
    u.rows = (const int64_t*)address("rows", rows[k], ScalarType::Long, {u.N});
    u.g = address("a gradient", g[k], dtype, {u.N, u.width});
    if (!first.empty()) {
      check(first[k].is_contiguous(), "moments must be contiguous");
      u.first = u.row_wise ? address("sums", first[k], dtype, {u.height}) : address("moments", first[k], dtype, {u.height, u.width});
    }
    if (!second.empty()) {
      check(second[k].is_contiguous(), "moments must be contiguous");
      u.second = address("moments", second[k], dtype, {u.height, u.width});
    }
    for (int64_t n = 0; n < u.N; n++)
      check(u.rows[n] >= (n ? u.rows[n - 1] : 0) && u.rows[n] < u.height, "rows must ascend from 0 to at most ", u.height - 1, "; got ", u.rows[n],
            " in entry ", n, " of table ", k);
  }
  for (const RowUpdate& u : updates)
    parallel_for(0, u.N, std::max<int64_t>(1, 8192 / std::max<int64_t>(1, u.width)), [&](int64_t start, int64_t stop) { kernel(u, start, stop); });
}

void adam_rows(const Tensors& tables, const Tensors& first, const Tensors& second, const Tensors& rows, const Tensors& g, double rate, double scale,
               double shrink, double decay1, double decay2, double eps) {
  RowUpdate u{};
  u.rate = rate, u.scale = scale, u.shrink = shrink, u.decay1 = decay1, u.decay2 = decay2, u.eps = eps;
  update_rows(tables, first, second, rows, g, u, kernels().adam_rows);
}
void adagrad_rows(const Tensors& tables, const Tensors& sums, const Tensors& rows, const Tensors& g, double rate, double eps, bool row_wise) {
  RowUpdate u{};
  u.rate = rate, u.eps = eps, u.row_wise = row_wise;
  update_rows(tables, sums, {}, rows, g, u, kernels().adagrad_rows);
}
void sgd_rows(const Tensors& tables, const Tensors& rows, const Tensors& g, double rate) {
  RowUpdate u{};
  u.rate = rate;
  update_rows(tables, {}, {}, rows, g, u, kernels().sgd_rows);
}

// "": which instruction set is used; a name: use that one, as the tests do
std::string instruction_set(std::string name) {
  std::string names;
  for (const Kernels& each : supported()) {
    if (name == each.name) chosen = &each;
    names += (names.empty() ? "" : ", ") + std::string(each.name);
  }
  check(name.empty() || name == kernels().name, "this processor has ", names, "; got ", name);
  return kernels().name;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastcross, CPU, m) {
  m.impl("cross_layer_fwd", TORCH_BOX(&cross_layer_fwd));
  m.impl("cross_layer_bwd", TORCH_BOX(&cross_layer_bwd));
  m.impl("cross_network_fwd", TORCH_BOX(&cross_network_fwd));
  m.impl("cross_network_bwd", TORCH_BOX(&cross_network_bwd));
  m.impl("cross_logits_fwd", TORCH_BOX(&cross_logits_fwd));
  m.impl("cross_logits_bwd", TORCH_BOX(&cross_logits_bwd));
  m.impl("embedding_stack_fwd", TORCH_BOX(&embedding_stack_fwd));
  m.impl("embedding_stack_bwd", TORCH_BOX(&embedding_stack_bwd));
  m.impl("product_fwd", TORCH_BOX(&product_fwd));
  m.impl("product_bwd", TORCH_BOX(&product_bwd));
  m.impl("gated_fwd", TORCH_BOX(&gated_fwd));
  m.impl("gated_bwd", TORCH_BOX(&gated_bwd));
  m.impl("activate_fwd", TORCH_BOX(&activate_fwd));
  m.impl("activate_bwd", TORCH_BOX(&activate_bwd));
  m.impl("experts_fwd", TORCH_BOX(&experts_fwd));
  m.impl("experts_bwd", TORCH_BOX(&experts_bwd));
  m.impl("fcn_fwd", TORCH_BOX(&fcn_fwd));
  m.impl("fcn_bwd", TORCH_BOX(&fcn_bwd));
  m.impl("adam_rows", TORCH_BOX(&adam_rows));
  m.impl("adagrad_rows", TORCH_BOX(&adagrad_rows));
  m.impl("sgd_rows", TORCH_BOX(&sgd_rows));
}
STABLE_TORCH_LIBRARY_IMPL(fastcross, CompositeExplicitAutograd, m) { m.impl("instruction_set", TORCH_BOX(&instruction_set)); }

}  // namespace fastcross
