"""What the side doors share: their list, their operands, and the comparison of two results."""

import torch

# Both sides run in float64: they differ by a few roundings of the largest value that occurs.
TOLERANCE = 1e-10
DOORS = {}


def door(function):
    """A way to use an operator: takes a generator, a function and its operands, returns what came out of it."""
    DOORS[function.__name__] = function
    return function


def compare(name, found, expected):
    found, expected = (torch.utils._pytree.tree_leaves(each) for each in (found, expected))
    if len(found) != len(expected):
        raise AssertionError(f"{name}: {len(found)} results, and should be {len(expected)}")
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(b, torch.Tensor) or not isinstance(a, torch.Tensor):
            if a != b:
                raise AssertionError(f"{name}: result {i} is {a!r}, and should be {b!r}")
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            raise AssertionError(f"{name}: result {i} is {a.dtype} {tuple(a.shape)}, and should be {tuple(b.shape)}")
        if b.numel() and not (a - b).abs().max() <= TOLERANCE * max(1.0, b.abs().max().item()):
            raise AssertionError(f"{name}: result {i} is off by {(a - b).abs().max():.3g} of {b.abs().max():.3g}")


def leaves(tensors, rng):
    """Some of them differentiated; which ones is drawn, at least one."""
    needed = [rng.random() < 0.7 for _ in tensors]
    needed[rng.randrange(len(needed))] = True
    return [t.requires_grad_(need) for t, need in zip(tensors, needed, strict=True)]


def grads(tensors):
    return [t.grad for t in tensors]
