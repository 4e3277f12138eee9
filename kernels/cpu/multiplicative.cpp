// The elementwise steps of DCN-V2's layers and their kin over a range of rows; PyTorch's GEMMs come between them.
//
//   product   h = f(u + b) + diag x;  y = x0 h + x
//             du = g x0 f'(u + b);  dx0 = g h;  g <- g (1 + diag x0);  db = Σ_rows du
//   gated     s = σ(t);  y = x0 (u + b) s + x
//             du = g x0 s;  dt = g x0 (u + b) s (1 - s);  dx0 = g (u + b) s;  db = Σ_rows du
//   activate  e_k = f(a_k), from rows of all experts to the rows of each;  da_k = de_k f'(a_k)
//   experts   p = softmax(logits + c), h_k <- f(h_k);  q_k = p_k h_k
//             dp_k = dq_k·h_k;  dh_k = p_k dq_k f'(h_k);  dlogits_k = p_k (dp_k - Σ_j p_j dp_j)
//   fcn       n = (h - mean) / σ, m = relu(w n + c);  z = [h, h m] + b;  y = e z + x, e = x0, or x if exponential
//             dz = g e, dm = h dz_2 [m > 0], dn = w dm;  dh = dz_1 + m dz_2 + (dn - mean(dn) - n mean(n dn)) / σ;  de = g z;
//             db = Σ_rows dz;  dw = Σ_rows n dm;  dc = Σ_rows dm
//
// Each is one pass: what a step reads is read once, and sums over rows ride along. The steps run over chunks of rows that
// fit a core's cache, so that a GEMM's result is still there when its step reads it.
#include "vec.h"

namespace fastcross::FASTCROSS_ISA {
namespace {

constexpr int64_t FLUSH = 256;  // rows that are summed in A before the sum is added to a total in double

template <class A> struct Numbers;
template <> struct Numbers<float> {
  using Integers = Lanes<int32_t, WIDTH<float>>::type;
  static constexpr int MANTISSA = 23, BIAS = 127, TERMS = 7;
  static constexpr float MOST = 87, LN2 = 0x1.62e430p-1, SHIFT = 0x1.8p23;
};
template <> struct Numbers<double> {
  using Integers = Lanes<int64_t, WIDTH<double>>::type;
  static constexpr int MANTISSA = 52, BIAS = 1023, TERMS = 13;
  static constexpr double MOST = 708, LN2 = 0x1.62e42fefa39efp-1, SHIFT = 0x1.8p52;
};

// e^v - 1: v = n ln 2 + r, and e^r - 1 by its Taylor series, |r| <= 0.35
template <class A> INLINE Vec<A> expm1(Vec<A> v) {
  using N = Numbers<A>;
  constexpr A HIGH = sizeof(A) == 4 ? A(355.0 / 512) : A(float(N::LN2)), LOW = A(0.693147180559945309417 - double(HIGH));
  v = v > N::MOST ? Vec<A>{} + N::MOST : v;
  v = v < -N::MOST ? Vec<A>{} - N::MOST : v;
  Vec<A> n = (v * A(1 / 0.693147180559945309417) + N::SHIFT) - N::SHIFT, r = (v - n * HIGH) - n * LOW;
  Vec<A> series = Vec<A>{} + 1;
  for (int i = N::TERMS; i > 1; i--) series = 1 + series * r * A(1.0 / i);
  auto bits = (__builtin_convertvector(n == n ? n : Vec<A>{}, typename N::Integers) + N::BIAS) << N::MANTISSA;
  Vec<A> scale;
  memcpy(&scale, &bits, sizeof scale);
  return scale * (series * r) + (scale - 1);
}
template <class A> INLINE Vec<A> tanh(Vec<A> v) {
  Vec<A> e = expm1<A>(v + v);
  return e / (e + 2);
}
template <class A> INLINE Vec<A> sigmoid(Vec<A> v) { return 1 / (2 + expm1<A>(-v)); }

template <Activation f, class A> INLINE Vec<A> activated(Vec<A> v) {
  if constexpr (f == Activation::relu) return v < 0 ? Vec<A>{} : v;
  else if constexpr (f == Activation::tanh) return tanh<A>(v);
  else return v;
}
template <Activation f, class A> INLINE Vec<A> slope(Vec<A> e) {  // f'(v), given e = f(v)
  if constexpr (f == Activation::relu) return e > 0 ? Vec<A>{} + 1 : Vec<A>{};
  else if constexpr (f == Activation::tanh) return 1 - e * e;
  else return Vec<A>{} + 1;
}
template <class F> INLINE void for_activation(Activation f, F body) {
  if (f == Activation::none) body(std::integral_constant<Activation, Activation::none>{});
  if (f == Activation::relu) body(std::integral_constant<Activation, Activation::relu>{});
  if (f == Activation::tanh) body(std::integral_constant<Activation, Activation::tanh>{});
}
template <class F> INLINE void for_bool(bool value, F body) {
  if (value) body(std::true_type{});
  else body(std::false_type{});
}

template <class T> INLINE T* row(const Rows& rows, int64_t r) { return (T*)rows.data + r * rows.stride; }

// Calls block(number of rows, first row) for all rows, and every FLUSH of them adds `count` sums to the totals.
template <class A, class F> INLINE void for_blocks(int64_t r, int64_t stop, A* sums, double* totals, int64_t count, F block) {
  if (totals) clear(totals, count);
  while (r < stop) {
    int64_t until = r + FLUSH < stop ? r + FLUSH : stop;
    if (totals) clear(sums, count);
    for (; r + ROWS <= until; r += ROWS) block(std::integral_constant<int, ROWS>{}, r);
    for (; r < until; r++) block(std::integral_constant<int, 1>{}, r);
    if (totals) add_to(totals, sums, count);
  }
}

}  // namespace

void product_fwd(const Product& n, int64_t start, int64_t stop) {
  for_type(n.type, [&](auto t) {
    for_activation(n.f, [&](auto f) {
      constexpr Activation F = decltype(f)::value;
      using T = decltype(t);
      using A = Accumulation<T>;
      const A* b = (const A*)n.b;
      const A diag = A(n.diag);
      for_blocks<A>(start, stop, nullptr, nullptr, 0, [&](auto count, int64_t r) LAMBDA {
        for_columns<A>(n.d, [&](int64_t j, auto at) LAMBDA {
          Vec<A> b_j = b ? at.load(b + j) : Vec<A>{};
          for (int i = 0; i < count; i++) {
            Vec<A> x = at.load(row<T>(n.x, r + i) + j);
            Vec<A> h = activated<F, A>(at.load(row<T>(n.u, r + i) + j) + b_j) + diag * x;
            at.store(row<T>(n.y, r + i) + j, at.load(row<T>(n.x0, r + i) + j) * h + x);
          }
        });
      });
    });
  });
}

void product_bwd(const Product& n, int64_t start, int64_t stop, double* scratch, double* totals) {
  for_type(n.type, [&](auto t) {
    for_activation(n.f, [&](auto f) {
      constexpr Activation F = decltype(f)::value;
      for_bool(n.diag != 0, [&](auto has_diag) {
        constexpr bool DIAGONAL = decltype(has_diag)::value;
        using T = decltype(t);
        using A = Accumulation<T>;
        const A* b = (const A*)n.b;
        const A diag = A(n.diag);
        A* db = (A*)scratch;
        for_blocks<A>(start, stop, db, totals, n.d, [&](auto count, int64_t r) LAMBDA {
          for_columns<A>(n.d, [&](int64_t j, auto at) LAMBDA {
            Vec<A> b_j = b ? at.load(b + j) : Vec<A>{}, db_j{};
            for (int i = 0; i < count; i++) {
              T* g_place = row<T>(n.g, r + i) + j;
              Vec<A> g = at.load(g_place), x0 = at.load(row<T>(n.x0, r + i) + j);
              Vec<A> e = activated<F, A>(at.load(row<T>(n.u, r + i) + j) + b_j), du = g * x0 * slope<F, A>(e);
              Vec<A> dx0 = g * e;
              if constexpr (DIAGONAL) {
                dx0 += g * (diag * at.load(row<T>(n.x, r + i) + j));
                g += g * (diag * x0);
                at.store(g_place, g);
              }
              at.store(row<T>(n.y, r + i) + j, du);
              if (n.dx0.data) {
                T* place = row<T>(n.dx0, r + i) + j;
                if (!n.first) dx0 += at.load(place);
                at.store(place, n.last ? dx0 + g : dx0);
              }
              db_j += du;
            }
            if (totals) at.store(db + j, at.load(db + j) + db_j);
          });
        });
      });
    });
  });
}

void gated_fwd(const Product& n, int64_t start, int64_t stop) {
  for_type(n.type, [&](auto t) {
    using T = decltype(t);
    using A = Accumulation<T>;
    const A* b = (const A*)n.b;
    for_blocks<A>(start, stop, nullptr, nullptr, 0, [&](auto count, int64_t r) LAMBDA {
      for_columns<A>(n.d, [&](int64_t j, auto at) LAMBDA {
        Vec<A> b_j = b ? at.load(b + j) : Vec<A>{};
        for (int i = 0; i < count; i++) {
          const T* u = row<T>(n.u, r + i) + j;
          Vec<A> h = (at.load(u) + b_j) * sigmoid<A>(at.load(u + n.d));
          at.store(row<T>(n.y, r + i) + j, at.load(row<T>(n.x0, r + i) + j) * h + at.load(row<T>(n.x, r + i) + j));
        }
      });
    });
  });
}

void gated_bwd(const Product& n, int64_t start, int64_t stop, double* scratch, double* totals) {
  for_type(n.type, [&](auto t) {
    using T = decltype(t);
    using A = Accumulation<T>;
    const A* b = (const A*)n.b;
    A* db = (A*)scratch;
    for_blocks<A>(start, stop, db, totals, n.d, [&](auto count, int64_t r) LAMBDA {
      for_columns<A>(n.d, [&](int64_t j, auto at) LAMBDA {
        Vec<A> b_j = b ? at.load(b + j) : Vec<A>{}, db_j{};
        for (int i = 0; i < count; i++) {
          const T* u = row<T>(n.u, r + i) + j;
          Vec<A> g = at.load(row<T>(n.g, r + i) + j), s = sigmoid<A>(at.load(u + n.d)), h = (at.load(u) + b_j) * s;
          Vec<A> gx0 = g * at.load(row<T>(n.x0, r + i) + j), du = gx0 * s, dx0 = g * h;
          T* place = row<T>(n.y, r + i) + j;
          at.store(place, du);
          at.store(place + n.d, gx0 * h * (1 - s));
          if (n.dx0.data) {
            T* place = row<T>(n.dx0, r + i) + j;
            if (!n.first) dx0 += at.load(place);
            at.store(place, n.last ? dx0 + g : dx0);
          }
          db_j += du;
        }
        if (totals) at.store(db + j, at.load(db + j) + db_j);
      });
    });
  });
}

namespace {

template <class T, class A = Accumulation<T>> INLINE void softmax(const Experts& n, int64_t r, double* p) {
  if (!n.logits.data) {
    p[0] = 1;
    return;
  }
  const T* logits = row<T>(n.logits, r);
  const A* bias = (const A*)n.bias;
  double most = -__builtin_inf(), total = 0;
  for (int64_t k = 0; k < n.K; k++) {
    p[k] = Part{1}.load(logits + k)[0];
    if (bias) p[k] += bias[k];
    if (!(p[k] <= most)) most = p[k];
  }
  for (int64_t k = 0; k < n.K; k++) total += p[k] = __builtin_exp(p[k] - most);
  for (int64_t k = 0; k < n.K; k++) p[k] /= total;
}

}  // namespace

void activate_fwd(const Experts& n, int64_t start, int64_t stop) {
  for_type(n.type, [&](auto t) {
    for_activation(n.f, [&](auto f) {
      constexpr Activation F = decltype(f)::value;
      using T = decltype(t);
      using A = Accumulation<T>;
      for (int64_t r = start; r < stop; r++)
        for (int64_t k = 0; k < n.K; k++) {
          const T* a = row<T>(n.q, r) + k * n.r;
          T* e = (T*)n.h + (k * n.M + r) * n.r;
          for_columns<A>(n.r, [&](int64_t j, auto at) LAMBDA { at.store(e + j, activated<F, A>(at.load(a + j))); });
        }
    });
  });
}

void activate_bwd(const Experts& n, int64_t start, int64_t stop) {
  for_type(n.type, [&](auto t) {
    for_activation(n.f, [&](auto f) {
      constexpr Activation F = decltype(f)::value;
      using T = decltype(t);
      using A = Accumulation<T>;
      for (int64_t r = start; r < stop; r++)
        for (int64_t k = 0; k < n.K; k++) {
          T* da = row<T>(n.q, r) + k * n.r;
          const T *e = (const T*)n.h + (k * n.M + r) * n.r, *de = (const T*)n.dh + (k * n.M + r) * n.r;
          for_columns<A>(n.r, [&](int64_t j, auto at) LAMBDA { at.store(da + j, at.load(de + j) * slope<F, A>(at.load(e + j))); });
        }
    });
  });
}

void experts_fwd(const Experts& n, int64_t start, int64_t stop, double* scratch) {
  for_type(n.type, [&](auto t) {
    for_activation(n.f, [&](auto f) {
      constexpr Activation F = decltype(f)::value;
      using T = decltype(t);
      using A = Accumulation<T>;
      double* p = scratch;
      for (int64_t r = start; r < stop; r++) {
        softmax<T>(n, r, p);
        for (int64_t k = 0; k < n.K; k++) {
          const A p_k = A(p[k]);
          T *h = (T*)n.h + (k * n.M + r) * n.r, *q = row<T>(n.q, r) + k * n.r;
          for_columns<A>(n.r, [&](int64_t j, auto at) LAMBDA {
            Vec<A> e = activated<F, A>(at.load(h + j));
            at.store(h + j, e);
            at.store(q + j, p_k * e);
          });
        }
      }
    });
  });
}

void experts_bwd(const Experts& n, int64_t start, int64_t stop, double* scratch) {
  for_type(n.type, [&](auto t) {
    for_activation(n.f, [&](auto f) {
      constexpr Activation F = decltype(f)::value;
      using T = decltype(t);
      using A = Accumulation<T>;
      double *p = scratch, *dp = p + n.K;
      for (int64_t r = start; r < stop; r++) {
        softmax<T>(n, r, p);
        double mean = 0;  // of dp, which dlogits are small differences from
        for (int64_t k = 0; k < n.K; k++) {
          A p_k = A(p[k]), dp_k;
          const T *h = (const T*)n.h + (k * n.M + r) * n.r, *dq = row<T>(n.q, r) + k * n.r;
          T* dh = (T*)n.dh + (k * n.M + r) * n.r;
          Vec<A> dot{};
          for_columns<A>(n.r, [&](int64_t j, auto at) LAMBDA {
            Vec<A> g = at.load(dq + j), e = at.load(h + j);
            dot += g * e;
            at.store(dh + j, p_k * g * slope<F, A>(e));
          });
          totals<1>(&dot, &dp_k);
          mean += p[k] * (dp[k] = dp_k);
        }
        if (!n.dlogits.data) continue;
        T* dlogits = row<T>(n.dlogits, r);
        for (int64_t k = 0; k < n.K; k++) Part{1}.store(dlogits + k, Vec<A>{} + A(p[k] * (dp[k] - mean)));
      }
    });
  });
}

namespace {

template <class T, class A> INLINE void mean_and_scale(const Fcn& n, const T* h, A& mean, A& scale) {
  const int64_t half = n.d / 2;
  A ones[WIDTH<A>];
  for (A& one : ones) one = 1;
  Vec<A> sum{}, squares{};
  for_columns<A>(half, [&](int64_t j, auto at) LAMBDA { sum += at.load(h + j); });
  totals<1>(&sum, &mean);
  mean /= A(half);
  for_columns<A>(half, [&](int64_t j, auto at) LAMBDA {
    Vec<A> centred = (at.load(h + j) - mean) * at.load(ones);
    squares += centred * centred;
  });
  totals<1>(&squares, &scale);
  scale = A(1 / __builtin_sqrt(double(scale) / double(half) + n.eps));
}

}  // namespace

void fcn_fwd(const Fcn& n, int64_t start, int64_t stop) {
  for_type(n.type, [&](auto t) {
    using T = decltype(t);
    using A = Accumulation<T>;
    const A *b = (const A*)n.b, *w = (const A*)n.norm_w, *c = (const A*)n.norm_b;
    const int64_t half = n.d / 2;
    for (int64_t r = start; r < stop; r++) {
      const T *h = row<T>(n.h, r), *x = row<T>(n.x, r), *e = n.exponential ? x : row<T>(n.x0, r);
      T* y = row<T>(n.y, r);
      A mean, scale;
      mean_and_scale(n, h, mean, scale);
      for_columns<A>(half, [&](int64_t j, auto at) LAMBDA {
        Vec<A> h_j = at.load(h + j), m = activated<Activation::relu, A>((h_j - mean) * scale * at.load(w + j) + at.load(c + j));
        at.store(y + j, at.load(e + j) * (h_j + at.load(b + j)) + at.load(x + j));
        at.store(y + half + j, at.load(e + half + j) * (h_j * m + at.load(b + half + j)) + at.load(x + half + j));
      });
    }
  });
}

// scratch: the sums, db, dw and dc, then dn and what of dh is known before its means
void fcn_bwd(const Fcn& n, int64_t start, int64_t stop, double* scratch, double* sums) {
  for_type(n.type, [&](auto t) {
    using T = decltype(t);
    using A = Accumulation<T>;
    const A *b = (const A*)n.b, *w = (const A*)n.norm_w, *c = (const A*)n.norm_b;
    const int64_t half = n.d / 2;
    A *db = (A*)scratch, *dw = db + n.d, *dc = dw + half, *dn = dc + half, *direct = dn + half;
    for_blocks<A>(start, stop, db, sums, 2 * n.d, [&](auto count, int64_t r) LAMBDA {
      for (const int64_t until = r + count; r < until; r++) {
        const T *h = row<T>(n.h, r), *e = row<T>(n.exponential ? n.x : n.x0, r), *g = row<T>(n.y, r);
        T* to = n.exponential && !n.last ? row<T>(n.y, r) : n.dx0.data ? row<T>(n.dx0, r) : nullptr;
        const A with_g = n.exponential || n.last;
        A mean, scale, mean_dn, mean_product;
        mean_and_scale(n, h, mean, scale);
        Vec<A> sum{}, products{};
        for_columns<A>(half, [&](int64_t j, auto at) LAMBDA {
          Vec<A> h_j = at.load(h + j), normal = (h_j - mean) * scale, w_j = at.load(w + j);
          Vec<A> m = activated<Activation::relu, A>(normal * w_j + at.load(c + j));
          Vec<A> g1 = at.load(g + j), g2 = at.load(g + half + j), dz1 = g1 * at.load(e + j), dz2 = g2 * at.load(e + half + j);
          Vec<A> dm = dz2 * h_j * slope<Activation::relu, A>(m), dn_j = dm * w_j;
          at.store(db + j, at.load(db + j) + dz1);
          at.store(db + half + j, at.load(db + half + j) + dz2);
          at.store(dw + j, at.load(dw + j) + dm * normal);
          at.store(dc + j, at.load(dc + j) + dm);
          at.store(dn + j, dn_j);
          at.store(direct + j, dz1 + dz2 * m);
          sum += dn_j, products += dn_j * normal;
          if (!to) return;
          Vec<A> to1 = g1 * (with_g + h_j + at.load(b + j)), to2 = g2 * (with_g + h_j * m + at.load(b + half + j));
          if (!n.exponential && !n.first) to1 += at.load(to + j), to2 += at.load(to + half + j);
          at.store(to + j, to1);
          at.store(to + half + j, to2);
        });
        totals<1>(&sum, &mean_dn);
        totals<1>(&products, &mean_product);
        mean_dn /= A(half), mean_product /= A(half);
        T* dh = row<T>(n.dh, r);
        for_columns<A>(half, [&](int64_t j, auto at) LAMBDA {
          Vec<A> normal = (at.load(h + j) - mean) * scale;
          at.store(dh + j, at.load(direct + j) + scale * (at.load(dn + j) - mean_dn - normal * mean_product));
        });
      }
    });
  });
}

}  // namespace fastcross::FASTCROSS_ISA
