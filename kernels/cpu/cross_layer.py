"""One cross layer on the CPU: what its kernels are called with, and their launchers.

Sums over the chunks' rows join in the order of the rows, so results depend on the number of threads alone, whichever of
them took which chunk.
"""

from collections.abc import Sequence

from torch import Tensor

from fastcross.kernels.cpu.fields import fresh, real, rows, rows_like, whole, wide
from fastcross.kernels.cpu.launcher import Launch
from fastcross.kernels.cpu.layout import Layout
from fastcross.kernels.cpu.results import cast_as, rows_as

_PADDED = {"padded": lambda n: -(-n.d // n.lanes) * n.lanes}  # d, rounded up to whole registers

FORWARD = Layout(
    "cross_layer_fwd",
    items="M",
    together=4,
    work=lambda n: 2 * n.d,
    adds_up=False,
    operands={"x0": rows("M", "d"), "x": rows("M", "d"), "w": whole("d"), "b": whole("d", optional=True)},
    results={"y": rows_like("x0", "M", "d")},
    derived=_PADDED,
    own={"s": real(lambda n: 4)},
    kernels=("cross_layer.cross_layer_fwd",),
)
BACKWARD = Layout(
    "cross_layer_bwd",
    items="M",
    together=4,
    work=lambda n: 4 * n.d,
    operands={
        "dy": rows("M", "d"),
        "x0": rows("M", "d"),
        "x": rows("M", "d"),
        "w": whole("d"),
        "b": whole("d", optional=True),  # for its dtype alone
    },
    results={
        "dx0": rows_like("x0", "M", "d", when="need_dx0"),
        "dx": rows_like("x", "M", "d", when="need_dx"),
        "dw": fresh("d", when="need_dw"),
        "db": fresh("d", when="need_db"),
    },
    sizes=("need_dx0", "need_dx", "need_dw", "need_db"),
    derived=_PADDED,
    own={
        "s": real(lambda n: 4),
        "ds": real(lambda n: 4),
        "sums": real(lambda n: 2 * n.padded),  # dw and db, a register of the one beside a register of the other
        "totals": wide(lambda n: 2 * n.padded),
        "errors": wide(lambda n: 2 * n.padded if n.lanes == 4 else 0),  # for float64
    },
    kernels=("cross_layer.cross_layer_bwd", "cross_layer.cross_layer_finish"),
)


def cross_layer_fwd(x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return rows_as(x0, FORWARD.run(x0=x0, x=x, w=w, b=b)[0])


def cross_layer_bwd(
    dy: Tensor, x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx0, dx, dw, db = BACKWARD.run(dy=dy, x0=x0, x=x, w=w, b=b, **_needs(*needs))
    return rows_as(x0, dx0), rows_as(x, dx), cast_as(w, dw), cast_as(w if b is None else b, db)


def _needs(dx0: bool, dx: bool, dw: bool, db: bool) -> dict[str, bool]:
    return {"need_dx0": dx0, "need_dx": dx, "need_dw": dw, "need_db": db}


# The same for operands like these, without another look at them but for their memory; None where they would be cast.


def plan_cross_layer_fwd(x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Launch | None:
    return FORWARD.launcher("x0 x w b", "y", x0=x0, x=x, w=w, b=b)


def plan_cross_layer_bwd(
    dy: Tensor, x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, needs: Sequence[bool]
) -> Launch | None:
    return BACKWARD.launcher("dy x0 x w b", "dx0 dx dw db", dy=dy, x0=x0, x=x, w=w, b=b, **_needs(*needs))
