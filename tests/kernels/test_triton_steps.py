"""The elementwise Triton steps of DCN-V2's layers, against autograd of the same formula in PyTorch in float64.

Where they run, and when: see test_triton_kernels.py. The rule is fastcross/accuracy.py, the formula in the dtype of
the operands being the eager loop.
"""

import pytest
import torch
import torch.nn.functional as F
from triton_place import INTERPRETING, MARKS

from fastcross.accuracy import assert_as_good

pytestmark = MARKS
BF16, SINGLE = torch.bfloat16, torch.float32
ACTIVATIONS = {"none": lambda v: v, "relu": torch.relu, "tanh": torch.tanh}
SHAPES = {"one": (1, 2), "odd": (7, 66), "several tiles": (10, 520)}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    if INTERPRETING:
        from fastcross.kernels.gpu import launch

        monkeypatch.setattr(launch, "hardware_of", lambda device: launch.Hardware(processors=1))


def tensors(device, dtype, *shapes):
    """None for None; with a shape's last number negative, rows that lie further apart."""
    generator = torch.Generator().manual_seed(sum(map(len, filter(None, shapes))))
    found = []
    for shape in shapes:
        if shape is None:
            found.append(None)
            continue
        wide = torch.randn(*shape[:-1], shape[-1] + 6, generator=generator).to(dtype).to(device)
        found.append(wide[..., : shape[-1]] if len(shape) == 2 else wide[..., : shape[-1]].contiguous())
    return found


def exact_and_eager(function, operands, dy):
    """The result and the gradients of all operands (None is left out) in float64, and in the operands' dtype."""
    for dtype in (torch.float64, dy.dtype):
        leaves = [None if t is None else t.to(dtype).detach().requires_grad_() for t in operands]
        y = function(*leaves)
        yield [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], dy.to(dtype))]


def check(names, ours, function, operands, dy):
    for name, o, x, e in zip(names, ours, *exact_and_eager(function, operands, dy), strict=True):
        assert_as_good(o, e, x, name)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [SINGLE, BF16], ids=str)
@pytest.mark.parametrize(("f", "diag", "bias"), [("none", 0.0, True), ("relu", 0.7, True), ("tanh", 0.0, False)])
def test_product(shape, dtype, f, diag, bias, device):
    from fastcross.kernels.gpu import multiplicative as steps

    M, d = SHAPES[shape]
    x0, u, x, g, start, b = tensors(device, dtype, *[(M, d)] * 5, (d,) if bias else None)

    def product(x0, u, x, b):
        return x0 * (ACTIVATIONS[f](u if b is None else u + b) + diag * x) + x

    y = torch.empty_like(x)
    steps.product_fwd(x0, u, b, x, f, diag, y)
    dx, du, dx0 = g.clone(), torch.empty_like(u), torch.empty_like(x0)
    db = None if b is None else torch.zeros(d, device=device)
    steps.product_bwd(dx, x0, u, b, x, f, diag, du, dx0, db, True, False)
    ours = [y, dx0, du, dx, *([] if db is None else [db.to(dtype)])]
    check(["y", "dx0", "du", "dx", "db"][: len(ours)], ours, product, (x0, u, x, b), g)

    added, du = start.clone(), torch.empty_like(u)
    steps.product_bwd(g.clone(), x0, u, b, x, f, diag, du, added, None, False, True)
    expected = start.double() + dx0.double() + dx.double()
    assert_as_good(added, expected.to(dtype), expected, "dx0, added to")


@pytest.mark.parametrize("dtype", [SINGLE, BF16])
@pytest.mark.parametrize(
    ("M", "K", "r", "f", "gate", "bias"),
    [(1, 1, 3, "tanh", False, False), (33, 3, 70, "tanh", True, True), (9, 4, 16, "relu", True, False)],
)
def test_experts(dtype, M, K, r, f, gate, bias, device):
    from fastcross.kernels.gpu import multiplicative as steps

    h, logits, c, dq = tensors(device, dtype, (K, M, r), (M, K) if gate else None, (K,) if bias else None, (M, K * r))

    def experts(h, logits, c):
        p = torch.ones(M, 1) if logits is None else torch.softmax(logits if c is None else logits + c, 1)
        return (p.to(h).T.unsqueeze(2) * ACTIVATIONS[f](h)).transpose(0, 1).flatten(1)

    q, dh, e = torch.empty_like(dq), torch.empty_like(h), h.clone()
    dlogits = None if logits is None else torch.empty_like(logits)
    steps.experts_fwd(e, logits, c, f, q)
    steps.experts_bwd(dq, e, logits, c, f, dh, dlogits)
    ours = [q, dh, *([] if dlogits is None else [dlogits])]
    if c is not None:
        ours.append(dlogits.double().sum(0).to(dtype))
    check(["q", "dh", "dlogits", "dc"][: len(ours)], ours, experts, (h, logits, c), dq)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [SINGLE, BF16])
@pytest.mark.parametrize("exponential", [False, True])
def test_fcn(shape, dtype, exponential, device):
    from fastcross.kernels.gpu import multiplicative as steps

    M, d = SHAPES[shape]
    x0, x, g, start, h, b, w, c = tensors(device, dtype, *[(M, d)] * 4, (M, d // 2), (d,), (d // 2,), (d // 2,))
    eps = 1e-5

    def fcn(e, h, b, w, c):
        m = torch.relu(F.layer_norm(h, h.shape[-1:], w, c, eps))
        return e * (torch.cat((h, h * m), -1) + b)

    e = x if exponential else x0
    y, dh, dx0, sums = torch.empty_like(x), torch.empty_like(h), torch.empty_like(x0), torch.zeros(2 * d, device=device)
    steps.fcn_fwd(x0, h, b, w, c, x, exponential, eps, y)
    steps.fcn_bwd(g.clone(), x0, h, b, w, c, x, exponential, eps, dh, dx0, sums, True, True)
    exact, eager = exact_and_eager(fcn, (e, h, b, w, c), g)
    for each in (exact, eager):  # the residual, forward and, in the last layer of the backward pass, to dx0
        each[0], each[1] = each[0] + x.to(each[0]), each[1] + g.to(each[1])
    names = ("y", "dx0", "dh", "db", "dw", "dc")
    for name, o, xa, ea in zip(
        names, (y, dx0, dh, *sums.to(dtype).split((d, d // 2, d // 2))), exact, eager, strict=True
    ):
        assert_as_good(o, ea, xa, name)

    to, added = g.clone(), start.clone()
    steps.fcn_bwd(to, x0, h, b, w, c, x, exponential, eps, dh, added, sums, False, False)
    if exponential:  # g goes on to the layer before, and dx0 is left alone
        assert torch.equal(added, start)
        assert_as_good(to, eager[1], exact[1], "g")
    else:
        assert torch.equal(to, g)
        expected = start.double() + exact[1] - g.double()
        assert_as_good(added, expected.to(dtype), expected, "dx0, added to")
