"""Other versions of a package's code, and classes that resist: bit for bit as they were, or the same numbers."""

import pytest
import torch
from peer_modules import deepctr, torchfm, torchrec, with_gradients
from snapshot import assert_left, snapshot
from torch import nn

import fastcross


def other_version(**members):
    """torchfm's cross network under its own path, with other code."""
    network = with_gradients(torchfm(8, 2))
    base = type(network)
    network.__class__ = type(base.__name__, (base,), {"__module__": base.__module__, **members})
    return network, base


def test_code_that_differs_in_training_alone():
    network, base = other_version(
        forward=lambda self, x: nn.functional.dropout(base.forward(self, x), 0.5, self.training)
    )
    assert_left(network.eval(), "does not compute")


def test_code_that_changes_the_module_is_not_run_on_it():
    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        self.mean.mul_(0.9)
        return base.forward(self, x)

    network, base = other_version(forward=forward)
    network.calls, network.seen = 0, []
    network.register_buffer("mean", torch.ones(8))
    assert_left(network, "own code failed.*it uses mean")


@pytest.mark.parametrize("attribute", ["scale", "enabled", "mode"])
def test_code_that_asks_another_object(attribute):
    """Compared, tested or called, it decides what is computed, and is not there to ask."""

    def forward(self, x):
        y = base.forward(self, x)
        if self.attribute == "scale" and self.scale == 2:
            return 2 * y
        if self.attribute == "enabled" and self.enabled:
            return 2 * y
        return 2 * y if self.attribute == "mode" and self.mode() else y

    network, base = other_version(forward=forward)
    network.attribute = attribute
    network.scale, network.enabled, network.mode = torch.tensor(2), object(), dict
    assert_left(network, f"it uses {attribute}")


def test_an_error_on_the_way_changes_nothing(monkeypatch):
    """Asked about the third module an interrupt arrives: the first two are as they were."""
    model = nn.Sequential(torchfm(8, 2), deepctr(8, 2), torchrec(8, 2))
    recognise, calls = fastcross.swap.__globals__["recognise"], []

    def interrupted(module):
        calls.append(module)
        if module is model[2]:
            raise KeyboardInterrupt
        return recognise(module)

    monkeypatch.setitem(fastcross.swap.__globals__, "recognise", interrupted)
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        fastcross.swap(model)
    assert calls[-1] is model[2]
    assert snapshot(model) == before


def _refuses_subclasses(base):
    def refuse(cls, **kwargs):
        raise TypeError("no more subclasses")

    mine = type("Mine", (base,), {})
    mine.__init_subclass__ = classmethod(refuse)
    return mine


def test_a_class_that_cannot_be_extended():
    model = nn.Sequential(deepctr(8, 2), torchfm(8, 2))
    model[1].__class__ = _refuses_subclasses(type(model[1]))
    before = snapshot(model[1])
    report = fastcross.swap(model)
    assert [entry.name for entry in report.swapped] == ["0"]
    assert "cannot be changed: TypeError: no more subclasses" in report.left[0].note
    assert snapshot(model[1]) == before


def test_a_method_with_another_signature():
    network, base = other_version(forward=lambda self, *inputs, scale=1.0: scale * base.forward(self, *inputs))
    x = torch.randn(3, 8)
    expected = network(x), network(x, scale=2.0)
    assert fastcross.swap(network).swapped
    torch.testing.assert_close(network(x), expected[0])
    assert torch.equal(network(x, scale=2.0), expected[1])
