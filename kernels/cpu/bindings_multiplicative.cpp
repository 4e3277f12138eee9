// The steps between the GEMMs of DCN-V2's layers for PyTorch's dispatcher.
#include "tensors.h"

namespace fastcross {
namespace {

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

void activate_fwd(const Tensor& a, std::string f, const Tensor& e) { ExpertsStep(e, a, std::nullopt, std::nullopt, f).run(kernels().activate_fwd); }
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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastcross, CPU, m) {
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
}

}  // namespace fastcross
