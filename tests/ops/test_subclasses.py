"""Tensors that are more, or less, than memory: the meta device, fake tensors, DTensor and other subclasses."""

import warnings

import pytest
import torch
import torch.distributed as dist
from operator_cases import operands_of
from torch.utils import _pytree as pytree

import fastcross
from fastcross import reference
from fastcross.accuracy import BY_NAME, RANK_ONE

BACKENDS = ("auto", "cpu", "triton", "torch", "reference")


def make(operator, dtype=torch.float32, device="cpu"):
    return [t.to(device).requires_grad_() for t in operands_of(operator, 6, dtype=dtype, scale=0.4)]


def gradients(function, tensors, **options):
    y = function(*tensors, **options)
    return y, *torch.autograd.grad(y.square().sum(), tensors)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", RANK_ONE)
def test_the_meta_device(operator, backend):
    for dtype in (torch.float32, torch.float64):
        tensors = make(operator, dtype, "meta")
        results = gradients(getattr(fastcross, operator), tensors, backend=backend)
        expected = gradients(getattr(reference, operator), make(operator, dtype))
        assert [(t.shape, t.dtype, t.device.type) for t in results] == [(t.shape, t.dtype, "meta") for t in expected]
        with torch.no_grad():
            assert getattr(fastcross, operator)(*tensors, backend=backend).shape == expected[0].shape


def test_the_meta_device_has_the_dtypes_of_the_backend():
    tensors = make("cross_network", torch.float8_e5m2, "meta")
    with pytest.raises(ValueError, match=r"float32.*got torch\.float8_e5m2 on meta"):
        fastcross.cross_network(*tensors, backend="cpu")
    assert fastcross.cross_network(*make("cross_network", torch.float16, "meta")).dtype == torch.float16


@pytest.mark.parametrize("backend", ["auto", "cpu", "torch"])
@pytest.mark.parametrize("operator", RANK_ONE)
def test_fake_tensors(operator, backend):
    from torch._subclasses import FakeTensorMode

    tensors = make(operator)
    expected = gradients(getattr(fastcross, operator), tensors, backend=backend)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        results = gradients(getattr(fastcross, operator), fakes, backend=backend)
    assert [(t.shape, t.stride(), t.dtype) for t in results] == [(t.shape, t.stride(), t.dtype) for t in expected]


@pytest.fixture
def mesh(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("operator", RANK_ONE)
def test_dtensor(operator, compiled, mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    tensors, expected = make(operator), gradients(getattr(reference, operator), make(operator))
    rows = BY_NAME[operator].rows
    placed = [distribute_tensor(t, mesh, [Shard(0) if i < rows else Replicate()]) for i, t in enumerate(tensors)]
    placed = [t.detach().requires_grad_() for t in placed]
    function = getattr(fastcross, operator)
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    results = gradients(function, placed)
    assert all(isinstance(t, DTensor) for t in results)
    torch.testing.assert_close([t.full_tensor() for t in results], list(expected))
    if not compiled:
        with pytest.raises(ValueError, match=r'backend "cpu" runs on torch.Tensor only .*got DTensor'):
            function(*placed, backend="cpu")


class Doubled(torch.Tensor):
    """A subclass with rules of its own: two tensors, and every operator on each of them."""

    @staticmethod
    def __new__(cls, first, second):
        return torch.Tensor._make_wrapper_subclass(
            cls, first.shape, first.stride(), dtype=first.dtype, device=first.device, requires_grad=first.requires_grad
        )

    def __init__(self, first, second):
        self.parts = (first, second)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def of(i):
            pick = lambda t: t.parts[i] if isinstance(t, Doubled) else t  # noqa: E731
            return function(*pytree.tree_map(pick, args), **pytree.tree_map(pick, kwargs or {}))

        wrap = lambda a, b: Doubled(a, b) if isinstance(a, torch.Tensor) else a  # noqa: E731
        return pytree.tree_map(wrap, of(0), of(1))


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("operator", RANK_ONE)
def test_a_subclass_with_rules_of_its_own(operator, place):
    tensors = make(operator)
    other = torch.randn_like(tensors[place]) * 0.4
    results = []
    for of in (fastcross, reference):
        operands = [t.detach() for t in tensors]
        operands[place] = Doubled(operands[place], other)
        results.append(getattr(of, operator)(*operands))
    for ours, expected in zip(results[0].parts, results[1].parts, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("operator", RANK_ONE)
def test_a_gradient_with_rules_of_its_own(operator):
    """The forward pass saw plain tensors; what comes back is a subclass."""
    for of in (reference, fastcross):
        tensors = make(operator)
        y = getattr(of, operator)(*tensors)
        grads = torch.autograd.grad(y, tensors, Doubled(torch.ones_like(y), 2 * torch.ones_like(y)))
        assert all(isinstance(g, Doubled) for g in grads)
        if of is reference:
            expected = [g.parts for g in grads]
    for g, (first, second) in zip(grads, expected, strict=True):
        torch.testing.assert_close(g.parts, (first, second))


class Named(torch.Tensor):
    """A subclass that PyTorch's own operators pass on."""


@pytest.mark.parametrize("operator", RANK_ONE)
def test_a_subclass_stays_itself(operator):
    tensors = [t.detach().as_subclass(Named) for t in make(operator)]
    y = getattr(fastcross, operator)(*tensors)
    assert type(y) is Named
    torch.testing.assert_close(y.as_subclass(torch.Tensor), getattr(reference, operator)(*make(operator)).detach())


class Special(torch.nn.Parameter):
    """A parameter like any other, whose memory the kernels can read."""


@pytest.mark.parametrize("backend", ["auto", "cpu"])
@pytest.mark.parametrize("operator", RANK_ONE)
def test_a_parameter_of_another_class(operator, backend):
    tensors = make(operator)
    ours = [tensors[0], *(Special(t.detach()) for t in tensors[1:])]
    results = gradients(getattr(fastcross, operator), ours, backend=backend)
    torch.testing.assert_close(results, gradients(getattr(reference, operator), tensors))


@pytest.mark.parametrize("operator", RANK_ONE)
def test_sparse_operands_are_named(operator):
    tensors = [t.detach() for t in make(operator)]
    function = getattr(fastcross, operator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's, that sparse rows are in a beta state
        sparse = [t.to_sparse() for t in tensors]
    with pytest.raises(TypeError, match=r"x0 must be dense, torch\.strided; got torch\.sparse_coo"):
        function(sparse[0], *tensors[1:])
    place = BY_NAME[operator].names.index("w")
    with pytest.raises(TypeError, match=r"weight must be dense, torch\.strided; got torch\.sparse_coo"):
        function(*tensors[:place], sparse[place], *tensors[place + 1 :])
