"""A plan's call as straight-line Python, for calls that are remembered.

Loops over operands and results take Python longer than a small kernel runs. So the lines for each of them are written
out, once per plan, and compiled, as ``dataclasses`` does with a class's methods.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastcross.kernels.cpu.door import refuse, taking, taking_fresh
from fastcross.kernels.cpu.internals import filling_maker, maker
from fastcross.kernels.cpu.plan import KEPT_BYTES, Plan

Launch = Callable[..., Any]


def launcher(plan: Plan, operands: Sequence[str], results: Sequence[str]) -> Launch:
    """A function of these operands (None for one that is absent) that returns these results (None: not needed).

    Operands are like those that the plan was made for: it looks at nothing but their memory.
    """
    if plan.has_large_results:
        return _in_general(plan, operands, results)
    known: dict[str, Any] = {
        "_asks_for_filling": torch.are_deterministic_algorithms_enabled, "_refuse": refuse,
        "_frames": plan.frames, "_new_frame": plan.new_frame, "_kernels": plan.kernels(),
    }  # fmt: skip
    lines = [
        f"def launch({', '.join(operands)}):",
        "    _fills = _asks_for_filling()",
        "    try:",
        "        _frame = _frames.pop()",
        "    except IndexError:",  # all are in use
        "        _frame = _new_frame()",
        "    _block = _frame[0]",
        "    _block[0] = 0",
    ]
    for name in operands:
        if size := plan.reaches[name]:
            lines += taking(name, plan.word[name], size)
    for name, (shape, strides) in plan.made.items():
        known[f"_make_{name}"] = maker(shape, strides, plan.dtype)
        known[f"_fill_{name}"] = filling_maker(shape, strides, plan.dtype)
        lines += [f"    {name} = _fill_{name}() if _fills else _make_{name}()", *taking_fresh(name, plan.word[name])]
    lines.append("    _kernels(_block)")
    if plan.bytes <= KEPT_BYTES:
        lines.append("    _frames.append(_frame)")
    lines.append(f"    return {', '.join(name if name in plan.made else 'None' for name in results)},")
    exec(compile("\n".join(lines), f"<a call of {plan.layout.name}>", "exec"), known)
    return known["launch"]


def _in_general(plan: Plan, operands: Sequence[str], results: Sequence[str]) -> Launch:
    """The same by the plan's own loops: results that take memory earlier ones left are made there."""
    places = [list(operands).index(name) if name in operands else None for name in plan.layout.operands]
    chosen = [list(plan.layout.results).index(name) for name in results]

    def launch(*tensors: Any) -> tuple[Any, ...]:
        made = plan.run(tuple(None if place is None else tensors[place] for place in places))
        return tuple(made[i] for i in chosen)

    return launch
