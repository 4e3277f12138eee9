// The embedding and the updates of its rows for PyTorch's dispatcher, and which instruction set is used.
#include "tensors.h"

namespace fastcross {
namespace {

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
  m.impl("embedding_stack_fwd", TORCH_BOX(&embedding_stack_fwd));
  m.impl("embedding_stack_bwd", TORCH_BOX(&embedding_stack_bwd));
  m.impl("adam_rows", TORCH_BOX(&adam_rows));
  m.impl("adagrad_rows", TORCH_BOX(&adagrad_rows));
  m.impl("sgd_rows", TORCH_BOX(&sgd_rows));
}
STABLE_TORCH_LIBRARY_IMPL(fastcross, CompositeExplicitAutograd, m) { m.impl("instruction_set", TORCH_BOX(&instruction_set)); }

}  // namespace fastcross
