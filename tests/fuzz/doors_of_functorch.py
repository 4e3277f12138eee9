"""The side doors of torch.func and of forward mode."""

import torch
from fuzz.doors import door, grads, leaves
from torch import func
from torch.autograd import forward_ad


def _stacked(rng, given):
    """in_dims for vmap, and operands with that dimension added."""
    dims = [rng.choice((None, 0, t.dim())) for t in given]
    if all(dim is None for dim in dims):
        dims[0] = 0
    size = rng.randint(1, 3)
    stack = [
        t if dim is None else torch.stack([t * (1 + 0.1 * i) for i in range(size)], dim)
        for t, dim in zip(given, dims, strict=True)
    ]
    return tuple(dims), stack


@door
def vmap(rng, f, given):
    dims, stack = _stacked(rng, given)
    return func.vmap(f, dims, chunk_size=rng.choice((None, None, 1, 2)))(*stack)


@door
def backward_through_vmap(rng, f, given):
    """As ensembles are trained: vmap inside, autograd outside."""
    dims, stack = _stacked(rng, given)
    stack = leaves(stack, rng)
    y = func.vmap(f, dims)(*stack)
    (y * y).sum().backward()
    return [y.detach(), grads(stack)]


@door
def vmap_of_grad(rng, f, given):
    dims, stack = _stacked(rng, given)
    argnums = tuple(rng.sample(range(len(given)), rng.randint(1, len(given))))
    return func.vmap(func.grad(lambda *t: f(*t).square().sum(), argnums), dims)(*stack)


@door
def jacrev(rng, f, given):
    return func.jacrev(f, rng.randrange(len(given)), chunk_size=rng.choice((None, 1)))(*given)


@door
def jacfwd(rng, f, given):
    return func.jacfwd(f, rng.randrange(len(given)))(*given)


@door
def hessian(rng, f, given):
    return func.hessian(lambda *t: f(*t).square().sum(), rng.randrange(len(given)))(*given)


@door
def reverse_over_reverse(rng, f, given):
    i = rng.randrange(len(given))
    return func.jacrev(func.grad(lambda *t: f(*t).square().sum(), i), i)(*given)


@door
def jvp_and_vjp(rng, f, given):
    y, dy = func.jvp(f, tuple(given), tuple(torch.ones_like(t) for t in given))
    return [y, dy, func.vjp(f, *given)[1](torch.ones_like(y))]


@door
def dual_numbers(rng, f, given):
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, torch.sin(t)) if rng.random() < 0.7 else t for t in given]
        y, dy = forward_ad.unpack_dual(f(*duals))
    return [y, torch.zeros_like(y) if dy is None else dy]
