// The cross layer, the cross network and its logits for PyTorch's dispatcher.
#include "tensors.h"

namespace fastcross {
namespace {

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

// ---- the logits of dots that were taken before

Tensor folded_logits_fwd(const Tensor& table_, const OptionalTensor& ids, const OptionalTensor& starts_, const Tensor& base_, const Tensor& c_,
                         int64_t layers) {
  FoldedLogits n{};
  n.type = type_of(table_);
  const auto dtype = accumulation(n.type);
  check(table_.dim() == 2 && table_.scalar_type() == dtype && 0 <= layers && layers <= table_.size(1) && ids.has_value() == starts_.has_value(),
        "the table must be (R, L + C), float32 or float64, and have both ids and starts or neither; got ", shape(table_), " and L = ", layers);
  const Tensor table = parameter(table_, dtype), c = parameter(c_, dtype), base = unit_columns(parameter(base_, dtype));
  const int64_t height = table.size(0), K = table.size(1);
  n.M = ids ? ids->size(0) : height, n.k = ids ? ids->size(1) : 0, n.L = layers, n.C = K - layers, n.by_row = !ids;
  n.table = address("table", table, dtype, {height, K}), n.c = address("constants", c, dtype, {K});
  check(base.dim() == 2 && (base.size(0) == 1 || base.size(0) == n.M), "base must have 1 or ", n.M, " rows; got ", shape(base));
  n.base = rows("base", base, dtype, base.size(0), K);
  if (base.size(0) == 1) n.base.stride = 0;
  if (ids) {
    n.ids = (const int64_t*)address("ids", *ids, ScalarType::Long, {n.M, n.k}), n.stride = ids->stride(0), n.column = ids->stride(1);
    check(starts_->is_contiguous(), "starts must be contiguous");
    n.starts = (const int64_t*)address("starts", *starts_, ScalarType::Long, {n.k + 1});
    for (int64_t f = 0; f <= n.k; f++)
      check(f ? n.starts[f - 1] <= n.starts[f] && n.starts[f] <= height : n.starts[0] == 0, "starts must ascend from 0 to at most ", height, "; got ",
            n.starts[f], " at ", f);
  }
  const Tensor z = empty(dtype, {n.M, n.C});
  n.z = z.data_ptr();
  std::atomic<int64_t> wrong{-1};
  parallel_for(0, n.M, 16 * grain((n.k + 2) * K), [&](int64_t start, int64_t stop) {
    auto scratch = doubles(16 * K);
    const int64_t found = kernels().folded_logits_fwd(n, start, stop, scratch.get());
    if (found >= 0) wrong = found;
  });
  check(wrong < 0, "row ", int64_t(wrong), " has an id that is not in its table");
  return z;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastcross, CPU, m) {
  m.impl("cross_layer_fwd", TORCH_BOX(&cross_layer_fwd));
  m.impl("cross_layer_bwd", TORCH_BOX(&cross_layer_bwd));
  m.impl("cross_network_fwd", TORCH_BOX(&cross_network_fwd));
  m.impl("cross_network_bwd", TORCH_BOX(&cross_network_bwd));
  m.impl("cross_logits_fwd", TORCH_BOX(&cross_logits_fwd));
  m.impl("cross_logits_bwd", TORCH_BOX(&cross_logits_bwd));
  m.impl("folded_logits_fwd", TORCH_BOX(&folded_logits_fwd));
}

}  // namespace fastcross
