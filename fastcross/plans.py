"""``fastcross doctor --tune``: times the model's best few tiles of the cross kernels, and keeps the fastest.

``kernels/gpu/launch.py`` ranks tiles by a written model. For every plan that an operator asks for at a shape, forward
and backward, the first few of that ranking run in turn, each after its results have passed the rule of
``fastcross/accuracy.py``. ``kernels/gpu/measured.py`` has the file of what was found, which later processes read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcross import ops
from fastcross.accuracy import BY_NAME, gradient_of, held_to_the_rule
from fastcross.kernels.gpu import launch, measured
from fastcross.kernels.gpu.launch import Plan, Work
from fastcross.kernels.gpu.measured import Entry, Key, Measured, Tile
from fastcross.models.dcn import DCN

FEW = 6  # tiles of a class of shapes
TUNED = "cross_layer", "cross_network", "cross_logits"  # whose tiles the model chooses
Timer = Callable[[Mapping[str, Callable[[], object]]], Mapping[str, Sequence[float]]]  # seconds per call, by name


class Shape(NamedTuple):
    """What an operator is given: x0 (rows, d), layers, and of logits the outputs."""

    operator: str
    rows: int
    d: int
    layers: int
    dtype: torch.dtype = torch.float32
    outputs: int = 1

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.operator}, B = {self.rows}, d = {self.d}, L = {self.layers}, {dtype}"


def parse_shapes(given: Sequence[str]) -> list[Shape]:
    """Every operator in float32 and bfloat16, for shapes like 4096x1026x6."""
    found = []
    for text in given:
        try:
            rows, d, layers = map(int, text.split("x"))
        except ValueError:
            raise ValueError(f"--tune expects shapes like 4096x1026x6 (rows x columns x layers); got {text}") from None
        if min(rows, d, layers) < 1:
            raise ValueError(f"rows, columns and layers must be at least 1; got {text}")
        for name in TUNED:
            shape = Shape(name, rows, d, layers if BY_NAME[name].has_layers else 1)
            found += [shape._replace(dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    return list(dict.fromkeys(found))


def shape_of(model: Any, rows: int) -> Shape:
    """The shape at which a trained DCN runs its cross network; autocast leaves the vectors' dtype alone."""
    if not isinstance(model, DCN) or not model.config.cross_layers or model.config.cross_type != "vector":
        raise ValueError(f"--run expects a DCN with cross_type vector; got {type(model).__name__}")
    weight = model.cross.weight
    name = "cross_logits" if model.parallel else "cross_network"
    return Shape(name, rows, weight.shape[1], weight.shape[0], weight.dtype, model.config.num_outputs)


@dataclass(frozen=True, eq=False)
class _Asked(Measured):
    """Knows no tile, and notes what it is asked for."""

    keys: list[Key] = field(default_factory=list)

    def get(self, key: Key) -> Tile | None:
        self.keys.append(key)
        return None


def tune(shape: Shape, device: torch.device, timer: Timer, tell: Callable[[str], None]) -> Iterator[Entry]:
    """An entry for every plan that the operator asks for. Tiles that are wrong or cannot run are left out."""
    operator = BY_NAME[shape.operator]
    tensors = operator.draw(*shape[1:5], device, shape.outputs)
    leaves = [t.detach().requires_grad_() for t in tensors]

    def forward() -> Tensor:
        return getattr(ops, shape.operator)(*leaves, backend="triton")

    y = forward()
    dy = gradient_of(y.detach())
    passes = {"fwd": forward, "bwd": lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)}
    for name, step in passes.items():
        asked = _Asked({})
        with launch.using(device, asked):
            step()
        for key in dict.fromkeys(asked.keys):
            plans = _candidates(key, launch.hardware_of(device))
            steps: dict[str, Callable[[], object]] = {}
            for plan in plans:
                tiles = Measured({key: plan.tile})
                if problem := _problem(device, tiles, lambda: held_to_the_rule(operator, tensors, "triton")):
                    tell(f"{shape}, {name}: {plan.tile} is left out: {problem}")
                else:
                    steps[str(plan.tile)] = _with(device, tiles, step)
            if str(plans[0].tile) in steps:
                yield _fastest(f"{shape.operator}_{name}", key, shape.rows, plans, timer(steps))


def _candidates(key: Key, hardware: launch.Hardware) -> list[Plan]:
    of = dict(key)
    kind, d, whole_rows = (of.pop(name) for name in ("kind", "d", "whole_rows"))
    return launch.candidates(kind, d, Work(**of), hardware, whole_rows)[:FEW]


def _problem(device: torch.device, tiles: Measured, check: Callable[[], Any]) -> str:
    try:
        with launch.using(device, tiles):
            return "; ".join(str(compared) for compared in check() if not compared.is_right)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _with(device: torch.device, tiles: Measured, step: Callable[[], object]) -> Callable[[], object]:
    def call() -> object:
        with launch.using(device, tiles):
            return step()

    return call


def _fastest(kernel: str, key: Key, rows: int, plans: Sequence[Plan], seconds: Mapping[str, Sequence[float]]) -> Entry:
    found = {plan.tile: median(seconds[str(plan.tile)]) for plan in plans if str(plan.tile) in seconds}
    best, chosen = min(found, key=lambda tile: found[tile]), plans[0].tile
    return Entry(kernel, dict(key), rows, best, found[best], chosen, found[chosen])


def keep(entries: Sequence[Entry], device: torch.device) -> Path:
    """Writes what was found where the kernels look for it."""
    return measured.write(torch.cuda.get_device_name(device), entries)


def table(entries: Sequence[Entry]) -> str:
    """How far the model's choice was from the best."""
    lines = []
    for entry in entries:
        ratio = entry.model_seconds / entry.seconds
        found = f"{entry.tile} {entry.seconds * 1e6:.3g} µs" if ratio > 1 else "the fastest"
        shape = f"{entry.kernel}, {entry.shape['kind']}, B = {entry.rows}, d = {entry.shape['d']}"
        shape += f", {8 * entry.shape['itemsize']} bits, {entry.shape['layers']} rows of weights"
        lines.append(f"{shape}: model {entry.model_tile} {entry.model_seconds * 1e6:.3g} µs, {found}, {ratio:.2f}")
    return "\n".join(lines)
