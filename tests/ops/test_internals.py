"""A canary for each private interface of PyTorch that the operators use, and the operators without any of them."""

import functools
import importlib

import pytest
import torch
from accuracy import assert_as_good_as_eager
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fastcross
from fastcross import ops
from fastcross.ops import internals, usual

FUNCTIONS = {
    "cross_layer": ops.cross_layer.__globals__["CrossLayerFunction"],
    "cross_network": ops.cross_network.__globals__["CrossNetworkFunction"],
    "cross_logits": ops.cross_logits.__globals__["CrossLogitsFunction"],
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
PRIVATE = [
    "_C._are_functorch_transforms_active",
    "_C._len_torch_dispatch_stack",
    "_C._is_tracing",
    "_C._dynamo.guards.TensorGuards",
    "_C._FunctionBase.apply",
    "autograd.forward_ad._current_level",
    "autograd.profiler._is_profiler_enabled",
]


def operands(operator):
    torch.manual_seed(0)
    x0, w, b, v = torch.randn(6, 9), torch.randn(3, 9) / 3, torch.randn(3, 9), torch.randn(2, 9) / 3
    every = {"cross_layer": (x0, x0.flip(0), w[0], b[0]), "cross_network": (x0, w, b), "cross_logits": (x0, w, b, v)}
    return every[operator]


def seen(record):
    """What a quiet call, a transform and so on say of themselves."""
    record.append((internals.is_quiet(), internals.is_transformed()))


def test_a_plain_call_is_quiet():
    assert internals.is_quiet()
    assert not internals.is_transformed()
    assert all(internals.is_plain(t) for t in (None, torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(0)))
    assert not any(internals.is_foreign(t) for t in (None, torch.ones(2), torch.nn.Parameter(torch.ones(2))))


def test_transforms_are_seen():
    record = []

    def look(t):
        seen(record)
        assert not internals.is_plain(t)
        assert internals.is_foreign(t)
        return t.sum()

    torch.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    torch.func.jvp(look, (torch.ones(3),), (torch.ones(3),))
    assert record == [(False, True)] * 3


def test_what_a_transform_left_behind_is_seen():
    kept = []
    torch.func.grad(lambda t: (kept.append(t * 1), t.sum())[1])(torch.ones(3))
    torch.vmap(lambda t: (kept.append(t * 1), t.sum())[1])(torch.ones(3, 2))
    assert internals.is_quiet()
    assert all(internals.is_foreign(t) and not internals.is_plain(t) for t in kept)


def test_a_level_of_tangents_is_seen():
    with forward_ad.dual_level():
        assert internals.is_transformed()
        assert not internals.is_quiet()
    assert internals.is_quiet()


def test_observers_are_seen():
    class Observer(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Observer():
        assert not internals.is_quiet()
    with torch.autograd.profiler.profile():
        assert not internals.is_quiet()
    record = []
    torch.jit.trace(lambda t: (seen(record), t * 1)[1], (torch.ones(2),), check_trace=False)
    assert record == [(False, False)]
    assert internals.is_quiet()


def test_tensors_without_memory_of_their_own_are_not_plain():
    negated = torch.complex(torch.ones(3), torch.ones(3)).conj().imag
    assert negated.is_neg()
    for t in (negated, torch._efficientzerotensor((3,)), torch.ones(3, device="meta")):
        assert not internals.is_plain(t)
        assert not internals.is_foreign(t)


def test_what_traces_is_known_from_what_has_rules():
    from torch._subclasses import FakeTensor, FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor

    for kind in (FakeTensor, FunctionalTensor):
        assert kind.__module__.startswith(internals._TRACED)
    fake = FakeTensorMode().from_tensor(torch.ones(3))
    assert not internals.is_plain(fake)
    assert not internals.is_foreign(fake)
    assert internals.is_foreign(torch.ones(3).as_subclass(type("Subclass", (torch.Tensor,), {})))


def test_a_function_is_applied_directly():
    """Without the Python part of ``Function.apply``, but with its results and its gradient."""
    for name, function in FUNCTIONS.items():
        direct = internals.direct_apply(function)
        assert direct.__self__ is function
        assert direct.__qualname__ != torch.autograd.Function.apply.__qualname__
        tensors = [t.requires_grad_() for t in operands(name)]
        y, expected = (apply(*tensors, "numba", None) for apply in (direct, function.apply))
        assert torch.equal(y, expected)
        assert type(y.grad_fn) is type(expected.grad_fn)


@pytest.mark.parametrize("path", PRIVATE)
def test_the_private_name_is_there(path):
    """The canary: where this fails, PyTorch took a name away and the fallback runs, right but slower."""
    found = torch
    for name in path.split("."):
        found = getattr(found, name)


@pytest.fixture(params=[*PRIVATE, "all of them"])
def without(request):
    """The operators where PyTorch lacks a private name: it is gone while ``internals`` looks for it, as at import."""
    with pytest.MonkeyPatch.context() as patch:
        for path in PRIVATE if request.param == "all of them" else [request.param]:
            *folders, name = path.split(".")
            if name == "apply":  # which cannot be taken from a type that is built in
                patch.setattr(torch._C, "_FunctionBase", object())
            else:
                patch.delattr(functools.reduce(getattr, folders, torch), name)
        importlib.reload(internals)
    with pytest.MonkeyPatch.context() as patch:
        for name, function in FUNCTIONS.items():
            module = getattr(ops, name).__globals__
            patch.setitem(module, "_apply", internals.direct_apply(function))
            remembered = module["_calls"]
            patch.setitem(module, "_calls", usual.Calls(name, function, remembered.vjp))  # which remembers nothing yet
        yield request.param
    importlib.reload(internals)


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_without_it_the_operators_are_right(without, operator):
    tensors = operands(operator)
    for backend in ("numba", "auto", "numba", "auto"):  # a call that comes again is remembered
        assert_as_good_as_eager(operator, tensors, backend)
    assert not internals.is_quiet() or without in ("_C._FunctionBase.apply", "_C._dynamo.guards.TensorGuards")
    ours, expected = (transformed(getattr(of, operator), tensors) for of in (fastcross, fastcross.reference))
    torch.testing.assert_close(ours, expected)


def transformed(function, tensors):
    """What each of the private names is for: batches, tangents, observers."""
    batched = [torch.stack((t, -t)).requires_grad_() for t in tensors]
    y = torch.vmap(function)(*batched)
    y.square().sum().backward()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(tensors[0], tensors[0]), *tensors[1:])).tangent
    with torch.autograd.profiler.profile():
        observed = function(*tensors)
    traced = torch.jit.trace(function, tensors, check_trace=False)(*tensors)
    return y, [t.grad for t in batched], tangent, observed, traced


def test_what_the_compiler_calls_and_its_name():
    """The mark lets TorchDynamo call a function in place of tracing it, and there the compiler's name is known."""
    for backend in ("eager", "aot_eager", "inductor"):
        names = []

        @internals.called_while_compiling
        def look(names=names):
            names.append(internals.compiler_name())
            return True

        def function(x, look=look):
            return x + 1 if look() else x - 1

        torch.compiler.reset()
        assert torch.compile(function, backend=backend, fullgraph=True)(torch.zeros(1)).item() == 1
        assert names == [backend]
    assert internals.compiler_name() == ""
