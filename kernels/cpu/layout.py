"""Kernels as they are called: with tensors and numbers by the names of their declaration."""

import functools
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fastcross.kernels.cpu.declaration import Declaration
from fastcross.kernels.cpu.door import describe
from fastcross.kernels.cpu.fields import REAL, Operand
from fastcross.kernels.cpu.launcher import Launch, launcher
from fastcross.kernels.cpu.plan import Plan
from fastcross.kernels.cpu.threads import Task
from fastcross.kernels.rows import accumulation_dtype

PLANS = 256  # that are kept, for each layout


class Layout(Declaration):
    """A declaration, and the plans that were made for its calls."""

    def __init__(self, name: str, **declared: Any) -> None:
        super().__init__(name, **declared)
        self._operands, self._sizes = _getter(tuple(self.operands)), _getter(self.sizes)
        self._scalars, self._count = _getter(self.scalars), len(self.operands) + len(self.sizes) + len(self.scalars)
        self._plans: dict[Any, Plan] = {}

    def run(self, **values: Any) -> list[Any]:
        """Runs the kernels on a tensor (or None) for each operand, a number for each size and scalar, by name.

        Operands of several dtypes are cast to the one that is summed in, and made contiguous where they have to be: for
        kernels that write to none of them. Returns the results.
        """
        plan, tensors, scalars = self._find(None, values)
        return plan.run(tensors, scalars)

    def launcher(self, operands: str, results: str, **values: Any) -> Launch | None:
        """What runs the kernels on operands like these, given and returned in the order of these names.

        None where operands would have to be cast or made contiguous.
        """
        plan, tensors, _ = self._find(None, values)
        if any(t is not other for t, other in zip(tensors, self._operands(values), strict=True)):
            return None
        return launcher(plan, operands.split(), results.split())

    def task(self, dtype: torch.dtype | None, **values: Any) -> Task:
        """The task of a call, for a kernel that the caller runs; without a dtype, operands are cast as in ``run``."""
        plan, tensors, scalars = self._find(dtype, values)
        return plan.task(tensors, scalars)

    def _find(self, dtype: torch.dtype | None, values: Mapping[str, Any]) -> tuple[Plan, tuple[Any, ...], Any]:
        try:
            tensors, sizes, scalars = self._operands(values), self._sizes(values), self._scalars(values)
        except KeyError as missing:
            raise TypeError(f"{self.name} needs {missing}; got {sorted(values)}") from None
        if len(values) != self._count:
            raise TypeError(f"{self.name} needs {self._count} operands, sizes and scalars; got {sorted(values)}")
        key: Any
        try:
            # A plan was made for tensors that were checked; tensors of the same descriptions would pass, too.
            key = (dtype, torch.get_num_threads(), sizes, *map(describe, tensors))
            plan = self._plans.get(key)
        except (AttributeError, RuntimeError):  # what has no strides, and is refused
            key, plan = None, None
        if plan is None:
            plan, tensors = self._plan(dtype, sizes, tensors, key)
        return plan, tensors, scalars

    def _plan(self, dtype: torch.dtype | None, sizes: tuple[int, ...], tensors: Any, key: Any) -> tuple[Plan, Any]:
        before = tensors
        if dtype is None:
            dtype = accumulation_dtype(*tensors)
            tensors = tuple(map(functools.partial(_adapt, dtype=dtype), self.operands.values(), tensors))
        plan = Plan(self, dtype, torch.get_num_threads(), dict(zip(self.sizes, sizes, strict=True)), tensors)
        if key is not None and all(t is other for t, other in zip(tensors, before, strict=True)):
            if len(self._plans) >= PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan, tensors

    def forget(self) -> None:
        """Makes plans anew."""
        self._plans.clear()


def _adapt(operand: Operand, t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if t is None or operand.kind != REAL:
        return t
    # By default a cast chooses strides, where rows overlap or are expanded, and the kernels need unit column stride.
    t = t if t.dtype == dtype else t.to(dtype, memory_format=torch.contiguous_format)
    return t if operand.are_rows else t.contiguous()


def _getter(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return itemgetter(*names)
    return lambda values: tuple(values[name] for name in names)
