// Between PyTorch's stable ABI and the kernels: what is checked, allocated and shared out to threads before a kernel gets
// addresses. The schemas of the operators are in fastcross/ops/.
//
// How rows are shared out follows from shapes alone, so sums have the same bits for any number of threads.
#pragma once
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

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- the instruction set

inline const std::vector<Kernels>& supported() {  // by this processor, the best first
  static const std::vector<Kernels> found = [] {
    std::vector<Kernels> all;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      all.push_back(avx512::table());
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) all.push_back(avx2::table());
#endif
    all.push_back(baseline::table());
    return all;
  }();
  return found;
}
inline std::atomic<const Kernels*> chosen{&supported().front()};
inline const Kernels& kernels() { return *chosen.load(std::memory_order_relaxed); }

// ---- checks

template <class... Parts> void check(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

inline std::string shape(const Tensor& t) {
  std::string text = "(";
  for (int64_t i = 0; i < t.dim(); i++) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + ")";
}

inline Type type_of(const Tensor& t) {
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
inline ScalarType accumulation(Type type) { return type == Type::f64 ? ScalarType::Double : ScalarType::Float; }
inline int64_t bytes_of(ScalarType type) { return type == ScalarType::Double || type == ScalarType::Long ? 8 : type == ScalarType::Float ? 4 : 2; }

// The address of a tensor of this dtype and shape, once all of it was seen to lie within its storage.
inline void* address(const char* name, const Tensor& t, ScalarType dtype, std::initializer_list<int64_t> sizes) {
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
inline Tensor unit_columns(const Tensor& t) { return t.dim() != 2 || t.stride(1) == 1 || t.size(1) == 1 ? t : torch::stable::contiguous(t); }
// Rows as the kernels read them: with unit column stride, and in float64 where a parameter is.
inline bool is_double(const OptionalTensor& t) { return t && t->scalar_type() == ScalarType::Double; }
template <class... Parameters> Tensor as_rows(const Tensor& x, const Parameters&... parameters) {
  const bool widens = x.scalar_type() != ScalarType::Double && (is_double(parameters) || ...);
  return unit_columns(widens ? torch::stable::to(x, ScalarType::Double) : x);
}
inline Rows rows(const char* name, const Tensor& t, ScalarType dtype, int64_t M, int64_t d) { return {address(name, t, dtype, {M, d}), t.stride(0)}; }
// A parameter as the kernels read it: contiguous, in the accumulation dtype.
inline Tensor parameter(const Tensor& t, ScalarType dtype) {
  Tensor cast = t.scalar_type() == dtype ? t : torch::stable::to(t, dtype);
  return cast.is_contiguous() ? cast : torch::stable::contiguous(cast);
}
inline OptionalTensor parameter(const OptionalTensor& t, ScalarType dtype) { return t ? OptionalTensor(parameter(*t, dtype)) : OptionalTensor(); }

// ---- results

// Large results are written once, into memory that is mostly fresh: where Linux leaves it to the program, in pages of 2 MiB.
// Filled page by page of 4 KiB it takes longer to fetch than the kernels take to fill it.
inline void use_huge_pages([[maybe_unused]] const Tensor& t) {
#if defined(MADV_HUGEPAGE)
  constexpr int64_t PAGE = 2 << 20;
  int64_t bytes = 0;
  aoti_torch_get_storage_size(t.get(), &bytes);
  if (bytes < 2 * PAGE) return;
  const int64_t start = (int64_t(t.data_ptr()) + PAGE - 1) / PAGE * PAGE, stop = (int64_t(t.data_ptr()) + bytes) / PAGE * PAGE;
  madvise((void*)start, stop - start, MADV_HUGEPAGE);
#endif
}
inline Tensor empty(ScalarType dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides) {
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(),
                                                  torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                                                  aoti_torch_device_type_cpu(), 0, &made));
  Tensor t(made);
  use_huge_pages(t);
  return t;
}
inline Tensor empty(ScalarType dtype, std::vector<int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (int64_t i = int64_t(sizes.size()) - 2; i >= 0; i--) strides[i] = strides[i + 1] * std::max<int64_t>(1, sizes[i + 1]);
  return empty(dtype, sizes, strides);
}
constexpr int64_t MOST_PADDING = 64;  // a row stride within so many elements of d is padding, which results keep
inline Tensor empty_rows(const Tensor& x, bool needed = true) {
  if (!needed) return empty(x.scalar_type(), {0});
  int64_t d = x.size(1), stride = x.stride(0);
  return empty(x.scalar_type(), {x.size(0), d}, {d < stride && stride <= d + MOST_PADDING ? stride : d, 1});
}
// Rows in the dtype, and with the padding, of the operand that they belong to.
inline Tensor rows_like(const Tensor& made, const Tensor& x) {
  if (made.scalar_type() == x.scalar_type()) return made;
  Tensor cast = empty_rows(unit_columns(x), made.dim() == 2);
  if (made.dim() == 2) torch::stable::copy_(cast, made);
  return cast;
}
// A gradient in the dtype of its parameter.
inline Tensor like(const Tensor& gradient, const Tensor& t) {
  return gradient.scalar_type() == t.scalar_type() ? gradient : torch::stable::to(gradient, t.scalar_type());
}

// ---- shares of rows

// A forked process has none of the OpenMP threads that PyTorch started before, and would wait for them.
inline bool is_forked = false;
[[maybe_unused]] inline const int watched = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });

template <class F> void parallel_for(int64_t start, int64_t stop, int64_t grain, const F& body) {
  if (!is_forked && stop - start > grain) torch::stable::parallel_for(start, stop, grain, body);
  else if (start < stop) body(start, stop);
}

inline std::unique_ptr<double[]> doubles(int64_t count) { return std::unique_ptr<double[]>(new double[count]); }

inline int64_t grain(int64_t work) { return std::max<int64_t>(4, (65536 / work + 3) / 4 * 4); }  // rows worth a thread

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

}  // namespace fastcross
