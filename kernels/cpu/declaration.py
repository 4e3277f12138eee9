"""What a compiled kernel is called with, declared once: its operands, results, sizes, scalars and scratch memory.

From a declaration follow the checks of every tensor behind an address, the results, the packed task, the size and the
place of every piece of scratch, and, inside the kernel (``native/unpack.py``), the values under the same names.

A task is a block of 64-bit words: which chunks are taken (``native/claim.py``), how many chunks there are, how many
items each of them has, how many items there are in all, how many bytes of scratch each chunk has for itself; the
address of the scratch memory; the position that a chunk reported; how many chunks are a thread's own, and the address
of the function that tells the thread's number; then a word for each field, in the order of declaration.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastcross.kernels.cpu.fields import HEADER, INTEGER, OWN, REAL, SCALAR, SHARED, Field, Operand, Piece, Result, Size

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Declaration:
    """The declaration of a kernel, or of several that work on the same task one after another.

    ``items`` names the size that is split into chunks, of a multiple of ``together`` items each but for the last;
    ``work`` gives the multiply-adds per item, and ``adds_up`` says whether chunks have sums of their own, which makes
    many of them costly. Sizes come from the operands' shapes (0 where an operand is absent) and from the caller
    (``sizes``); the ``derived`` ones follow from them, and from ``lanes``, the elements of a register.

    A kernel sees all of them, the operands, the results, the ``scalars`` (of the storage dtype), the ``shared`` scratch
    and its chunk's ``own``, besides ``chunk``, ``chunks``, the range of items ``start``, ``stop``, and ``own_bytes``,
    from a chunk's own piece to the next chunk's. A kernel written for the layout that this one ``extends`` takes its
    tasks, too.

    ``kernels`` are those that :meth:`run` runs, in their order: the one that takes chunks, which has the layout's name,
    on all threads, what comes before or after it on one.
    """

    def __init__(
        self,
        name: str,
        *,
        items: str,
        work: Size,
        together: int = 1,
        adds_up: bool = True,
        operands: Mapping[str, Operand] = NOTHING,
        results: Mapping[str, Result] = NOTHING,
        sizes: tuple[str, ...] = (),
        derived: Mapping[str, Size] = NOTHING,
        scalars: tuple[str, ...] = (),
        shared: Mapping[str, Piece] = NOTHING,
        own: Mapping[str, Piece] = NOTHING,
        extends: "Declaration | None" = None,
        kernels: tuple[str, ...] = (),
    ) -> None:
        self.name, self.items, self.work, self.together, self.kernels = name, items, work, together, kernels
        self.adds_up = adds_up
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
