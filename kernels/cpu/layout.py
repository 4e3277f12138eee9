"""What a compiled kernel is called with, declared once: its operands, results, sizes, scalars and scratch memory.

From a ``Layout`` follow the checks of every tensor behind an address, the results, the packed task, the size and the
place of every piece of scratch, and, inside the kernel (``native/unpack.py``), the values under the same names.

A task is a block of 64-bit words: the number of the next chunk, how many chunks there are, how many items each of them
has, how many items there are in all, how many bytes of scratch each chunk has for itself; the address of the scratch
memory; the position that a chunk reported; then a word for each field, in the order of declaration.
"""

import functools
from collections.abc import Callable, Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fastcross.kernels.cpu.door import describe
from fastcross.kernels.cpu.fields import HEADER, INTEGER, OWN, REAL, SCALAR, SHARED, Field, Operand, Piece, Result, Size
from fastcross.kernels.cpu.plan import Plan
from fastcross.kernels.cpu.threads import Task
from fastcross.kernels.rows import accumulation_dtype

PLANS = 1024  # that are kept, for each layout
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Layout:
    """The declaration of a kernel, or of several that work on the same task one after another.

    ``items`` names the size that is split into chunks, of a multiple of ``together`` items each but for the last;
    ``work`` gives the multiply-adds per item. Sizes come from the operands' shapes (0 where an operand is absent) and
    from the caller (``sizes``); the ``derived`` ones follow from them, and from ``lanes``, the elements of a register.

    A kernel sees all of them, the operands, the results, the ``scalars`` (of the storage dtype), the ``shared`` scratch
    and its chunk's ``own``, besides ``chunk``, ``chunks``, the range of items ``start``, ``stop``, and ``own_bytes``,
    from a chunk's own piece to the next chunk's. A kernel written for the layout that this one ``extends`` takes its
    tasks, too.
    """

    def __init__(
        self,
        name: str,
        *,
        items: str,
        work: Size,
        together: int = 1,
        operands: Mapping[str, Operand] = NOTHING,
        results: Mapping[str, Result] = NOTHING,
        sizes: tuple[str, ...] = (),
        derived: Mapping[str, Size] = NOTHING,
        scalars: tuple[str, ...] = (),
        shared: Mapping[str, Piece] = NOTHING,
        own: Mapping[str, Piece] = NOTHING,
        extends: "Layout | None" = None,
    ) -> None:
        self.name, self.items, self.work, self.together = name, items, work, together
        self.operands, self.results, self.derived = dict(operands), dict(results), dict(derived)
        self.sizes, self.scalars, self.shared, self.own = sizes, scalars, dict(shared), dict(own)
        if extends is not None:
            self.operands, self.results = extends.operands | self.operands, extends.results | self.results
            self.derived, self.shared = extends.derived | self.derived, extends.shared | self.shared
            self.own, self.scalars = extends.own | self.own, extends.scalars + scalars
            self.sizes = extends.sizes + sizes
        shapes = [each.shape for each in self.operands.values()]
        self.shape_sizes = list(dict.fromkeys(size for each in shapes for size in each if size not in self.derived))
        flags = [f"has_{each}" for each, operand in operands.items() if operand.optional]
        inherited = [] if extends is None else extends.shape_sizes
        integers = [size for size in self.shape_sizes if size not in inherited] + [*sizes, *flags, *derived]
        self.fields: list[Field] = (
            [Field(each, INTEGER) for each in HEADER] if extends is None else list(extends.fields)
        )
        for each, operand in operands.items():
            self.fields += [Field(each, operand.kind)] + [Field(f"stride_{each}", INTEGER)] * operand.are_rows
        for each, result in results.items():
            self.fields += [Field(each, REAL)] + [Field(f"stride_{each}", INTEGER)] * bool(result.like)
        self.fields += [Field(each, INTEGER) for each in integers]
        self.fields += [Field(each, SCALAR) for each in scalars]
        self.fields += [Field(each, piece.kind, SHARED) for each, piece in shared.items()]
        self.fields += [Field(each, piece.kind, OWN) for each, piece in own.items()]
        names = [field.name for field in self.fields]
        if len(set(names)) < len(names):
            raise TypeError(f"{name} has a name twice: {sorted(names)}")
        self.integers = [*self.shape_sizes, *self.sizes, *self.derived]
        self.integers += [f"has_{each}" for each, operand in self.operands.items() if operand.optional]
        self._operands, self._sizes = _getter(tuple(self.operands)), _getter(self.sizes)
        self._scalars, self._count = _getter(self.scalars), len(self.operands) + len(self.sizes) + len(self.scalars)
        self._plans: dict[Any, Plan] = {}

    def task(self, dtype: torch.dtype | None, **values: Any) -> Task:
        """The task of a call: a tensor (or None) for each operand, a number for each size and scalar, by name.

        Without a dtype, operands of several are cast to the one that is summed in, and made contiguous where they have
        to be: for kernels that write to none of them.
        """
        try:
            tensors, sizes, scalars = self._operands(values), self._sizes(values), self._scalars(values)
        except KeyError as missing:
            raise TypeError(f"{self.name} needs {missing}; got {sorted(values)}") from None
        if len(values) != self._count:
            raise TypeError(f"{self.name} needs {self._count} operands, sizes and scalars; got {sorted(values)}")
        key: Any
        try:
            # What a plan was made for was checked, and need not be checked again.
            key = (dtype, torch.get_num_threads(), sizes, *map(describe, tensors))
            plan = self._plans.get(key)
        except (AttributeError, RuntimeError):  # what has no strides, and is refused
            key, plan = None, None
        if plan is None:
            plan, tensors = self._plan(dtype, sizes, tensors, key)
        return plan.task(tensors, scalars)

    def _plan(self, dtype: torch.dtype | None, sizes: tuple[int, ...], tensors: Any, key: Any) -> tuple[Plan, Any]:
        before = tensors
        if dtype is None:
            dtype = accumulation_dtype(*tensors)
            tensors = tuple(map(functools.partial(_adapt, dtype=dtype), self.operands.values(), tensors))
        plan = Plan(self, dtype, torch.get_num_threads(), dict(zip(self.sizes, sizes, strict=True)), tensors)
        if all(t is other for t, other in zip(tensors, before, strict=True)):
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
