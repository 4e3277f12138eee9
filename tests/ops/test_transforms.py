"""Every way in which PyTorch transforms a function, on the operators and on the reference: the same results."""

import copy
import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, stack_module_state, vjp, vmap

import fastcross
from fastcross import CrossNetwork, reference
from fastcross.accuracy import BY_NAME, RANK_ONE

BACKENDS = ("cpu", "auto")
pytestmark = pytest.mark.parametrize("operator", RANK_ONE)


def make(operator, batch=()):
    torch.manual_seed(0)
    return [
        torch.randn(*batch, *shape, dtype=torch.float64) * 0.4 for shape in BY_NAME[operator].shapes(B=4, d=5, L=3, C=2)
    ]


def compare(operator, transform, *tensors, backend):
    """transform(function)(*tensors), for the operator and for the reference."""
    ours = transform(lambda *t: getattr(fastcross, operator)(*t, backend=backend))(*tensors)
    expected = transform(getattr(reference, operator))(*tensors)
    torch.testing.assert_close(ours, expected)


def leaves(tensors):
    return [t.clone().requires_grad_() for t in tensors]


def every_mapping(operator):
    """Which operands have a batch dimension, for every choice but none."""
    count = len(BY_NAME[operator].names)
    return [tuple(bool(n >> i & 1) for i in range(count)) for n in range(1, 2**count)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_gradient_through_vmap(operator, backend, dim):
    """Of what is mapped over and of what is not, for each choice of them."""
    for mapped in every_mapping(operator):
        tensors = make(operator)
        for i, m in enumerate(mapped):
            if m:
                tensors[i] = torch.stack((tensors[i], 2 * tensors[i], -tensors[i]), dim)
        in_dims = tuple(dim if m else None for m in mapped)

        def gradients(of, tensors=tensors, in_dims=in_dims, **options):
            operands = leaves(tensors)
            y = vmap(lambda *t: getattr(of, operator)(*t, **options), in_dims)(*operands)
            y.square().sum().backward()
            return y.detach(), *(t.grad for t in operands)

        torch.testing.assert_close(gradients(fastcross, backend=backend), gradients(reference))


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_in_vmap(operator, backend):
    tensors = leaves(make(operator, (2, 3)))

    def gradients(of, **options):
        inner = vmap(lambda *t: getattr(of, operator)(*t, **options), in_dims=1, out_dims=1, randomness="different")
        y = vmap(inner, randomness="same")(*(t.movedim(1, 2) for t in tensors))
        return y, *torch.autograd.grad(y.square().sum(), tensors)

    torch.testing.assert_close(gradients(fastcross, backend=backend), gradients(reference))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_jacobians(operator, backend, transform):
    for n in range(len(BY_NAME[operator].names)):
        compare(operator, lambda f, n=n: transform(f, n), *make(operator), backend=backend)
        compare(operator, lambda f, n=n: vmap(transform(f, n)), *make(operator, (2,)), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hessians(operator, backend):
    def transform(function):
        return hessian(lambda *t: function(*t).square().sum(), argnums=(0, 1))

    compare(operator, transform, *make(operator), backend=backend)
    compare(operator, lambda f: vmap(transform(f)), *make(operator, (2,)), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_grad_and_vmap_in_either_order(operator, backend):
    everything = tuple(range(len(BY_NAME[operator].names)))
    tensors = make(operator, (2,))
    compare(operator, lambda f: vmap(grad(lambda *t: f(*t).square().sum(), everything)), *tensors, backend=backend)
    compare(operator, lambda f: grad(lambda *t: vmap(f)(*t).square().sum(), everything), *tensors, backend=backend)
    compare(operator, lambda f: vmap(grad(lambda *t: f(*t).sum()), chunk_size=1), *tensors, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_through_jacobians(operator, backend):
    tensors = make(operator)
    tangents = [torch.randn_like(t) for t in tensors]
    compare(operator, lambda f: lambda *t: jvp(f, t, tuple(tangents)), *tensors, backend=backend)
    compare(operator, lambda f: lambda *t: linearize(f, *t)[1](*tangents), *tensors, backend=backend)

    def forward_over_reverse(function):
        def pullback(*t):
            y, back = vjp(function, *t)
            return back(y)

        return lambda *t: jvp(pullback, t, tuple(tangents))

    compare(operator, forward_over_reverse, *tensors, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tangent_that_enters_with_the_gradient(operator, backend):
    """The forward pass knew of no tangents; the gradient that comes back carries one."""

    def transform(function):
        def result(*tensors):
            operands = leaves(tensors)
            y = function(*operands)
            with forward_ad.dual_level():
                dy = forward_ad.make_dual(torch.ones_like(y), y.detach())
                grads = torch.autograd.grad(y, operands, dy)
                return [forward_ad.unpack_dual(g).tangent for g in grads]

        return result

    compare(operator, transform, *make(operator), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("create_graph", [False, True])
def test_batched_gradients(operator, backend, create_graph):
    def transform(function):
        def result(*tensors):
            operands = leaves(tensors)
            y = function(*operands)
            dy = torch.linspace(-1, 1, 3 * y.numel(), dtype=y.dtype).view(3, *y.shape)
            return torch.autograd.grad(y, operands, dy, is_grads_batched=True, create_graph=create_graph)

        return result

    compare(operator, transform, *make(operator), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorised_jacobians(operator, backend, strategy):
    def jacobian(function):
        return lambda *t: torch.autograd.functional.jacobian(function, t, vectorize=True, strategy=strategy)

    def second(function):
        options = {"vectorize": True, "outer_jacobian_strategy": strategy}
        return lambda *t: torch.autograd.functional.hessian(lambda *u: function(*u).square().sum(), t, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some of PyTorch's own operators are slow in it
        compare(operator, jacobian, *make(operator), backend=backend)
        compare(operator, second, *make(operator), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_transforms(operator, backend):
    torch._dynamo.reset()
    tensors = make(operator, (2,))
    everything = tuple(range(len(tensors)))

    def compiled(function):
        return torch.compile(function, backend="aot_eager", fullgraph=True)

    compare(operator, lambda f: compiled(vmap(f)), *tensors, backend=backend)
    compare(operator, lambda f: compiled(vmap(grad(lambda *t: f(*t).sum(), everything))), *tensors, backend=backend)
    compare(operator, lambda f: vmap(torch.compile(f, backend="aot_eager")), *tensors, backend=backend)
    compare(operator, lambda f: compiled(lambda *t: jvp(f, t, t)), *make(operator), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_ensemble(operator, backend):
    """Stacked parameters of several networks, one input: what torch.func.stack_module_state is for."""
    torch.manual_seed(0)
    networks = [CrossNetwork(5, 3, dtype=torch.float64, backend=backend) for _ in range(4)]
    x0, head = torch.randn(6, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)

    def call(network, x0):
        calls = {
            "cross_layer": lambda: fastcross.cross_layer(x0, x0, network.weight[0], network.bias[0], backend=backend),
            "cross_network": lambda: network(x0),
            "cross_logits": lambda: network.logits(x0, head),
        }
        return calls[operator]()

    class Wrapped(torch.nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, x0):
            return call(self.network, x0)

    parameters, buffers = stack_module_state([Wrapped(network) for network in networks])
    base = copy.deepcopy(Wrapped(networks[0])).to("meta")
    outputs = vmap(lambda p, b: functional_call(base, (p, b), (x0,)))(parameters, buffers)
    outputs.square().sum().backward()
    for i, network in enumerate(networks):
        y = call(network, x0)
        torch.testing.assert_close(outputs[i], y)
        y.square().sum().backward()
        torch.testing.assert_close(parameters["network.weight"].grad[i], network.weight.grad)
        if "b" in BY_NAME[operator].names:
            torch.testing.assert_close(parameters["network.bias"].grad[i], network.bias.grad)
