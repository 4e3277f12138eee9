"""The side doors of autograd, of modules, threads and the compiler."""

import contextlib
import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import torch
from fuzz.doors import compare, door, grads, leaves
from torch import func
from torch.utils import checkpoint

import fastcross
from fastcross import reference


@door
def double_backward(rng, f, given):
    given = leaves(given, rng)
    needed = [t for t in given if t.requires_grad]
    y = f(*given)
    first = torch.autograd.grad((y * y).sum(), needed, create_graph=True)
    sum(g.square().sum() for g in first).backward()
    return [[g.detach() for g in first], grads(given)]


@door
def batched_gradients(rng, f, given):
    given = leaves(given, rng)
    y = f(*given)
    vectors = torch.eye(y.numel(), dtype=y.dtype).view(y.numel(), *y.shape)
    return torch.autograd.grad(y, [t for t in given if t.requires_grad], vectors, is_grads_batched=True)


@door
def vectorised_jacobian(rng, f, given):
    return torch.autograd.functional.jacobian(
        f, tuple(given), vectorize=True, strategy=rng.choice(("reverse-mode", "forward-mode"))
    )


@door
def checkpointed(rng, f, given):
    given = leaves(given, rng)
    with contextlib.ExitStack() as stack:
        if rng.random() < 0.3:
            stack.enter_context(torch.autograd.graph.save_on_cpu())
        y = checkpoint.checkpoint(f, *given, use_reentrant=rng.random() < 0.3)
        y.square().sum().backward()
    return [y.detach(), grads(given)]


@door
def saved_tensor_hooks(rng, f, given):
    given = leaves(given, rng)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.numpy().copy() if not t.requires_grad else t.detach().clone(), torch.as_tensor
    ):
        y = f(*given)
    y.square().sum().backward()
    return grads(given)


@door
def hooks(rng, f, given):
    given, seen = leaves(given, rng), []
    y = f(*given)
    y.register_hook(lambda g: seen.append(g.clone()) or 2 * g)
    for t in given:
        if t.requires_grad:
            t.register_hook(lambda g: 3 * g)
    y.sum().backward()
    return [seen, grads(given)]


@door
def changed_in_place(rng, f, given):
    """An operand written to between forward and backward is an error, as it is for PyTorch's own operators."""
    given = [t.requires_grad_() for t in given]
    copies = [t * 1 for t in given]
    y = f(*copies)
    with torch.no_grad():
        copies[0].add_(1)
    try:
        y.square().sum().backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return grads(given)


@door
def output_changed_in_place(rng, f, given):
    given = leaves(given, rng)
    y = f(*given)
    y.mul_(2)
    y.sum().backward()
    return [y.detach(), grads(given)]


@door
def twice_backward(rng, f, given):
    given = leaves(given, rng)
    y = f(*given)
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    return grads(given)


@door
def views_and_bases(rng, f, given):
    """Parts of one tensor as operands, and a gradient that reaches only a part of the output."""
    given = leaves(given, rng)
    y = f(*(t.clone()[:] for t in given))
    y[..., rng.randrange(y.shape[-1])].sum().backward()
    return grads(given)


@door
def anomaly_and_profiler(rng, f, given):
    given = leaves(given, rng)
    context = torch.autograd.detect_anomaly(check_nan=True) if rng.random() < 0.5 else torch.autograd.profiler.profile()
    with context:
        y = f(*given)
        y.square().sum().backward()
    return grads(given)


@door
def threads(rng, f, given):
    """Eight at once answer like one."""

    def step(_):
        tensors = [t.clone().requires_grad_() for t in given]
        y = f(*tensors)
        y.square().sum().backward()
        return [y.detach(), grads(tensors)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(step, range(16)))
    for answer in answers[1:]:
        compare("threads", answer, answers[0])
    return answers[0]


@door
def on_meta(rng, f, given):
    try:
        y = f(*(t.to("meta").requires_grad_() for t in given))
    except ValueError as error:
        if 'backend "cpu" runs' not in str(error):  # which was asked for by name
            raise
        y = f(*given).to("meta")
    return [list(y.shape), str(y.dtype), y.device.type]


@door
def modules(rng, f, given):
    """A module's copies and pickles, and functional_call with parameters from outside."""
    d, layers = given[0].shape[-1], rng.randint(1, 3)
    network = fastcross.CrossNetwork(d, layers, dtype=torch.float64)
    network.bias.data.normal_()
    x = given[0].requires_grad_()
    outside = {"weight": torch.randn(layers, d, dtype=torch.float64, requires_grad=True)}
    y = func.functional_call(network, outside, (x,))
    expected = reference.cross_network(x, outside["weight"], network.bias)
    for each in (y, expected):
        each.square().sum().backward(inputs=[x, outside["weight"]])
    compare("functional_call", [x.grad, outside["weight"].grad], [2 * t.grad / 2 for t in (x, outside["weight"])])
    compare("functional_call", y, expected)
    for clone in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        compare("copies", clone(x), network(x))
    return True


@door
def compiled(rng, f, given):
    given = leaves(given, rng)
    torch.compiler.reset()
    y = torch.compile(f, fullgraph=True)(*given)
    y.square().sum().backward()
    return [y.detach(), grads(given)]
