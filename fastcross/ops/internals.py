"""Every private interface of PyTorch that the operators use, each with a fallback for when it is gone.

They answer four questions faster than a public interface could: may a kernel be called without PyTorch's operators in
between; must PyTorch's own operators do the work; may an autograd Function be applied without functorch's part of it;
are tensors like those of an earlier call? The fallback is always the cautious answer, which is right everywhere and
slower. All are looked up once, at import; tests/ops/test_internals.py fails where one of them is gone, or says
something else than it did. Without ``are_reduced_by_ddp`` an error is PyTorch's own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_PLAIN_TYPES = (Tensor, Parameter)  # a tuple: PyTorch 2.8 cannot trace a set
_MISSING = object()
WRAPS_GRADIENTS = torch.__version__ >= "2.13"  # compilers take gradients of a class of their own; not tried on older


def _cautious() -> bool:
    return True


def _find(path: str, fallback: Any) -> Any:
    """What stands at ``path`` under torch, or the fallback."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, _MISSING)
    return fallback if found is _MISSING else found


_transforms_are_active: Callable[[], bool] = _find("_C._are_functorch_transforms_active", _cautious)
_dispatch_modes: Callable[[], int] = _find("_C._len_torch_dispatch_stack", _cautious)
_is_tracing: Callable[[], bool] = _find("_C._is_tracing", _cautious)
_guards: Any = _find("_C._dynamo.guards.TensorGuards", None)
_forward_ad, _profiler = torch.autograd.forward_ad, torch.autograd.profiler
_has_level = _find("autograd.forward_ad._current_level", None) is not None
_has_profiler_flag = _find("autograd.profiler._is_profiler_enabled", None) is not None
_has_base_apply = _find("_C._FunctionBase.apply", None) is not None
_TRACED = "torch._subclasses."  # the modules of the subclasses in which PyTorch traces operators


def is_transformed() -> bool:
    """Whether a functorch transform (vmap, grad, ...) is at work or a level of forward-mode differentiation open."""
    return _transforms_are_active() or not _has_level or _forward_ad._current_level >= 0


def is_quiet() -> bool:
    """Whether nothing observes or transforms PyTorch's operators now, so that a kernel may be called in their place."""
    return not (
        torch.compiler.is_compiling()
        or _transforms_are_active()  # and the next two: is_transformed(), in line, for every call asks
        or not _has_level
        or _forward_ad._current_level >= 0
        or _dispatch_modes()
        or _is_tracing()
        or not _has_profiler_flag
        or _profiler._is_profiler_enabled
    )


def is_plain(t: Tensor | None) -> bool:
    """Whether its memory holds its values: no subclass, nothing that PyTorch resolves on the way to an operator."""
    if t is None:
        return True
    try:
        # Zeros that have no memory, and the meta device, have no address.
        return type(t) in _PLAIN_TYPES and not t.is_neg() and (t.data_ptr() != 0 or t.numel() == 0)
    except RuntimeError:  # no storage: functorch wrapped it
        return False


def are_alike(bias: Tensor | None, x0: Tensor, *others: Tensor) -> bool:
    """Whether a call is as usual: all is quiet, and the operands are plain, of one floating dtype, on one device.

    The same could be asked of each in turn, in twice the time.
    """
    if not is_quiet():  # first, for a compiler could not follow the rest
        return False
    try:
        dtype, device = x0.dtype, x0.device
        for t in (x0, *others) if bias is None else (x0, bias, *others):
            if (
                type(t) not in _PLAIN_TYPES
                or t.dtype is not dtype
                or t.device != device
                or t.is_neg()
                or t.data_ptr() == 0
            ):
                return False
        return dtype.is_floating_point
    except (AttributeError, RuntimeError):  # no tensor, or without storage
        return False


def resemblance(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """A function that says of as many other tensors whether each is like its counterpart here; None: nothing can say.

    Alike are tensors of the same class, dtype, device, layout, shape and strides that require gradients alike and that
    PyTorch dispatches alike, which a negative bit, zeros without memory, a wrapper, a mode, autocast or inference mode
    would change. Their values and what stands behind them (a storage that was freed, say) may differ.
    """
    try:
        guards = _guards(
            *tensors,
            dynamic_dims_sizes=[list(t.shape) for t in tensors],
            dynamic_dims_strides=[list(t.stride()) for t in tensors],
        )
        return guards.check
    except (AttributeError, RuntimeError, SystemError, TypeError):  # another interface, or none
        return None


def is_foreign(t: Tensor | None) -> bool:
    """Whether PyTorch's own operators have a rule for ``t`` that an opaque operator has not.

    That is so for what a transform wrapped, whether or not it still is at work, and for subclasses with rules of their
    own, such as DTensor; but not for the subclasses in which PyTorch traces operators.
    """
    if t is None:
        return False
    kind: Any = type(t)
    if kind in _PLAIN_TYPES:
        return not torch.compiler.is_compiling() and _has_no_storage(t)
    has_rules = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    has_function = kind.__torch_function__ is not Parameter.__torch_function__
    return (has_rules or has_function) and not kind.__module__.startswith(_TRACED)


def _has_no_storage(t: Tensor) -> bool:
    try:
        t.data_ptr()
    except RuntimeError:
        return True
    return False


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its part for functorch: for plain tensors, where all is quiet."""
    return super(torch.autograd.Function, function).apply if _has_base_apply else function.apply  # type: ignore[misc]


def may_call_kernels(args: tuple[Any, ...]) -> bool:
    """Whether a kernel may be called in the place of an operator with these arguments, lists of tensors among them."""
    lists = [each if isinstance(each, list) else (each,) for each in args]
    return is_quiet() and all(is_plain(t) for each in lists for t in each if isinstance(t, Tensor))


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply``, as directly as the arguments allow."""
    return (direct_apply(function) if may_call_kernels(args) else function.apply)(*args)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_observed(module: torch.nn.Module) -> bool:
    """Whether calling a module does more than its class's forward: hooks, its own or for all modules, or a patch."""
    everywhere = torch.nn.modules.module
    return any(
        getattr(module, name, True) or getattr(everywhere, f"_global{name}", True) for name in _HOOKS
    ) or "forward" in vars(module)


def called_while_compiling(function: Callable[[], bool]) -> Callable[[], bool]:
    """A function that TorchDynamo calls where it would trace it, as ``torch.compiler.assume_constant_result`` says.

    That would import the whole compiler. Without the mark the graph breaks here.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compiler_name() -> str:
    """The backend of torch.compile that is at work, "" where that is not to be found; called while compiling."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator  # PyTorch has imported it by now

        compiler: Any = InstructionTranslator.current_tx().output.compiler_fn
        return str(compiler._compiler_name)
    except (AttributeError, ImportError):
        return ""


def is_within_ddp() -> bool:
    return _active_ddp() is not None


def _active_ddp() -> Any:
    return getattr(getattr(torch.nn.parallel, "DistributedDataParallel", None), "_active_ddp_module", None)


def are_reduced_by_ddp(parameters: Sequence[Tensor]) -> bool:
    """Whether this runs within a DistributedDataParallel that adds up the gradients of any of the parameters."""
    wrapper = _active_ddp()
    if wrapper is None:
        return False
    reduced = {id(parameter) for parameter in getattr(wrapper, "_module_parameters", ())}
    return any(id(parameter) in reduced for parameter in parameters)
