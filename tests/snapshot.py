"""All that a model is, bit for bit and object by object: to show that what was declined was not touched."""

import random
import re

import numpy as np
import pytest
import torch
from torch import nn

import fastcross


def tensor_state(tensor):
    """Which object, how often it was written to, its bytes, and the same of its gradient."""
    if tensor is None:
        return None
    plain = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    readable = type(tensor) is not nn.parameter.UninitializedParameter and plain.device.type == "cpu"
    storage = plain.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if readable else None
    state = (id(tensor), type(tensor), tensor._version, tensor.dtype, tensor.device, tensor.requires_grad, storage)
    hooks = (id(tensor._backward_hooks), len(tensor._backward_hooks or ()))
    return *state, hooks, tensor_state(tensor.grad) if tensor.is_leaf else id(tensor.grad_fn)


def _value_state(value):
    if isinstance(value, torch.Tensor):
        return tensor_state(value)
    if isinstance(value, dict):
        return id(value), tuple((key, _value_state(each)) for key, each in value.items())
    if isinstance(value, list | set):
        return id(value), tuple(id(each) for each in value)
    return id(value)


def module_state(module):
    """Everything in the module's own dictionary: parameters, buffers, parts, hooks, the training flag, attributes.

    A compiled TorchScript module makes its views anew at each access, and is known by its parameters alone.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return [value.clone().numpy().tobytes() for value in module.state_dict().values()], module.training
    return {name: _value_state(value) for name, value in vars(module).items()}


def snapshot(model, classes=True):
    """``classes=False`` for what a swap may change: the classes, and nothing but these."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False)}
    return {
        "modules": {name: (id(module), module_state(module)) for name, module in modules.items()},
        "classes": {name: type(module) for name, module in modules.items()} if classes else None,
        "random": (torch.random.get_rng_state().numpy().tobytes(), random.getstate(), _numpy_state()),
        "modes": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()),
    }


def _numpy_state():
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 (the global state is what may not change)
    return name, keys.tobytes(), *rest


def assert_left(model, reason):
    before = snapshot(model)
    report = fastcross.swap(model)
    assert report.swapped == []
    assert re.search(reason, report.left[0].note), report.left[0].note
    assert snapshot(model) == before
    with pytest.raises(TypeError, match="fastcross knows"):
        fastcross.CrossNetwork.from_module(next(m for m in model.modules() if not isinstance(m, nn.Sequential)))
    after = snapshot(model)
    assert all(after[what] == before[what] for what in ("modules", "classes", "modes"))
