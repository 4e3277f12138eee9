"""What ``fastcross doctor`` finds out about a machine: what is here, whether it is right, how fast it is.

    right   every operator in its dtypes, output and all gradients, by the rule of ``fastcross/accuracy.py``; updates of
            rows; that a wrong id is raised; the losses of a few training steps, eager, compiled and captured
    fast    each operator and a training step, forward and backward, beside the eager loop, torch.compile and a copy;
            the contestants take turns, and ratios are taken within a round

On a GPU these are the Triton kernels, on a CPU the C++ ones and, where TRITON_INTERPRET is set, the Triton ones in the
interpreter: then nothing is timed. What was timed has passed the rule at that very shape.
"""

import dataclasses
import functools
import itertools
import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcross import ops, reference
from fastcross.accuracy import (
    BY_NAME,
    OPERATORS,
    Compared,
    Operator,
    check_embedding,
    check_ids,
    check_operator,
    check_rows,
    compare,
    compare_with_eager,
    evaluate,
    gradient_of,
    held_to_the_rule,
)
from fastcross.batch import Batch
from fastcross.files import atomic
from fastcross.models.dcn import DCN
from fastcross.ops.backends import choose_kernels, is_interpreting
from fastcross.optim import configure
from fastcross.training.config import TrainingConfig
from fastcross.training.environment import describe_environment, missing_parts
from fastcross.training.step import ALONE, CapturedStep, CudaGraphs, Step

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STEPS, STEP_ROWS, CARDINALITIES, DENSE = 6, 64, (50, 7, 300), 13
LOSSES_DIFFER = 1e-4  # relative, after so few steps: sums in another order, and what Adam makes of them
CONTESTANTS = "fastcross", "eager loop", "torch.compile", "copy"
GOALS = {"eager loop": 1.0}  # who should be slower than we


@dataclass(frozen=True)
class Check:
    """One thing that was held to the rule. ``share``: of the allowed error, at most 1; None where nothing was run."""

    what: str
    backend: str
    dtype: str
    share: float | None = None
    problem: str = ""
    note: str = ""


@dataclass(frozen=True)
class Timing:
    """What one workload took: seconds per call in each round, by contestant."""

    what: str
    seconds: Mapping[str, Sequence[float]]
    operations: float = 0.0  # of the cross layers: 2 forward and 4 backward for each weight and row
    bytes: float = 0.0  # that nobody can do without

    def middle(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str) -> tuple[float, float, float]:
        """How many times as long as ours that contestant takes: 20th percentile, median, 80th."""
        ratios = sorted(b / a for a, b in zip(self.seconds[CONTESTANTS[0]], self.seconds[name], strict=True))
        return ratios[len(ratios) // 5], statistics.median(ratios), ratios[-1 - len(ratios) // 5]

    @property
    def slow(self) -> str:
        """Who is faster than we by the whole spread."""
        faster = [name for name, goal in GOALS.items() if name in self.seconds and self.ratio(name)[2] < goal]
        return (
            f"{self.what} takes {1 / self.ratio(faster[0])[1]:.2f} times as long as the {faster[0]}" if faster else ""
        )


@dataclass
class Report:
    """All that was found."""

    device: str
    here: list[str]
    missing: list[tuple[str, str]]  # what, and the command that brings it
    checks: list[Check] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    roof: tuple[float, float] | None = None  # bytes and operations per second: a large copy, a large product

    @property
    def wrong(self) -> list[str]:
        return [f"{c.what} ({c.backend}, {c.dtype}): {c.problem}" for c in self.checks if c.problem]

    @property
    def verdict(self) -> str:
        slow = [timing.slow for timing in self.timings if timing.slow]
        right = f"wrong: {'; '.join(self.wrong)}" if self.wrong else f"right: {len(self.checks)} checks"
        fast = f"slow: {'; '.join(slow)}" if slow else "fast" if self.timings else "not timed"
        absent = f"; missing: {', '.join(what for what, _ in self.missing)}" if self.missing else ""
        return f"{right}; {fast}{absent}"

    def markdown(self) -> str:
        """The whole report, as it is printed."""
        parts = ["# fastcross doctor", f"**{self.verdict}**", "## Here", *(f"- {line}" for line in self.here)]
        parts += [f"- missing: {what}; `{command}` brings it" for what, command in self.missing]
        names = list(dict.fromkeys(check.dtype for check in self.checks))
        lines: dict[tuple[str, str], dict[str, str]] = {}
        for check in self.checks:
            found = check.note or (f"{check.share:.2f}" if check.dtype else "right")
            found = "wrong" if check.problem else found
            lines.setdefault((check.what, check.backend), dict.fromkeys(names, ""))[check.dtype] = found
        parts += ["## Right", "The largest error, in units of what the rule allows."]
        parts += [_table(["", "", *names], [[*key, *row.values()] for key, row in lines.items()])]
        if self.timings:
            rivals = [name for name in CONTESTANTS[1:] if any(name in timing.seconds for timing in self.timings)]
            rows = [
                [t.what, _time(t.middle(CONTESTANTS[0])), *(_ratio(t, name) for name in rivals)] for t in self.timings
            ]
            parts += ["## Fast", "Forward and backward; times as long as ours (20th to 80th percentile of the rounds)."]
            parts += [_table(["", "ours", *rivals], rows)]
        return "\n\n".join(parts).replace("\n\n- ", "\n- ") + "\n"

    def write(self, folder: Path) -> None:
        """report.md, report.json and, where something was timed, roofline.png."""
        folder.mkdir(parents=True, exist_ok=True)
        figure = "\n![Roofline](roofline.png)\n" if self.timings and self.roof else ""
        if figure:
            with atomic(folder / "roofline.png") as path:
                draw_roofline(self, path)
        with atomic(folder / "report.json") as path:
            path.write_text(json.dumps(dataclasses.asdict(self) | {"verdict": self.verdict}, indent=1))
        with atomic(folder / "report.md") as path:
            path.write_text(self.markdown() + figure)


Job = tuple[str, Callable[[Report], None]]


def jobs(device: torch.device, quick: bool) -> list[Job]:
    """What there is to do, by name, so that a bar can tell how far it is."""
    found: list[Job] = []
    for backend, dtypes in _backends(device):
        for operator, dtype in itertools.product(OPERATORS, dtypes):
            few = quick or (backend == "triton" and is_interpreting())
            call = functools.partial(check_operator, operator, device=device, dtype=dtype, few=few)
            found.append((operator.name, _check(operator.name, backend, dtype, call)))
        for dtype in dtypes:
            call = functools.partial(check_embedding, device=device, dtype=dtype)
            found.append(("embedding_stack", _check("embedding_stack", backend, dtype, call)))
            for update in ("adam", "adagrad", "row-wise adagrad", "sgd"):
                call = functools.partial(check_rows, update, device=device, dtype=dtype)
                found.append((update, _check(f"rows, {update}", backend, dtype, call)))
        if backend != "torch":  # PyTorch's own operators end the process on a GPU
            found.append(("wrong ids", _check("wrong ids", backend, None, functools.partial(check_ids, device=device))))
        call = functools.partial(check_training, device=device, quick=quick)
        found.append(("training step", _check("training step", backend, None, call)))
        if not quick and not is_interpreting():
            large = functools.partial(check_large, device=device)
            found.append(("2³¹ elements", _check("2³¹ elements", backend, torch.bfloat16, large)))
    if not is_interpreting():
        for operator in OPERATORS:
            found.append((operator.name, functools.partial(time_operator, operator, device, quick)))
        found += [
            ("embedding_stack", functools.partial(time_embedding, device, quick)),
            ("training step", functools.partial(time_step, device, quick)),
            ("roof", functools.partial(roof, device)),
        ]
    return found


def new_report(device: torch.device) -> Report:
    return Report(str(device), list(describe_environment()), missing_parts())


def _backends(device: torch.device) -> list[tuple[str, tuple[torch.dtype, ...]]]:
    """Who computes here, and in which dtypes."""
    if device.type != "cpu":
        own = choose_kernels("auto", device, torch.float32)
        return [(own, FLOATS), ("torch", (torch.float64,))]
    found: list[tuple[str, tuple[torch.dtype, ...]]] = [
        (choose_kernels("auto", device, torch.float32), (*FLOATS, torch.float64))
    ]
    return [*found, ("triton", FLOATS)] if is_interpreting() else found


class NotHere(Exception):
    """A check that this machine cannot make; says why."""


def _check(what: str, backend: str, dtype: torch.dtype | None, call: Callable[..., Iterable[Compared]]) -> Any:
    """Whatever goes wrong is a finding: the doctor goes on."""
    place = what, backend, str(dtype or "").removeprefix("torch.")

    def run(report: Report) -> None:
        try:
            compared = list(call(backend=backend))
            worst = max(compared, key=lambda each: each.share if each.share == each.share else float("inf"))
            bad = "; ".join(str(each) for each in compared if not each.is_right)
            report.checks.append(Check(*place, worst.share, bad))
        except NotHere as reason:
            report.checks.append(Check(*place, note=str(reason)))
        except Exception as error:
            report.checks.append(Check(*place, problem=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"))

    return run


def _make_step(backend: str, device: torch.device, how: str, shape: Mapping[str, Any], rows: int) -> Step:
    torch.manual_seed(0)
    model: Any = DCN(**shape, backend=backend).to(device)
    capturable = how == "captured"
    optimizer = configure(model, lr=0.01, capturable=capturable, backend="torch" if backend == "reference" else backend)
    model = torch.compile(model) if how == "compiled" else model
    no_cache: Any = None  # which knows how rows are weighted: these are not
    return Step(model, optimizer, no_cache, TrainingConfig(bf16=False), rows, ALONE)


def _batch(cardinalities: Sequence[int], rows: int, device: torch.device, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(size, (rows,), generator=generator) for size in cardinalities], 1)
    label = (ids[:, 0] % 2).float()
    return Batch(torch.randn(rows, DENSE, generator=generator), ids, label=label).to(device)


def check_training(*, backend: str, device: torch.device, quick: bool) -> Iterator[Compared]:
    """A few steps of a small DCN: losses beside those of PyTorch's own operators in float32."""
    shape = {
        "cardinalities": CARDINALITIES,
        "num_dense": DENSE,
        "embedding_dim": 8,
        "cross_layers": 3,
        "deep_layers": (32,),
    }
    batches = [_batch(CARDINALITIES, STEP_ROWS, device, seed) for seed in range(STEPS)]

    def losses(backend: str, how: str) -> Tensor:
        step: Any = _make_step(backend, device, how, shape, STEP_ROWS)
        told: list[str] = []
        if how == "captured":
            step = CapturedStep(step, STEP_ROWS, CudaGraphs(device), told.append)
        found = torch.stack([step(batch).loss.double().cpu() for batch in batches])
        if told:
            raise RuntimeError(told[0])
        return found

    expected = losses("torch", "eager")
    ways = ["eager"]
    if not quick and not is_interpreting() and (device.type != "cpu" or shutil.which("g++") or shutil.which("clang++")):
        ways.append("compiled")
    if device.type == "cuda":
        ways.append("captured")
    for how in ways:
        difference = (losses(backend, how) - expected).abs().max()
        yield Compared(f"losses, {how}", float(difference), LOSSES_DIFFER * float(expected.abs().max()))


def check_large(*, backend: str, device: torch.device) -> Iterator[Compared]:
    """More elements than 32 bits can count. The incoming gradient is 0 but for some rows: the gradients of the weights
    come from these alone, which the reference sees alone."""
    d = 1026
    rows = 2**31 // d + 1000
    needed, free = 4 * 2 * rows * d, _free_bytes(device)
    if free < 1.5 * needed:
        raise NotHere(f"needs {1.5 * needed / 2**30:.0f} GiB; {free / 2**30:.0f} GiB are free")
    network = BY_NAME["cross_network"]
    few, *parameters = network.draw(4096, d, 6, torch.bfloat16, device)
    x0 = few.repeat(-(-rows // 4096), 1)[:rows]
    sample = torch.cat([torch.arange(64), torch.arange(64) + rows // 2, torch.arange(rows - 64, rows)]).to(device)
    dy = torch.zeros_like(x0)
    dy[sample] = few[: len(sample)]
    y, dx0, *gradients = evaluate(ops.cross_network, [x0, *parameters], dy, backend=backend)
    ours = [y[sample], dx0[sample], *gradients]
    yield from compare_with_eager(network.name, ours, [x0[sample], *parameters], dy[sample])


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), 0)


def time_operator(operator: Operator, device: torch.device, quick: bool, report: Report) -> None:
    """At the paper's shape, or DCN-V2's; after its results have passed the rule there."""
    rows, d, layers = (512 if quick else 4096), *((429, 3) if operator.has_matrices else (1026, 6))
    layers = layers if operator.has_layers else 1
    tensors = operator.draw(rows, d, layers, torch.float32, device)
    weights = sum(t.numel() for t in tensors[operator.rows :])
    timing = _time_beside_loop(
        f"{operator.name}, B = {rows}, d = {tensors[0].shape[1]}, L = {layers}",
        lambda backend: held_to_the_rule(operator, tensors, backend),
        functools.partial(getattr(ops, operator.name), backend="auto"),
        getattr(reference, operator.name),
        tensors,
        (device, quick, report),
    )
    if timing is not None:
        size = tensors[0].nbytes * operator.passes
        report.timings.append(dataclasses.replace(timing, operations=6.0 * weights * rows, bytes=size))


def time_embedding(device: torch.device, quick: bool, report: Report) -> None:
    """26 tables beside a lookup in each and a concatenation; the copy is that of x0."""
    rows, count, height, width = (512 if quick else 4096), 26, 1000, 16
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(height, (rows, count), generator=generator).to(device)
    tensors = [torch.randn(rows, DENSE, generator=generator).to(device)]
    tensors += [torch.randn(height, width, generator=generator).to(device) for _ in range(count)]

    def ours(dense: Tensor, *tables: Tensor) -> Tensor:
        return ops.embedding_stack(dense, ids, tables, backend="auto")

    def loop(dense: Tensor, *tables: Tensor) -> Tensor:
        return torch.cat((*(F.embedding(ids[:, k], table) for k, table in enumerate(tables)), dense), 1)

    def check(backend: str) -> Iterator[Compared]:
        exact, eager = (evaluate(loop, tensors, gradient_of, kind) for kind in (torch.float64, None))
        for i, (o, e, x) in enumerate(zip(evaluate(ours, tensors, gradient_of), eager, exact, strict=True)):
            yield compare(o, e, x, f"result {i}")

    what = f"embedding_stack, B = {rows}, {count} tables of width {width}"
    timing = _time_beside_loop(what, check, ours, loop, tensors, (device, quick, report))
    if timing is not None:
        report.timings.append(timing)


def _time_beside_loop(
    what: str,
    check: Callable[[str], Iterable[Compared]],
    ours: Callable[..., Tensor],
    loop: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    context: tuple[torch.device, bool, Report],
) -> Timing | None:
    """Forward and backward beside the loop, torch.compile of it and a copy of x0; None if the result is wrong."""
    device, quick, report = context
    backend = _backends(device)[0][0]
    _check(f"{what.partition(',')[0]}, timed", backend, torch.float32, lambda backend: check(backend))(report)
    if report.checks[-1].problem:
        return None
    leaves = [t.detach().requires_grad_() for t in tensors]
    rows = max(tensors[0], loop(*leaves).detach(), key=Tensor.numel)  # x0
    other = torch.empty_like(rows)

    def step_of(function: Callable[..., Tensor]) -> Callable[[], object]:
        dy = gradient_of(function(*leaves).detach())
        return lambda: torch.autograd.grad(function(*leaves), leaves, dy)

    steps = {"fastcross": step_of(ours), "eager loop": step_of(loop), "copy": lambda: other.copy_(rows)}
    if not quick:
        _add_compiled(steps, lambda: step_of(torch.compile(loop)), report)
    return Timing(what, take_turns(steps, clock_of(device), 0.5 if quick else 2.0))


def time_step(device: torch.device, quick: bool, report: Report) -> None:
    """A whole training step of a DCN of the paper's width; the copy is that of its x0."""
    rows, cardinalities = (512 if quick else 4096), (1000,) * 26
    deep = (256,) if quick else (1024, 1024)
    shape = {
        "cardinalities": cardinalities,
        "num_dense": DENSE,
        "embedding_dim": 39,
        "cross_layers": 6,
        "deep_layers": deep,
    }
    batch = _batch(cardinalities, rows, device, 0)
    x0 = torch.randn(rows, 39 * 26 + DENSE, device=device)
    other = torch.empty_like(x0)
    ours: Any = _make_step("auto", device, "captured" if device.type == "cuda" else "eager", shape, rows)
    if device.type == "cuda":
        ours = CapturedStep(ours, rows, CudaGraphs(device))
    eager = _make_step("reference", device, "eager", shape, rows)
    steps = {"fastcross": lambda: ours(batch), "eager loop": lambda: eager(batch), "copy": lambda: other.copy_(x0)}
    if not quick:
        compiled = _make_step("reference", device, "compiled", shape, rows)
        _add_compiled(steps, lambda: lambda: compiled(batch), report)
    for _ in range(4):  # what warms up and is captured
        ours(batch)
    seconds = take_turns(steps, clock_of(device), 1.0 if quick else 5.0)
    report.timings.append(Timing(f"training step of DCN, B = {rows}, d = {x0.shape[1]}, L = 6", seconds))


def _add_compiled(
    steps: dict[str, Callable[[], object]], make: Callable[[], Callable[[], object]], report: Report
) -> None:
    """Where torch.compile cannot compile it, the others are timed all the same."""
    try:
        torch.compiler.reset()
        step = make()
        step()
        steps["torch.compile"] = step
    except Exception as error:
        report.here.append(f"torch.compile could not take part: {type(error).__name__}: {str(error).splitlines()[0]}")


Clock = Callable[[Callable[[], object]], float]


def clock_of(device: torch.device) -> Clock:
    """Seconds of one call: on a GPU between two of its events, with nothing of the operands left in its L2 cache."""
    if device.type != "cuda":

        def on_host(step: Callable[[], object]) -> float:
            start = time.perf_counter()
            step()
            return time.perf_counter() - start

        return on_host
    flush = torch.empty(256 << 20, dtype=torch.int8, device=device)  # larger than any L2

    def on_device(step: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()  # also keeps the device busy while the host prepares the launch
        start.record()
        step()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3

    return on_device


def take_turns(steps: Mapping[str, Callable[[], object]], clock: Clock, budget: float) -> dict[str, list[float]]:
    """Seconds per call of each, in rounds: 5 at least, and more within ``budget`` seconds."""
    names = list(steps)
    once = sum(clock(steps[name]) for name in names)  # what is compiled or allocated at first use
    once = min(once, sum(clock(steps[name]) for name in names))
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(min(200, max(5, int(budget / max(2 * once, 1e-6))))):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            steps[name]()  # its own caches, not those that its neighbour left
            found[name].append(clock(steps[name]))
    return found


def roof(device: torch.device, report: Report) -> None:
    """What the machine can do at most: a large copy, and a large product in float32."""
    x = torch.randn(1 << 25, device=device)
    other, (a, b) = torch.zeros_like(x), torch.randn(2, 1024, 1024, device=device)
    seconds = take_turns({"copy": lambda: other.copy_(x), "product": lambda: a @ b}, clock_of(device), 0.5)
    report.roof = 2 * x.nbytes / min(seconds["copy"]), 2 * 1024**3 / min(seconds["product"])


def draw_roofline(report: Report, path: Path) -> None:
    """Operations per second against operations per byte that must be moved; each operator beside the eager loop."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    assert report.roof is not None
    bandwidth, compute = report.roof
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    x = [2.0**e for e in range(-2, 13)]
    axes.plot(x, [min(bandwidth * v, compute) / 1e9 for v in x], color="black", label="roof: copy, product")
    for timing, color in zip([t for t in report.timings if t.operations], (f"C{i}" for i in range(10)), strict=False):
        for name, marker in (("fastcross", "o"), ("eager loop", "x")):
            rate = timing.operations / timing.middle(name) / 1e9
            label = timing.what.partition(",")[0] if name == "fastcross" else None
            axes.plot(timing.operations / timing.bytes, rate, marker, color=color, label=label)
    axes.set(xscale="log", yscale="log", title="Forward and backward (x: the eager loop)")
    axes.set(xlabel="operations per byte that must be moved", ylabel="10⁹ operations per second")
    axes.grid(alpha=0.3, which="both")
    figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=150, format="png", metadata={"Software": None})
    plt.close(figure)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that can be read as it stands."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _ratio(timing: Timing, name: str) -> str:
    if name not in timing.seconds:
        return ""
    low, middle, high = timing.ratio(name)
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _shapes(shape: Sequence[int]) -> str:
    return "B = {}, d = {}, L = {}".format(*shape)
