"""Calls that are remembered: for operands like those of an earlier call there is nothing else to ask or to choose.

A call that goes to a backend's kernels directly is kept with what tells whether other tensors are like its operands
(:func:`internals.resemblance`), and runs as a function of such operands alone. Where a gradient is needed that is an
autograd Function of its own, made for this call: what it knows need not be given to PyTorch and back. Making it takes a
millisecond, so a call is kept when it comes a second time, in the place of another when it comes often.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, get_num_threads, is_grad_enabled

from fastcross.kernels.rows import as_rows
from fastcross.ops import backends, internals
from fastcross.ops.internals import is_quiet

KEPT = 16  # calls of an operator that are remembered, for each of its options; and the last ones that were not
OFTEN = 8  # times among these

Call = Callable[..., Any]


class Calls:
    """The usual calls of an operator.

    A backend whose kernels can be launched without another look at their operands has functions ``plan_NAME_fwd`` and
    ``plan_NAME_bwd`` of the launchers' arguments, which return how, or None: as a function of the operands, which gives
    the results as a tuple; forward the output, then what is kept.

    Args:
        operator: its name.
        function: its autograd Function.
        vjp: (gradient of the output, what was saved, which gradients are needed, backend, whether the kernels may be
            called directly) -> gradients, for calls that are not usual.
    """

    def __init__(self, operator: str, function: type[torch.autograd.Function], vjp: Call) -> None:
        self.operator, self.function, self.vjp = operator, function, vjp
        self._kept: dict[Any, list[tuple[Callable[..., bool], Call]]] = {}
        self._missed: list[Any] = []  # descriptions of calls that were not remembered, the last one first

    def find(self, backend: str, given: tuple[Tensor, ...]) -> Call | None:
        """The call for such operands, those that are None left out, and this choice of a backend, if there was one."""
        if is_quiet():
            key = (backend, len(given), is_grad_enabled(), get_num_threads())
            try:
                for are_alike, call in self._kept.get(key, ()):
                    if are_alike(*given):
                        return call
            except TypeError:  # no name of a backend
                return None
        return None

    def keep(
        self, backend: str, given: tuple[Tensor, ...], arguments: tuple, chosen: str, differentiates: bool
    ) -> Call | None:
        """Remembers a call whose operands were checked, if there was one like it of late, and returns it.

        None where there was not, or where the backend has no plan for it. ``arguments`` are the forward launcher's.
        """
        plan = getattr(backends.kernels(self.operator, chosen), f"plan_{self.operator}_fwd", None)
        key = (backend, len(given), is_grad_enabled(), get_num_threads())
        if plan is None or _has_twice(given):
            return None
        description = (key, differentiates, *(t.shape for t in given))
        self._missed = [description, *self._missed[:KEPT]]
        if self._missed.count(description) < (OFTEN if len(self._kept.get(key, ())) == KEPT else 2):
            return None
        are_alike = internals.resemblance(given)
        if are_alike is None or not are_alike(*given) or (launch := plan(*arguments)) is None:
            return None
        call = self._differentiable(launch, chosen) if differentiates else lambda *operands: launch(*operands)[0]
        self._kept[key] = [(are_alike, call), *self._kept.get(key, ())][:KEPT]
        return call

    def _differentiable(self, launch: Call, chosen: str) -> Call:
        """The launch as an autograd Function, whose backward pass remembers its launches in turn."""
        plan, vjp = getattr(backends.kernels(self.operator, chosen), f"plan_{self.operator}_bwd"), self.vjp
        # For needs and a number of threads: of what was saved all but None, whether that and dy are alike, the launch.
        launches: dict[Any, list[tuple[Callable[[Any], Any], Callable[..., bool], Call]]] = {}

        def forward(ctx: Any, *operands: Tensor | None) -> Tensor:
            made = launch(*operands)
            ctx.save_for_backward(*operands, *made[1:])
            return made[0]

        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            saved, needs = ctx.saved_tensors, ctx.needs_input_grad
            if is_quiet() and not is_grad_enabled():
                key = (needs, get_num_threads())
                for given, are_alike, call in launches.get(key, ()):
                    if are_alike(dy, *given(saved)):
                        return call(dy, *saved)
                if (found := remember(key, dy, saved)) is not None:
                    return found(dy, *saved)
            return vjp(dy, saved, needs, chosen, True)

        def remember(key: Any, dy: Tensor, saved: tuple[Tensor | None, ...]) -> Call | None:
            given = itemgetter(*(i for i, t in enumerate(saved) if t is not None))
            tensors, before = (dy, *given(saved)), launches.get(key, [])
            if len(before) == KEPT or _has_twice(tensors) or not all(map(_is_for_kernels, tensors)):
                return None
            are_alike = internals.resemblance(tensors)
            if are_alike is None or not are_alike(*tensors) or (call := plan(dy, *saved, key[0])) is None:
                return None
            launches[key] = [(given, are_alike, call), *before]
            return call

        name, methods = self.function.__name__, {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return internals.direct_apply(type(name, (self.function,), methods))


def _has_twice(tensors: tuple[Tensor, ...]) -> bool:
    """Whether one of the tensors comes again among them: nothing is then found to be like them."""
    return len(set(map(id, tensors))) < len(tensors)


def _is_for_kernels(t: Tensor) -> bool:
    """Whether a tensor that was saved, or is a gradient, may be given to a plan as it is."""
    return internals.is_plain(t) and (t.dim() != 2 or as_rows(t) is t)
