"""In Triton's interpreter all operands, results and buffers lie between protected pages: an access beyond one crashes.

The interpreter reads and writes real addresses. ``test_triton_interpreter.py`` runs this file in a process of its own,
and a crash there is a failing test here.
"""

import os
import signal
import subprocess
import sys

import pytest
import torch
from guarded import Guarded
from multiplicative_cases import CASES, operands

if os.environ.get("TRITON_INTERPRET", "") in ("", "0"):
    pytest.skip("for Triton's interpreter", allow_module_level=True)

from fastcross.kernels.embedding import new_faults
from fastcross.kernels.gpu import cross_layer, cross_low_rank, cross_matrix, cross_network, embedding, launch
from fastcross.ops import backends


@pytest.fixture(params=["begins at a protected page", "ends at a protected page"])
def guarded(request, monkeypatch):
    guarded = Guarded(request.param.startswith("ends"))

    def new_empty(like, *size, dtype=None, **options):
        shape = size[0] if size and not isinstance(size[0], int) else size
        return guarded.empty(tuple(shape), dtype or like.dtype)

    def new_empty_strided(like, shape, stride, dtype=None):
        return guarded.empty_strided(tuple(shape), tuple(stride), dtype or like.dtype)

    def carve(like, *sizes):
        return tuple(guarded.empty((size,), like.dtype) for size in sizes)

    def sort(keys, stable):
        return tuple(map(guarded.copy, torch.sort(keys, stable=stable)))

    def describe(device, fields):
        return guarded.copy(torch.tensor(fields))

    monkeypatch.setattr(torch.Tensor, "sort", sort)
    monkeypatch.setattr(embedding, "describe", describe)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch.Tensor, "new_empty_strided", new_empty_strided)
    monkeypatch.setattr(cross_network, "carve", carve)
    monkeypatch.setattr(launch, "hardware_of", lambda device: launch.Hardware(processors=1))
    return guarded


@pytest.mark.parametrize(
    ("d", "padding", "layers", "dtype"),
    [(33, 0, 2, torch.float32), (1026, 14, 3, torch.float32), (54, 0, 3, torch.bfloat16), (4200, 0, 1, torch.float32)],
    ids=["odd", "paper", "half", "long"],
)
def test_nothing_beyond_the_operands(guarded, d, padding, layers, dtype):
    generator = torch.Generator().manual_seed(d)

    def rows():
        return guarded.copy(torch.randn(3, d + padding, generator=generator).to(dtype)[:, :d])

    def parameter(*shape):
        return guarded.copy(torch.randn(*shape, generator=generator).mul_(d**-0.5).to(dtype))

    x0, x, dy, w, b, v = rows(), rows(), rows(), parameter(layers, d), parameter(layers, d), parameter(2, d)
    dz = guarded.copy(torch.ones(3, 2, dtype=dtype))
    results = [
        cross_layer.cross_layer_fwd(x0, x, w[0], b[0]),
        *cross_layer.cross_layer_bwd(dy, x0, x, w[0], b[0], [True] * 4),
    ]
    y, kept = cross_network.cross_network_fwd(x0, w, b, True)
    results += [y, *cross_network.cross_network_bwd(dy, x0, w, b, kept, [True] * 3)]
    z, kept = cross_network.cross_logits_fwd(x0, w, b, v, True)
    results += [z, *cross_network.cross_logits_bwd(dz, x0, w, b, v, kept, [True] * 4)]
    assert all(result.isfinite().all() for result in results)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("d", "padding", "dtype"),
    [(33, 0, torch.float32), (70, 10, torch.bfloat16)],
    ids=["odd", "padded"],
)
def test_dcn_v2_reads_and_writes_nothing_beyond_its_operands(guarded, monkeypatch, case, d, padding, dtype):
    def padded(w):
        return guarded.copy(pad(w))

    pad = cross_matrix.padded
    monkeypatch.setattr(cross_matrix, "padded", padded)
    monkeypatch.setattr(cross_low_rank, "padded", padded)
    monkeypatch.setattr(cross_low_rank, "on_tensor_cores", lambda x: True)
    x0, *parameters = operands(case, 5, d, dtype, layers=2, rank=5)
    d = x0.shape[1]
    x0, dy = (guarded.copy(torch.cat((t, torch.ones(5, padding, dtype=dtype)), 1)[:, :d]) for t in (x0, x0))
    tensors = [x0, *(None if t is None else guarded.copy(t) for t in parameters)]
    if case.operator == "cross_mixture":
        tensors += [None] * (7 - len(tensors))
    options = {  # as the operators have them
        "cross_low_rank": (case.options.get("activation"), case.options.get("diag_scale", 0.0)),
        "cross_mixture": (case.options.get("activation", "tanh"),),
        "cross_fcn": (case.options.get("exponential", False), 1e-5),
    }.get(case.operator, ())
    y, kept = backends.launcher(f"{case.operator}_fwd")(*tensors, *options, True)
    grads = backends.launcher(f"{case.operator}_bwd")(dy, *tensors, *options, kept, [True] * len(tensors))
    assert all(result.isfinite().all() for result in (y, *grads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(8, 4, 4), (3, 1, 17)], ids=["words", "odd"])
@pytest.mark.parametrize("bad", [None, "ids", "offsets"])
def test_embedding_reads_and_writes_nothing_beyond_its_operands(guarded, widths, dtype, bad):
    generator = torch.Generator().manual_seed(1)
    tables = [guarded.copy(torch.randn(5, width, generator=generator).to(dtype)) for width in widths]
    ids, values = (torch.randint(0, 5, shape, generator=generator) for shape in ((33, 2), (40,)))
    offsets, weights = torch.arange(33), guarded.copy(torch.rand(40, generator=generator).to(dtype))
    if bad == "ids":
        ids[7, 1], ids[8, 0], values[3], values[4] = 5, -(2**40), -1, 2**40
    elif bad == "offsets":
        offsets[5], offsets[9], offsets[20] = -3, 2**40, 4
    ids, values, offsets = map(guarded.copy, (ids, values, offsets))
    dense, faults = guarded.copy(torch.zeros(33, 3)), guarded.copy(new_faults(2, 1))
    x0, *kept = embedding.embedding_stack_keyed_fwd(
        dense, ids, [values, offsets, weights], tables, faults, "mean", [True] * 3
    )
    sizes = [size for width in widths for size in (5, width)]
    rows, numbers = embedding.embedding_stack_keyed_bwd(
        guarded.copy(torch.ones_like(x0)), *kept, sizes, [33, 33, 40], 1
    )
    assert bool(x0.isnan().any()) == (bad is not None)
    assert bool(((rows >= 0) & (rows < 5)).all())
    assert bad == "offsets" or bool(numbers.isfinite().all())


def test_an_access_beyond_an_operand_crashes():
    code = f"""
import sys; sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})
import torch, triton, triton.language as tl
from guarded import Guarded
from multiplicative_cases import CASES, operands

@triton.jit
def last(x_ptr, y_ptr, n):
    tl.store(y_ptr, tl.load(x_ptr + n))

x, y = Guarded(True).empty((8,), torch.float32), torch.empty(1)
last[(1,)](x.fill_(1.0), y, 7)
assert y.item() == 1
last[(1,)](x, y, 8)
"""
    with open(os.devnull) as devnull:
        run = subprocess.run([sys.executable, "-"], input=code, text=True, stderr=subprocess.PIPE, stdout=devnull)
    assert run.returncode == -signal.SIGSEGV, run.stderr
