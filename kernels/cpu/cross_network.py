"""The cross network and its logits on the CPU: what their kernels are called with, and their launchers.

Sums over the chunks' rows join in the order of the rows, so results depend on the number of threads alone, whichever of
them took which chunk.
"""

from collections.abc import Sequence

from torch import Tensor

from fastcross.kernels.cpu.fields import REGISTER_BYTES, fresh, real, rows, rows_like, whole, wide
from fastcross.kernels.cpu.launcher import Launch
from fastcross.kernels.cpu.layout import Layout
from fastcross.kernels.cpu.results import cast_as, kept, rows_as

# Rows from which on packing the vectors costs less than it saves.
PACK_ROWS = 16
# Bytes of x0 from which on a core has not all in a cache of its own: rows are asked for ahead.
FETCH_BYTES = 1 << 19

# What comes before the rows, of a forward and of a backward pass.
PREPARE = Layout(
    "cross_network_prepare",
    items="M",
    work=lambda n: n.d,
    operands={"w": whole("L", "d"), "v": whole("C", "d", optional=True), "b": whole("L", "d", optional=True)},
    derived={
        "K": lambda n: n.L + n.C,  # vectors: the layers', then the head's
        "padded": lambda n: -(-n.d // n.lanes) * n.lanes,  # d, rounded up to whole registers
        "fetches": lambda n: n.M * n.d * REGISTER_BYTES // n.lanes >= FETCH_BYTES,
        "packs": lambda n: n.M >= PACK_ROWS or n.C > 0,  # with a head, to have all vectors in one place
    },
    shared={
        "c": wide(lambda n: n.K),  # c_l, then β_L·v_c
        "prefix": wide(lambda n: n.padded),  # β_l
        "beta": real(lambda n: n.padded),  # β_L
        "packed": real(lambda n: n.K * n.padded if n.packs else 0),
    },
)
FORWARD = Layout(
    "cross_network_fwd",
    extends=PREPARE,
    items="M",
    together=4,
    work=lambda n: (n.K + 1) * n.d,
    adds_up=False,
    operands={"x0": rows("M", "d")},
    results={
        "y": rows_like("x0", "M", "d", when="writes_y"),
        "z": fresh("M", "C", when="C"),
        "p": fresh("K", "M", when="keep_p"),
    },
    sizes=("keep_p",),
    derived={"writes_y": lambda n: n.C == 0},
    own={
        "dots": real(lambda n: 4 * n.K),  # p, for the rows of a block
        "alpha_L": real(lambda n: 4),
    },
    kernels=("cross_network.cross_network_prepare", "cross_network.cross_network_fwd"),
)
BACKWARD = Layout(
    "cross_network_bwd",
    extends=PREPARE,
    items="M",
    together=4,
    work=lambda n: (2 * n.K + 3) * n.d,
    operands={"x0": rows("M", "d"), "dout": rows("M", "width"), "p": whole("K", "M", optional=True)},
    results={
        "dx0": rows_like("x0", "M", "d", when="need_dx0"),
        "dw": fresh("L", "d", when="need_dw"),
        "db": fresh("L", "d", when="need_db"),
        "dv": fresh("C", "d", when="need_dv"),
    },
    sizes=("need_dx0", "need_dw", "need_db", "need_dv"),
    derived={"width": lambda n: n.C or n.d},
    own={
        "dots": real(lambda n: 4 * n.K),  # p, for the rows of a block
        "coefficient": real(lambda n: 4 * (n.K + 1)),  # dp_l, dq_c and α_L, for the rows of a block
        "alpha": wide(lambda n: 4 * (n.L + 1)),
        "sums": real(lambda n: (n.K + 1) * n.padded),  # packed like the vectors, Σ g last
        "totals": wide(lambda n: (n.K + 1) * n.padded),
        "errors": wide(lambda n: (n.K + 1) * n.padded if n.lanes == 4 else 0),  # for float64
        "ends": wide(lambda n: 4 * n.K),  # dc_l, Σ dz_c: for each place in a block its sum
        "end_errors": wide(lambda n: 4 * n.K),
    },
    kernels=(
        "cross_network.cross_network_prepare",
        "cross_network_bwd.cross_network_bwd",
        "cross_network_bwd.cross_network_finish",
    ),
)


def cross_network_fwd(x0: Tensor, w: Tensor, b: Tensor | None, keep_p: bool) -> tuple[Tensor, Tensor]:
    y, _, p = FORWARD.run(x0=x0, w=w, b=b, v=None, keep_p=keep_p)
    return rows_as(x0, y), kept(y.dtype, p)


def cross_logits_fwd(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, keep_p: bool) -> tuple[Tensor, Tensor]:
    _, z, p = FORWARD.run(x0=x0, w=w, b=b, v=v, keep_p=keep_p)
    return cast_as(x0, z), kept(z.dtype, p)


def cross_network_bwd(
    dy: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, p: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    dx0, dw, db, _ = BACKWARD.run(x0=x0, dout=dy, w=w, b=b, v=None, p=_given(p), **_needs(*needs))
    return rows_as(x0, dx0), cast_as(w, dw), cast_as(w if b is None else b, db)


def cross_logits_bwd(
    dz: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, p: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx0, dw, db, dv = BACKWARD.run(x0=x0, dout=dz, w=w, b=b, v=v, p=_given(p), **_needs(*needs))
    return rows_as(x0, dx0), cast_as(w, dw), cast_as(w if b is None else b, db), cast_as(v, dv)


def _given(p: Tensor | None) -> Tensor | None:
    """p, unless it is empty: it is then computed again."""
    return None if p is None or p.numel() == 0 else p


def _needs(dx0: bool, dw: bool, db: bool, dv: bool = False) -> dict[str, bool]:
    return {"need_dx0": dx0, "need_dw": dw, "need_db": db, "need_dv": dv}


# The same for operands like these, without another look at them but for their memory; None where they would be cast.


def plan_cross_network_fwd(x0: Tensor, w: Tensor, b: Tensor | None, keep_p: bool) -> Launch | None:
    return FORWARD.launcher("x0 w b", "y p", x0=x0, w=w, b=b, v=None, keep_p=keep_p)


def plan_cross_logits_fwd(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, keep_p: bool) -> Launch | None:
    return FORWARD.launcher("x0 w b v", "z p", x0=x0, w=w, b=b, v=v, keep_p=keep_p)


def plan_cross_network_bwd(
    dy: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, p: Tensor | None, needs: Sequence[bool]
) -> Launch | None:
    return BACKWARD.launcher("dout x0 w b p", "dx0 dw db", x0=x0, dout=dy, w=w, b=b, v=None, p=p, **_needs(*needs))


def plan_cross_logits_bwd(
    dz: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, p: Tensor | None, needs: Sequence[bool]
) -> Launch | None:
    return BACKWARD.launcher("dout x0 w b v p", "dx0 dw db dv", x0=x0, dout=dz, w=w, b=b, v=v, p=p, **_needs(*needs))
