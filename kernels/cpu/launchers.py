"""The cross operators on the CPU: allocate the results, plan the call, run the compiled kernels on it.

Sums over the chunks' rows join in the order of the rows, so results depend on the number of threads alone, whichever of
them took which chunk.
"""

from typing import Any

import torch
from torch import Tensor

from fastcross.kernels.cpu import layer, network, network_bwd
from fastcross.kernels.cpu.buffers import empty_output
from fastcross.kernels.cpu.compile import compiled
from fastcross.kernels.cpu.threads import run_task
from fastcross.kernels.rows import accumulation_dtype, empty_rows


def cross_layer_fwd(x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    dtype = accumulation_dtype(x0, x, w, b)
    rows, x, w, b = _cast(x0, dtype), _cast(x, dtype), _parameter(w, dtype), _parameter(b, dtype)
    (M, d), y = rows.shape, empty_output(rows)
    plan = layer.FORWARD.plan(dtype, torch.get_num_threads(), M=M, d=d, has_bias=b is not None)
    run_task(compiled(layer.cross_layer_fwd, dtype), plan.task(x0=rows, x=x, w=w, b=b, y=y))
    return _rows_as(x0, y)


def cross_layer_bwd(
    dy: Tensor, x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(x0, x, w, b)
    g, rows, x_rows, vector = _cast(dy, dtype), _cast(x0, dtype), _cast(x, dtype), _parameter(w, dtype)
    M, d = rows.shape
    dx0 = empty_output(rows) if needs[0] else _empty(rows, 0)
    dx = empty_output(x_rows) if needs[1] else _empty(rows, 0)
    dw, db = (_empty(rows, d if needed else 0) for needed in needs[2:])
    plan = layer.BACKWARD.plan(
        dtype, torch.get_num_threads(), M=M, d=d,
        need_dx0=needs[0], need_dx=needs[1], need_dw=needs[2], need_db=needs[3],
    )  # fmt: skip
    task = plan.task(dy=g, x0=rows, x=x_rows, w=vector, dx0=dx0, dx=dx, dw=dw, db=db)
    run_task(compiled(layer.cross_layer_bwd, dtype), task)
    if needs[2] or needs[3]:
        compiled(layer.cross_layer_finish, dtype)(task.block)
    return _rows_as(x0, dx0), _rows_as(x, dx), _cast(dw, w.dtype), _cast(db, (w if b is None else b).dtype)


def cross_network_fwd(x0: Tensor, w: Tensor, b: Tensor | None, keep_p: bool) -> tuple[Tensor, Tensor]:
    y, p = _network_fwd(x0, w, b, None, keep_p)
    return _rows_as(x0, y), p


def cross_logits_fwd(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, keep_p: bool) -> tuple[Tensor, Tensor]:
    z, p = _network_fwd(x0, w, b, v, keep_p)
    return _cast(z, x0.dtype), p


def cross_network_bwd(
    dy: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, p: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    return _network_bwd(dy, x0, w, b, None, p, [*needs, False])[:3]


def cross_logits_bwd(
    dz: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, p: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _network_bwd(dz, x0, w, b, v, p, needs)


def _network_fwd(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor | None, keep_p: bool) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(x0, w, b, v)
    rows, w, b, v = _cast(x0, dtype), _parameter(w, dtype), _parameter(b, dtype), _parameter(v, dtype)
    (M, d), L, C = rows.shape, w.shape[0], 0 if v is None else v.shape[0]
    out = empty_output(rows) if v is None else _empty(rows, M, C)
    p = _empty(rows, L + C, M) if keep_p else _empty(rows, 0)
    plan = network.FORWARD.plan(
        dtype, torch.get_num_threads(), M=M, d=d, L=L, C=C, has_bias=b is not None, keep_p=keep_p
    )
    task = plan.task(x0=rows, w=w, v=v, b=b, out=out, p=p)
    compiled(network.cross_network_prepare, dtype)(task.block)
    run_task(compiled(network.cross_network_fwd, dtype), task)
    return out, p


def _network_bwd(
    dout: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor | None, p: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx0, dw, db, dv, as far as they are needed."""
    dtype = accumulation_dtype(x0, w, b, v)
    g, rows = _cast(dout, dtype), _cast(x0, dtype)
    w_, b_, v_ = _parameter(w, dtype), _parameter(b, dtype), _parameter(v, dtype)
    (M, d), L, C = rows.shape, w.shape[0], 0 if v is None else v.shape[0]
    need_dx0, need_dw, need_db, need_dv = needs
    dx0 = empty_output(rows) if need_dx0 else _empty(rows, 0)
    dw = _empty(rows, L, d) if need_dw else _empty(rows, 0)
    db = _empty(rows, L, d) if need_db else _empty(rows, 0)
    dv = None if v is None else _empty(rows, C, d) if need_dv else _empty(rows, 0)
    plan = network_bwd.BACKWARD.plan(
        dtype, torch.get_num_threads(), M=M, d=d, L=L, C=C, has_bias=b is not None,
        need_dx0=need_dx0, need_dw=need_dw, need_db=need_db, need_dv=need_dv,
    )  # fmt: skip
    task = plan.task(dout=g, x0=rows, w=w_, v=v_, b=b_, p=p, dx0=dx0, dw=dw, dv=dv, db=db)
    compiled(network.cross_network_prepare, dtype)(task.block)
    run_task(compiled(network_bwd.cross_network_bwd, dtype), task)
    if need_dw or need_db or need_dv:
        compiled(network_bwd.cross_network_finish, dtype)(task.block)
    bias, head = w if b is None else b, w if v is None else v
    return _rows_as(x0, dx0), _cast(dw, w.dtype), _cast(db, bias.dtype), _cast(dv, head.dtype)


def _empty(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised; PyTorch makes a tensor of given strides in a third of the time that ``new_empty`` takes."""
    return like.new_empty_strided(shape, (*shape[1:], 1))


def _cast(t: Any, dtype: torch.dtype) -> Any:
    if t is None or t.dtype == dtype:  # .to() takes a microsecond to find nothing to do
        return t
    # By default a cast chooses strides, where rows overlap or are expanded, and the kernels need unit column stride.
    return t.to(dtype, memory_format=torch.contiguous_format)


def _rows_as(x0: Tensor, y: Tensor) -> Tensor:
    """The rows ``y`` in the dtype of ``x0``, and, where that is another, with the padding between its rows."""
    return y if y.dtype == x0.dtype else empty_rows(x0).copy_(y) if y.dim() == 2 else y.to(x0.dtype)


def _parameter(t: Any, dtype: torch.dtype) -> Any:
    return None if t is None else _cast(t, dtype).contiguous()
