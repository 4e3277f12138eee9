"""swap of the packages' own networks, changed at random: left bit for bit, or swapped with the same numbers."""

import importlib.util

import peer_modules
import torch
from fuzz import draw
from fuzz.swap_changes import CHANGES
from snapshot import snapshot
from torch import nn

import fastcross
from fastcross.interop.swap import Swapped
from fastcross.ops import multiplicative

multiplicative.SMALL = 0  # few rows take the operators, too
PACKAGES = {"deepctr": "deepctr_torch"}  # others by the builder's first word
BUILDERS = [
    build
    for build in peer_modules.BUILDERS
    if build in peer_modules.STAND_INS
    or importlib.util.find_spec(PACKAGES.get(name := build.__name__.partition("_")[0], name))
]


def case(number, folder):
    rng = draw.start(number)
    build = rng.choice(BUILDERS)
    d, layers = 2 * rng.randint(1, 12), rng.randint(1, 4)
    changes = rng.sample(CHANGES, rng.choice((0, 1, 1, 2, 3)))
    state, models = rng.getstate(), []
    for _ in range(3):  # the same three times: to swap one, and compare it with the others by the one rule
        rng.setstate(state)
        torch.manual_seed(number % 2**63)
        network = peer_modules.randomise(build(d, layers))
        for each in changes:
            each(rng, network)
        models.append(network)
    network, twin, exact = models
    exact.double()
    model = (
        nn.ModuleDict({"a": network, "b": nn.Sequential(network, nn.Linear(d, 1))}) if rng.random() < 0.3 else network
    )
    classes, before = snapshot(model), snapshot(model, classes=False)
    report = fastcross.swap(model)
    done = "+".join(each.__name__ for each in changes) or "unchanged"
    try:
        if not report.swapped:
            if report.left == [] or snapshot(model) != classes:
                raise AssertionError(f"left, but not as it was: {report}")
            return f"left: {' '.join(report.left[0].note.split()[:5])}"
        if snapshot(model, classes=False) != before:
            raise AssertionError(f"swapped, but more than the class was changed: {report}")
        compare(rng, network, twin, exact, d)
        fastcross.swap(model, undo=True)
        if any(isinstance(module, Swapped) for module in model.modules()):
            raise AssertionError("not undone")
    except Exception as error:
        raise AssertionError(f"{build.__name__} {done}: {error}") from error
    return f"swapped {build.__name__}"


def compare(rng, network, twin, exact, d):
    """Outputs, gradients and errors are those of the package's own code."""
    dtype = next(iter(peer_modules.cross_parameters(twin).values())).dtype
    lead = rng.choice(((rng.randint(0, 9),), (rng.randint(0, 9),), (2, 3)))
    x = torch.randn(*lead, rng.choice((d, d, d, d + 1)), dtype=torch.float64).to(
        dtype if rng.random() < 0.9 else torch.float64
    )
    results = []
    for each in (network, twin, exact):
        leaf = (x.double() if each is exact else x.clone()).detach().requires_grad_()
        torch.manual_seed(0)
        try:
            y = peer_modules.cross(each)(leaf)
            y.float().square().sum().backward()
            grads = {name: p.grad for name, p in each.named_parameters(remove_duplicate=False)}
            results.append({"y": y.detach(), "dx": leaf.grad, **grads})
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    ours, theirs, in_float64 = results
    if isinstance(theirs, str) or isinstance(ours, str):
        if ours != theirs:
            raise AssertionError(f"ours: {str(ours)[:300]}; the package's: {str(theirs)[:300]}")
        return
    if isinstance(in_float64, str):  # a change that only the package's own dtype can do
        in_float64 = theirs
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-4}.get(dtype, 0.1)
    for name, expected in theirs.items():
        found = ours[name]
        if (found is None) != (expected is None):
            raise AssertionError(f"{name}: {found is None}, and should be {expected is None}")
        if expected is None or not expected.numel():
            continue
        if found.dtype != expected.dtype or found.shape != expected.shape:
            raise AssertionError(f"{name}: {found.dtype} {tuple(found.shape)}, and should be like {expected.dtype}")
        scale = expected.double().abs().max().clamp(min=1)
        true = in_float64[name].double()
        error, allowed = (found.double() - true).abs().max(), 2 * (expected.double() - true).abs().max()
        if scale.isfinite() and not error <= allowed + tolerance * scale:
            raise AssertionError(f"{name}: off by {error:.3g} of {scale:.3g}, the package's own by {allowed / 2:.3g}")
