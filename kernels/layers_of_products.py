"""DCN-V2's layers and their kin: PyTorch's GEMMs, and between them fused steps, over chunks of rows that stay in cache.

Every layer is  k = A x,  u = expand(k),  x' = x0 ⊙ h(u) + x,  and k is what the backward pass needs beside x0:

    matrix      A = W             u = k                                     keeps d numbers per row and layer
    low rank    A = V             u = U k                                   r
    mixture     A = [V_1 … G]     u = [U_1 … U_K] [p_1 h_1; …; p_K h_K]     K (r + 1)
    gated       A = [W; G]        u = k                                     2 d
    FCN         A = W             u = k                                     d/2

The backward pass computes u and x_l again, chunk by chunk. Weights' gradients are added up over the chunks in order,
in float32 at least. A step is an operator of the dispatcher, ``fastcross::product_fwd`` and so on: C++ on a CPU, Triton
on a GPU, where one chunk is the whole batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcross.kernels.multiplicative import activated, stacked_experts
from fastcross.kernels.rows import empty_rows

CHUNK = 1 << 18  # elements of x0: with what stands beside them they fit a core's second cache
HALF = (torch.bfloat16, torch.float16)
Operand = Tensor | None
Rows = tuple[Tensor, Tensor, Any, Tensor]  # of a chunk and a layer: x0, k, what expand(k) gave, x
Ends = tuple[bool, bool]  # dx0 is written, not added to; g itself goes to dx0, too


class Layers:
    """L layers: A, (L, n, d), and the bias, (L, d); with ``needs``, a backward pass through them."""

    activation = "none"
    diag_scale = 0.0

    def __init__(self, x0: Tensor, down: Tensor, bias: Operand, needs: Sequence[bool]) -> None:
        self.down, self.bias, self.differentiated = down, bias, any(needs[1:])
        self.ddown = self.sums_like(down)
        self.dbias = self.sums_over_rows(bias)

    def expand(self, layer: int, k: Tensor) -> Any:
        """u, or u and what comes before it."""
        return k

    def product(self, layer: int, x0: Tensor, u: Any, x: Tensor, y: Tensor) -> None:
        """y = x0 ⊙ h(u) + x; y may be x."""
        bias = of(self.bias, layer)
        torch.ops.fastcross.product_fwd(x0, u, bias, x, self.activation, self.diag_scale, y)

    def product_bwd(self, layer: int, g: Tensor, rows: Rows, dx0: Operand, ends: Ends) -> Tensor:
        """dk, given g = dL/dx', and what g gives to x0 in dx0."""
        x0, _, u, x = rows
        du, bias, dbias = torch.empty_like(u), of(self.bias, layer), of(self.dbias, layer)
        torch.ops.fastcross.product_bwd(g, x0, u, bias, x, self.activation, self.diag_scale, du, dx0, dbias, *ends)
        return du

    def sums_like(self, parameter: Tensor) -> Operand:
        """Zeros to which products over rows are added."""
        dtype = torch.float32 if parameter.dtype in HALF else parameter.dtype
        return torch.zeros_like(parameter, dtype=dtype) if self.differentiated else None

    def sums_over_rows(self, parameter: Operand) -> Operand:
        """Zeros to which rows are added."""
        if parameter is None or not self.differentiated:
            return None
        dtype = torch.float64 if parameter.device.type == "cpu" else torch.float32
        return torch.zeros_like(parameter, dtype=dtype)


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
        self.up, self.dup = u, self.sums_like(u)

    def expand(self, layer: int, k: Tensor) -> Tensor:
        return k @ self.up[layer].T

    def product_bwd(self, layer: int, g: Tensor, rows: Rows, dx0: Operand, ends: Ends) -> Tensor:
        du = super().product_bwd(layer, g, rows, dx0, ends)
        add_product(of(self.dup, layer), du, rows[1])
        return du @ self.up[layer]

    def gradients(self) -> tuple[Operand, ...]:
        return self.dup, self.ddown, self.dbias


class Mixture(Layers):
    """expand(k) is u, f(V_k x) and h = C_k f(V_k x), (K, M, r) both, and p_k f(h_k), (M, K r)."""

    def __init__(self, x0: Tensor, *operands: Any, needs: Sequence[bool] = ()) -> None:
        u, c, v, b, gate, gate_bias, activation = operands
        down, self.up = stacked_experts(u, v, gate)
        super().__init__(x0, down, b, needs)
        self.c, self.gate, self.gate_bias, self.f = c, gate, gate_bias, activation
        self.dup, self.dc, self.dgate_bias = self.sums_like(self.up), self.sums_like(c), self.sums_over_rows(gate_bias)

    def expand(self, layer: int, k: Tensor) -> tuple[Tensor, ...]:
        e = activated(self.experts(k), self.f)
        h = torch.bmm(e, self.c[layer].transpose(1, 2))
        q = k.new_empty(len(k), self.up.shape[2])
        torch.ops.fastcross.experts_fwd(h, self.logits(k), self.bias_of_gate(layer), self.f or "none", q)
        return q @ self.up[layer].T, e, h, q

    def product(self, layer: int, x0: Tensor, u: Any, x: Tensor, y: Tensor) -> None:
        super().product(layer, x0, u[0], x, y)

    def product_bwd(self, layer: int, g: Tensor, rows: Rows, dx0: Operand, ends: Ends) -> Tensor:
        x0, k, (u, e, h, q), x = rows
        du = super().product_bwd(layer, g, (x0, k, u, x), dx0, ends)
        add_product(of(self.dup, layer), du, q)
        dk, dh = torch.empty_like(k), torch.empty_like(h)
        dlogits, operands = self.logits(dk), (h, self.logits(k), self.bias_of_gate(layer), self.f or "none")
        torch.ops.fastcross.experts_bwd(du @ self.up[layer], *operands, dh, dlogits)
        if self.dc is not None:
            self.dc[layer] += torch.bmm(dh.transpose(1, 2), e)
        if self.dgate_bias is not None and dlogits is not None:
            total = self.dgate_bias if self.dgate_bias.dim() == 1 else self.dgate_bias[layer]
            total += dlogits.sum(0, dtype=total.dtype)
        de, to = torch.bmm(dh, self.c[layer]), self.experts(dk)
        if self.f == "tanh":
            torch.addcmul(de, de * e, e, value=-1, out=to)
        else:
            to.copy_(de if self.f is None else de * (e > 0))
        return dk

    def gradients(self) -> tuple[Operand, ...]:
        if self.ddown is None or self.dup is None:
            return (None,) * 6
        K, r = self.c.shape[1:3]
        dv, dgate = self.ddown[:, : K * r].unflatten(1, (K, r)), self.ddown[:, K * r :]
        if self.gate is not None and self.gate.dim() == 2:
            dgate = dgate.sum(0)
        return self.dup.unflatten(2, (K, r)).transpose(1, 2), self.dc, dv, self.dbias, dgate, self.dgate_bias

    def experts(self, k: Tensor) -> Tensor:
        """The columns of the experts, (K, M, r)."""
        return k[:, : self.up.shape[2]].unflatten(1, self.c.shape[1:3]).transpose(0, 1)

    def logits(self, k: Tensor) -> Operand:
        """The columns of the gates, (M, K)."""
        return None if self.gate is None else k[:, self.up.shape[2] :]

    def bias_of_gate(self, layer: int) -> Operand:
        return self.gate_bias if self.gate_bias is None or self.gate_bias.dim() == 1 else self.gate_bias[layer]


class Gated(Layers):
    def __init__(self, x0: Tensor, w: Tensor, g: Tensor, b: Operand, needs: Sequence[bool] = ()) -> None:
        super().__init__(x0, torch.cat((w, g), 1), b, needs)

    def product(self, layer: int, x0: Tensor, u: Any, x: Tensor, y: Tensor) -> None:
        torch.ops.fastcross.gated_fwd(x0, u, of(self.bias, layer), x, y)

    def product_bwd(self, layer: int, g: Tensor, rows: Rows, dx0: Operand, ends: Ends) -> Tensor:
        x0, k, _, _ = rows
        dk = torch.empty_like(k)
        torch.ops.fastcross.gated_bwd(g, x0, k, of(self.bias, layer), dk, dx0, of(self.dbias, layer), *ends)
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
        torch.ops.fastcross.fcn_fwd(x0, u, *(t[layer] for t in self.parameters), x, *self.options, y)

    def product_bwd(self, layer: int, g: Tensor, rows: Rows, dx0: Operand, ends: Ends) -> Tensor:
        x0, h, _, x = rows
        dh, parameters = torch.empty_like(h), (t[layer] for t in self.parameters)
        torch.ops.fastcross.fcn_bwd(g, x0, h, *parameters, x, *self.options, dh, dx0, self.sums[layer], *ends)
        return dh

    def gradients(self) -> tuple[Operand, ...]:
        d = self.down.shape[2]
        return self.ddown, *self.sums.split((d, d // 2, d // 2), 1)


def forward(kind: Any, x0: Tensor, *rest: Any) -> tuple[Tensor, list[Tensor]]:
    """x_L and what is kept of it; the rest: parameters and options of the layers, and whether to keep."""
    *operands, keep = rest
    layers: Layers = kind(x0, *operands)
    L, n, _ = layers.down.shape
    y = empty_rows(x0)
    kept = x0.new_empty(L, len(x0), n) if keep else None
    for rows in chunks(x0):
        x = x0[rows]
        for layer in range(L):
            k = torch.mm(x, layers.down[layer].T, out=x.new_empty(len(x), n) if kept is None else kept[layer, rows])
            layers.product(layer, x0[rows], layers.expand(layer, k), x, y[rows])
            x = y[rows]
    return y, [] if kept is None else [kept]


def backward(kind: Any, dy: Tensor, x0: Tensor, *rest: Any) -> list[Tensor]:
    """The gradients of x0 and the parameters; the rest: these and the options, what was kept, and what is needed."""
    *operands, (kept,), needs = rest
    layers = kind(x0, *operands, needs=needs)
    L = len(kept)
    dx0 = empty_rows(x0) if needs[0] else None
    for rows in chunks(x0):
        x, u = [x0[rows]], []
        for layer in range(L):
            u.append(layers.expand(layer, kept[layer, rows]))
            if layer < L - 1:
                x.append(torch.empty_like(x[0]))
                layers.product(layer, x[0], u[layer], x[layer], x[layer + 1])
        g, to = dy[rows].clone(), None if dx0 is None else dx0[rows]
        for layer in reversed(range(L)):
            ends = layer == L - 1, layer == 0
            dk = layers.product_bwd(layer, g, (x[0], kept[layer, rows], u[layer], x[layer]), to, ends)
            add_product(of(layers.ddown, layer), dk, x[layer])
            into = g if layer else to
            if into is not None:
                into.addmm_(dk, layers.down[layer])
    nothing, found = x0.new_empty(0), zip(layers.gradients(), needs[1:], strict=True)
    parameters = (g.to(x0.dtype).contiguous() if need and g is not None else nothing for g, need in found)
    return [nothing if dx0 is None else dx0, *parameters]


def chunks(x0: Tensor) -> Iterator[slice]:
    """Ranges of rows: on a CPU as many as fit the cores' caches, and enough for a GEMM to be efficient."""
    M, d = x0.shape
    rows = max(256, CHUNK // d // 64 * 64) * torch.get_num_threads() if x0.is_cpu else max(1, M)
    return (slice(start, min(M, start + rows)) for start in range(0, M, rows))


def add_product(total: Operand, a: Tensor, b: Tensor) -> None:
    """total += aᵀ b, if there is a total; the product is rounded to the dtype of its factors."""
    if total is not None and total.dtype == a.dtype:
        total.addmm_(a.T, b)
    elif total is not None:
        total += a.T @ b


def of(stacked: Operand, layer: int) -> Operand:
    return None if stacked is None else stacked[layer]
