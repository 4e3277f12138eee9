"""DCN goes through its submodules: hooks fire, parametrisations hold, and any of them can be another."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from fastcross import DCN, reference
from fastcross.layers.cross import CrossNetwork

PARTS = ("embedding", "cross", "deep", "logits")


def make_dcn(**options):
    torch.manual_seed(0)
    options = {"cross_layers": 3, "deep_layers": (16, 8), "batch_norm": False, **options}
    model = DCN([50, 7], 4, 5, **options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def make_batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 4, generator=generator), torch.randint(0, 7, (32, 2), generator=generator)


OPTIONS = [{}, {"deep_layers": ()}, {"num_outputs": 3}, {"structure": "stacked"}, {"logits_bias": False}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward_hooks_see_every_part(options):
    model, seen = make_dcn(**options), {}
    expected = model(*make_batch())
    for name in PARTS:
        getattr(model, name).register_forward_hook(
            lambda module, inputs, output, name=name: seen.update({name: (inputs, output)})
        )
    torch.testing.assert_close(model(*make_batch()), expected, rtol=1e-4, atol=1e-5)
    assert set(seen) == set(PARTS)
    x0 = seen["embedding"][1]
    assert torch.equal(seen["cross"][0][0], x0)
    torch.testing.assert_close(
        seen["cross"][1], reference.cross_network(x0, model.cross.weight, model.cross.bias), rtol=1e-4, atol=1e-4
    )
    z = seen["logits"][1]
    torch.testing.assert_close(z if model.config.num_outputs > 1 else z.squeeze(1), expected, rtol=1e-4, atol=1e-5)
    if not options:
        assert torch.equal(seen["logits"][0][0], torch.cat((seen["cross"][1], seen["deep"][1]), 1))


@pytest.mark.parametrize("name", ["cross", "logits"])
@pytest.mark.parametrize(
    "register", ["register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_other_hooks_fire_and_may_be_taken_off(name, register):
    model, calls = make_dcn(), []
    expected = model(*make_batch())
    handle = getattr(getattr(model, name), register)(lambda *args: calls.append(args))
    model(*make_batch()).sum().backward()
    assert len(calls) == 1
    handle.remove()
    assert torch.equal(model(*make_batch()), expected)
    assert len(calls) == 1


def test_a_hook_may_change_what_the_cross_network_gives():
    model = make_dcn()
    model.cross.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    dense, categorical = make_batch()
    h = model.deep(model.embedding(dense, categorical))
    expected = h @ model.logits.weight[:, -8:].T + model.logits.bias
    torch.testing.assert_close(model(dense, categorical), expected.squeeze(1))


def test_hooks_on_all_modules_see_the_cross_network():
    model, seen = make_dcn(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        model(*make_batch())
    finally:
        handle.remove()
    assert CrossNetwork in seen


def test_a_patched_forward_is_called():
    model = make_dcn()
    calls, forward = [], model.cross.forward
    model.cross.forward = lambda x0: calls.append(1) or forward(x0)
    model(*make_batch())
    assert calls == [1]


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize(("part", "name"), [("cross", "weight"), ("cross", "bias"), ("logits", "weight")])
def test_parametrisations_hold(part, name):
    model, twin = make_dcn(), make_dcn()
    parametrize.register_parametrization(getattr(model, part), name, Twice())
    with torch.no_grad():
        getattr(getattr(twin, part), name).mul_(2)
    torch.testing.assert_close(model(*make_batch()), twin(*make_batch()), rtol=1e-4, atol=1e-5)
    parametrizations.weight_norm(model.deep[0])
    model(*make_batch()).sum().backward()
    assert model.deep[0].parametrizations.weight.original0.grad is not None
    assert len(list(model.weights())) == 4


class Own(nn.Module):
    """A cross layer of a user's own: x0 + x0² w."""

    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.full((d,), 0.1))

    def forward(self, x0):
        return x0 + x0 * x0 * self.weight


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_any_module_may_be_the_cross_network(options):
    model = make_dcn(l2=0.5, **options)
    model.cross = Own(model.embedding.out_features)
    dense, categorical = make_batch()
    x0 = model.embedding(dense, categorical)
    x = x0 + 0.1 * x0 * x0
    h = model.deep(x if options.get("structure") == "stacked" else x0)
    read = (
        h if options.get("structure") == "stacked" else x if options.get("deep_layers") == () else torch.cat((x, h), 1)
    )
    z, expected = model(dense, categorical), model.logits(read)
    torch.testing.assert_close(z, expected if model.config.num_outputs > 1 else expected.squeeze(1))
    model.loss(z, torch.ones(32)).backward()
    assert model.cross.weight.grad is not None
    assert any(weight is model.cross.weight for weight in model.weights())


def test_any_module_may_give_the_logits():
    model = make_dcn()
    expected = model(*make_batch())
    model.logits = nn.Sequential(model.logits)
    torch.testing.assert_close(model(*make_batch()), expected, rtol=1e-4, atol=1e-5)
