"""DCN-V2's, GDCN's and FCN's layers: PyTorch's GEMMs with fused steps between them, over chunks of rows that fit the
cache.

Every layer is  k = A x,  u = expand(k),  x' = x0 ⊙ h(u) + x.  The backward pass needs x0 and k:

    matrix      A = W             u = k                                     keeps d numbers per row and layer
    low rank    A = V             u = U k                                   r
    mixture     A = [V_1 … G]     u = [U_1 … U_K] [p_1 h_1; …; p_K h_K]     K (r + 1)
    gated       A = [W; G]        u = k                                     2 d
    FCN         A = W             u = k                                     d/2

The backward pass recomputes u and x_l, chunk by chunk. Gradients of weights are summed over the chunks in order, in
float32 or better. On a CPU a step is an operator of the dispatcher, such as ``fastcross::product_fwd`` in C++. On a
GPU, where one chunk is the whole batch, it is a launcher of ``gpu/multiplicative.py``.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcross.kernels.closed_form import stacked_experts
from fastcross.kernels.layout import empty_rows

CHUNK = 1 << 19  # elements of x0 per chunk: with the other tensors they fit a core's share of the L3 cache
HALF = (torch.bfloat16, torch.float16)
_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
Operand = Tensor | None
Chunk = tuple[Tensor, Tensor, Any, Tensor]  # of a chunk and a layer: x0, k, what expand(k) gave, x
Ends = tuple[bool, bool]  # dx0 is written, not added to; g itself goes to dx0, too


class Layers:
    """L layers: A, (L, n, d), and the bias, (L, d); with ``needs``, a backward pass through them."""

    steps: Any = torch.ops.fastcross
    activation = "none"
    diag_scale = 0.0

    def __init__(self, x0: Tensor, down: Tensor, bias: Operand, needs: Sequence[bool]) -> None:
        self.down, self.bias, self.differentiated = down, bias, any(needs[1:])
        self.memory: dict[tuple[Any, ...], Tensor] = {}
        self.ddown = self.sums_like(down)
        self.dbias = self.sums_over_rows(bias)

    def expand(self, layer: int, k: Tensor) -> Any:
        """u, or u and the intermediate results before it."""
        return k

    def product(self, layer: int, x0: Tensor, u: Any, x: Tensor, y: Tensor) -> None:
        """y = x0 ⊙ h(u) + x; y may be x."""
        bias = of(self.bias, layer)
        self.steps.product_fwd(x0, u, bias, x, self.activation, self.diag_scale, y)

    def product_bwd(self, layer: int, g: Tensor, rows: Chunk, dx0: Operand, ends: Ends) -> Tensor:
        """dk for g = dL/dx'; adds the layer's part of dx0."""
        x0, _, u, x = rows
        du, bias, dbias = self.scratch("du", *u.shape), of(self.bias, layer), of(self.dbias, layer)
        self.steps.product_bwd(g, x0, u, bias, x, self.activation, self.diag_scale, du, dx0, dbias, *ends)
        return du

    def scratch(self, name: Any, *shape: int) -> Tensor:
        """Memory that all chunks reuse: a GEMM is up to twice as fast if its output is in the cache."""
        found = self.memory.get((name, *shape))
        if found is None:
            found = self.memory[name, *shape] = self.down.new_empty(shape)
        return found

    def sums_like(self, parameter: Tensor) -> Operand:
        """Zeros for sums of products over rows."""
        dtype = torch.float32 if parameter.dtype in HALF else parameter.dtype
        return parameter.new_zeros(parameter.shape, dtype=dtype) if self.differentiated else None

    def sums_over_rows(self, parameter: Operand) -> Operand:
        """Zeros for sums over rows."""
        if parameter is None or not self.differentiated:
            return None
        dtype = torch.float64 if parameter.device.type == "cpu" else torch.float32
        return parameter.new_zeros(parameter.shape, dtype=dtype)


class Matrix(Layers):
    def __init__(self, x0: Tensor, w: Tensor, b: Operand, needs: Sequence[bool] = ()) -> None:
        super().__init__(x0, w, b, needs)

    def gradients(self) -> tuple[Operand, ...]:
        return self.ddown, self.dbias


class LowRank(Layers):
    def __init__(
        self,
        x0: Tensor,
        u: Tensor,
        v: Tensor,
        b: Operand,
        activation: str | None,
        diag_scale: float,
        needs: Sequence[bool] = (),
    ) -> None:
        super().__init__(x0, v, b, needs)
        self.activation, self.diag_scale = activation or "none", diag_scale
        self.up, self.dup = u, self.sums_like(u.transpose(1, 2))

    def expand(self, layer: int, k: Tensor) -> Tensor:
        return gemm(k, self.up[layer].T)

    def product_bwd(self, layer: int, g: Tensor, rows: Chunk, dx0: Operand, ends: Ends) -> Tensor:
        du = super().product_bwd(layer, g, rows, dx0, ends)
        add_product(of(self.dup, layer), rows[1], du)
        return gemm(du, self.up[layer])

    def gradients(self) -> tuple[Operand, ...]:
        return None if self.dup is None else self.dup.transpose(1, 2), self.ddown, self.dbias


class Mixture(Layers):
    """expand(k) is u, e = f(V_k x) and h = f(C_k e), (K, M, r) both, and q = p_k h_k, (M, K r)."""

    def __init__(self, x0: Tensor, *operands: Any, needs: Sequence[bool] = ()) -> None:
        u, c, v, b, gate, gate_bias, activation = operands
        down, self.up = stacked_experts(u, v, gate)
        super().__init__(x0, down, b, needs)
        self.c, self.gate, self.gate_bias, self.f = c, gate, gate_bias, activation or "none"
        self.dup, self.dc, self.dgate_bias = (
            self.sums_like(self.up.transpose(1, 2)),
            self.sums_like(c),
            self.sums_over_rows(gate_bias),
        )

    def expand(self, layer: int, k: Tensor) -> tuple[Tensor, ...]:
        shape = self.c.shape[1], len(k), self.c.shape[2]
        e, h = self.scratch(("e", layer), *shape), self.scratch(("h", layer), *shape)
        q = self.scratch(("q", layer), len(k), self.up.shape[2])
        self.steps.activate_fwd(self.experts(k), self.f, e)
        torch.bmm(e, self.c[layer].transpose(1, 2), out=h)
        self.steps.experts_fwd(h, self.logits(k), self.bias_of_gate(layer), self.f, q)
        return gemm(q, self.up[layer].T), e, h, q

    def product(self, layer: int, x0: Tensor, u: Any, x: Tensor, y: Tensor) -> None:
        super().product(layer, x0, u[0], x, y)

    def product_bwd(self, layer: int, g: Tensor, rows: Chunk, dx0: Operand, ends: Ends) -> Tensor:
        x0, k, (u, e, h, q), x = rows
        du = super().product_bwd(layer, g, (x0, k, u, x), dx0, ends)
        add_product(of(self.dup, layer), q, du)
        dq, dk = gemm(du, self.up[layer]), self.scratch("dk", *k.shape)
        dh, de, dlogits = self.scratch("dh", *h.shape), self.scratch("de", *e.shape), self.logits(dk)
        self.steps.experts_bwd(dq, h, self.logits(k), self.bias_of_gate(layer), self.f, dh, dlogits)
        if self.dc is not None:
            self.dc[layer] += torch.bmm(dh.transpose(1, 2), e)
        if self.dgate_bias is not None and dlogits is not None:
            total = self.dgate_bias if self.dgate_bias.dim() == 1 else self.dgate_bias[layer]
            total += dlogits.sum(0, dtype=total.dtype)
        self.steps.activate_bwd(torch.bmm(dh, self.c[layer], out=de), e, self.f, self.experts(dk))
        return dk

    def gradients(self) -> tuple[Operand, ...]:
        if self.ddown is None or self.dup is None:
            return (None,) * 6
        K, r = self.c.shape[1:3]
        dv, dgate = self.ddown[:, : K * r].unflatten(1, (K, r)), None
        if self.gate is not None:
            dgate = self.ddown[:, K * r :] if self.gate.dim() == 3 else self.ddown[:, K * r :].sum(0)
        return self.dup.unflatten(1, (K, r)).transpose(2, 3), self.dc, dv, self.dbias, dgate, self.dgate_bias

    def experts(self, k: Tensor) -> Tensor:
        """The columns of the experts, (M, K r)."""
        return k[:, : self.up.shape[2]]

    def logits(self, k: Tensor) -> Operand:
        """The columns of the gates, (M, K)."""
        return None if self.gate is None else k[:, self.up.shape[2] :]

    def bias_of_gate(self, layer: int) -> Operand:
        return self.gate_bias if self.gate_bias is None or self.gate_bias.dim() == 1 else self.gate_bias[layer]


class Gated(Layers):
    def __init__(self, x0: Tensor, w: Tensor, g: Tensor, b: Operand, needs: Sequence[bool] = ()) -> None:
        super().__init__(x0, torch.cat((w, g), 1), b, needs)

    def product(self, layer: int, x0: Tensor, u: Any, x: Tensor, y: Tensor) -> None:
        self.steps.gated_fwd(x0, u, of(self.bias, layer), x, y)

    def product_bwd(self, layer: int, g: Tensor, rows: Chunk, dx0: Operand, ends: Ends) -> Tensor:
        x0, k, _, _ = rows
        dk = self.scratch("dk", *k.shape)
        self.steps.gated_bwd(g, x0, k, of(self.bias, layer), dk, dx0, of(self.dbias, layer), *ends)
        return dk

    def gradients(self) -> tuple[Operand, ...]:
        return *((None, None) if self.ddown is None else self.ddown.chunk(2, 1)), self.dbias


class Fcn(Layers):
    def __init__(
        self,
        x0: Tensor,
        w: Tensor,
        b: Tensor,
        norm_w: Tensor,
        norm_b: Tensor,
        exponential: bool,
        eps: float,
        *,
        needs: Sequence[bool] = (),
    ) -> None:
        super().__init__(x0, w, b, needs)
        self.parameters, self.options = (b, norm_w, norm_b), (exponential, eps)
        self.sums = x0.new_zeros(len(b), 2 * b.shape[1], dtype=torch.float64 if x0.is_cpu else torch.float32)

    def product(self, layer: int, x0: Tensor, u: Any, x: Tensor, y: Tensor) -> None:
        self.steps.fcn_fwd(x0, u, *(t[layer] for t in self.parameters), x, *self.options, y)

    def product_bwd(self, layer: int, g: Tensor, rows: Chunk, dx0: Operand, ends: Ends) -> Tensor:
        x0, h, _, x = rows
        dh, parameters = self.scratch("dk", *h.shape), (t[layer] for t in self.parameters)
        self.steps.fcn_bwd(g, x0, h, *parameters, x, *self.options, dh, dx0, self.sums[layer], *ends)
        return dh

    def gradients(self) -> tuple[Operand, ...]:
        d = self.down.shape[2]
        return self.ddown, *self.sums.split((d, d // 2, d // 2), 1)


def forward(kind: Any, x0: Tensor, *rest: Any) -> tuple[Tensor, list[Tensor]]:
    """x_L and the tensors kept for the backward pass; ``rest``: parameters, options, and whether to keep them."""
    *operands, keep = rest
    layers: Layers = kind(x0, *operands)
    L, n, _ = layers.down.shape
    y = empty_rows(x0)
    kept = x0.new_empty(L, len(x0), n) if keep else None
    for rows in chunks(x0):
        x = x0[rows]
        for layer in range(L):
            k = gemm(x, layers.down[layer].T)
            if kept is not None:
                kept[layer, rows] = k
            layers.product(layer, x0[rows], layers.expand(layer, k), x, y[rows])
            x = y[rows]
    return y, [] if kept is None else [kept]


def backward(kind: Any, dy: Tensor, x0: Tensor, *rest: Any) -> list[Tensor]:
    """The gradients of x0 and the parameters; ``rest``: parameters, options, kept tensors, and which are needed."""
    *operands, (kept,), needs = rest
    layers = kind(x0, *operands, needs=needs)
    L = len(kept)
    dx0 = empty_rows(x0) if needs[0] else None
    for rows in chunks(x0):
        x, u, shape = [x0[rows]], [], (rows.stop - rows.start, x0.shape[1])
        for layer in range(L):
            u.append(layers.expand(layer, kept[layer, rows]))
            if layer < L - 1:
                x.append(layers.scratch(("x", layer), *shape))
                layers.product(layer, x[0], u[layer], x[layer], x[layer + 1])
        g, of_x0 = layers.scratch("g", *shape).copy_(dy[rows]), layers.scratch("dx0", *shape) if needs[0] else None
        for layer in reversed(range(L)):
            ends = layer == L - 1, layer == 0
            dk = layers.product_bwd(layer, g, (x[0], kept[layer, rows], u[layer], x[layer]), of_x0, ends)
            add_product(of(layers.ddown, layer), dk, x[layer])
            if layer:
                g = gemm(dk, layers.down[layer], plus=g)
            elif dx0 is not None and of_x0 is not None:
                dx0[rows] = gemm(dk, layers.down[layer], plus=of_x0)
    found = zip(layers.gradients(), needs[1:], strict=True)
    parameters = (g.to(x0.dtype).contiguous() if need and g is not None else x0.new_empty(0) for g, need in found)
    return [x0.new_empty(0) if dx0 is None else dx0, *parameters]


def chunks(x0: Tensor) -> Iterator[slice]:
    """Ranges of rows: on a CPU small enough for the caches, and large enough for an efficient GEMM."""
    M, d = x0.shape
    rows = max(256, CHUNK // d // 64 * 64) * torch.get_num_threads() if x0.is_cpu else max(1, M)
    return (slice(start, min(M, start + rows)) for start in range(0, M, rows))


def gemm(a: Tensor, b: Tensor, plus: Operand = None) -> Tensor:
    """a b + plus. float32 uses oneDNN's linear, which PyTorch itself uses only in torch.compile: (4096, 429) by (429,
    429) takes 15 ms, and 26 with MKL's sgemm; in chunks of 256 rows 14.6 and 17."""
    if _LINEAR is not None and a.dtype == torch.float32 and a.is_cpu and lies_flat(a) and lies_flat(b):
        return _LINEAR(a, b.T, None, "none", [], "") if plus is None else _LINEAR.binary(a, plus, b.T, None, "add")
    return a @ b if plus is None else torch.addmm(plus, a, b)


def lies_flat(t: Tensor) -> bool:
    """Whether rows or columns neither overlap nor are expanded, which oneDNN requires."""
    (m, n), (by_row, by_column) = t.shape, t.stride()
    return (by_column == 1 and by_row >= n) or (by_row == 1 and by_column >= m)


def add_product(total: Operand, a: Tensor, b: Tensor) -> None:
    """total += aᵀ b, if there is a total; the product is rounded to the dtype of its factors."""
    if total is not None:
        total += gemm(a.T, b)


def of(stacked: Operand, layer: int) -> Operand:
    return None if stacked is None else stacked[layer]
