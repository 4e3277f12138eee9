"""The paper's tables 1 to 4 from records of trainings, as rows of cells.

A record counts where its training ran to its end: a pruned trial has no test metrics, and its validation logloss is not
what the setting can reach. What is chosen is chosen on the validation part.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from fastcross.tuning.paper_numbers import NAMES, Paper, paper_best
from fastcross.tuning.records import Record

Row = list[str]
Table = list[Row]  # the first row is the head

LOSSES = 4  # loglosses and budgets of parameters that tables 2 and 3 show, where the paper's do not fit


@dataclass(frozen=True)
class Spread:
    """A mean over runs that differ in their seed alone."""

    mean: float
    deviation: float | None
    number: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(mean(values), stdev(values) if len(values) > 1 else None, len(values))

    @property
    def error(self) -> float | None:
        """The standard error of the mean."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.number)

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (f" ± {self.deviation:.4f} ({self.number})" if self.deviation is not None else "")


def complete(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record.state == "complete"]


def models_of(records: Iterable[Record]) -> list[str]:
    """In the order of the paper's table 1."""
    found = {record.model for record in records}
    return [name for name in NAMES if name in found] + sorted(found - {*NAMES})


def table_1(trials: Sequence[Record], seeds: Sequence[Record], paper: Paper | None) -> Table:
    """Each model's test logloss: chosen on validation, over seeds of that setting, and the best on the test part."""
    head = ["model", "chosen on validation: test logloss", "mean ± deviation over further seeds"]
    head += ["best on test, as the paper read it", "parameters without embeddings", "setting"]
    table = [head + (["in the paper", "its ten runs"] if paper else [])]
    for model in models_of(trials):
        found = [record for record in complete(trials) if record.model == model and record.validation and record.test]
        if not found:
            continue
        chosen = min(found, key=_validation)
        read = min(found, key=lambda record: record.test["logloss"])
        again = [record.test["logloss"] for record in seeds if record.setting == chosen.setting]
        row = [NAMES.get(model, model), f"{chosen.test['logloss']:.4f}", str(Spread.of(again)) if again else "–"]
        row += [f"{read.test['logloss']:.4f}", f"{chosen.dense_parameters:,}", setting_text(chosen)]
        table.append(row + (_beside(paper, model) if paper else []))
    return table


def _beside(paper: Paper, model: str) -> Row:
    best = paper_best(paper, model, "logloss")
    return ["–" if best is None else f"{best:.4f}", paper.mean.get(model, "–")]


def table_2(trials: Sequence[Record], paper: Paper | None) -> Table:
    """The least parameters, without embeddings, that reach a validation logloss."""
    found = _networks(trials)
    losses = sorted({loss for row in paper.parameters.values() for loss in row}) if paper and paper.parameters else []
    losses = losses or _losses(found)
    table = [["validation logloss", *(f"{loss:.4f}" for loss in losses)]]
    for model in models_of(found):
        counts = [
            [record.dense_parameters or 0 for record in found if record.model == model and _validation(record) <= loss]
            for loss in losses
        ]
        table.append([NAMES.get(model, model), *(f"{min(one):,}" if one else "–" for one in counts)])
    for model, row in paper.parameters.items() if paper else ():
        table.append(
            [f"{NAMES[model]} in the paper", *(f"{row[loss]:,.0f}" if loss in row else "–" for loss in losses)]
        )
    return table


def table_3(trials: Sequence[Record], paper: Paper | None) -> Table:
    """The best validation logloss within a budget of parameters, without embeddings."""
    found = _networks(trials)
    budgets = sorted({count for row in paper.logloss.values() for count in row}) if paper and paper.logloss else []
    budgets = budgets or _budgets(found)
    table = [["parameters, at most", *(f"{budget:,.0f}" for budget in budgets)]]
    for model in models_of(found):
        within = [
            [_validation(one) for one in found if one.model == model and (one.dense_parameters or 0) <= budget]
            for budget in budgets
        ]
        table.append([NAMES.get(model, model), *(f"{min(one):.4f}" if one else "–" for one in within)])
    for model, row in paper.logloss.items() if paper else ():
        table.append([f"{NAMES[model]} in the paper", *(f"{row[b]:.4f}" if b in row else "–" for b in budgets)])
    return table


def table_4(trials: Sequence[Record], paper: Paper | None) -> Table:
    """100 · (DCN - DNN) in the best validation logloss, by layers and nodes of the deep network."""
    best = {model: _best_by_shape(trials, model) for model in ("dcn", "dnn")}
    both = best["dcn"].keys() & best["dnn"].keys()
    nodes = sorted({shape[1] for shape in both})
    table = [["layers \\ nodes", *map(str, nodes)]]
    for layers in sorted({shape[0] for shape in both}):
        cells = [
            f"{100 * (best['dcn'][layers, size] - best['dnn'][layers, size]):+.2f}" if (layers, size) in both else "–"
            for size in nodes
        ]
        table.append([str(layers), *cells])
        if paper and layers in paper.differences:
            told = paper.differences[layers]
            table.append([f"{layers} in the paper", *(f"{told[size]:+.2f}" if size in told else "–" for size in nodes)])
    return table


def depth_curves(trials: Sequence[Record]) -> dict[tuple[int, int], dict[int, float]]:
    """Figure 3: by (layers, nodes) of the deep network the best validation logloss by cross layers; 0: DNN."""
    curves: dict[tuple[int, int], dict[int, float]] = {}
    for record in _networks(trials):
        if record.deep and record.model in ("dcn", "dnn"):
            depth = record.options["cross_layers"] if record.model == "dcn" else 0
            curve = curves.setdefault(record.deep, {})
            curve[depth] = min(curve.get(depth, math.inf), _validation(record))
    return {shape: dict(sorted(curve.items())) for shape, curve in sorted(curves.items()) if len(curve) > 1}


def runs_table(records: Sequence[Record], paper: Paper | None) -> Table:
    """Runs by setting: what they reached on the test part, mean ± deviation over their seeds."""
    head = ["model", "setting", "seeds", "accuracy", "logloss", "parameters", "without embeddings", "seconds"]
    table = [head + ([f"{paper.metric} in the paper"] if paper else [])]
    for group in by_setting(records):
        first = group[0]
        accuracy, logloss = (Spread.of([record.test[name] for record in group]) for name in ("accuracy", "logloss"))
        row = [
            NAMES.get(first.model, first.model),
            setting_text(first),
            ", ".join(str(record.seed) for record in group),
        ]
        row += [str(accuracy), str(logloss), f"{first.parameter_count:,}", f"{first.dense_parameters:,}"]
        row.append(f"{mean(record.seconds for record in group):,.0f}")
        best = paper_best(paper, first.model, paper.metric) if paper else None
        table.append(row + ([f"{best:.4f}" if best else "–"] if paper else []))
    return table


def by_setting(records: Iterable[Record]) -> list[list[Record]]:
    """Runs that differ in their seed alone, together; models in the order of table 1."""
    groups: dict[str, list[Record]] = {}
    for record in sorted(complete(records), key=lambda one: one.seed):
        if record.test:
            groups.setdefault(record.setting, []).append(record)
    order = models_of(complete(records))
    return sorted(groups.values(), key=lambda group: order.index(group[0].model))


def differences(records: Sequence[Record]) -> list[str]:
    """DCN less every other model in each metric, with the standard error of the difference, where there are seeds."""
    groups = by_setting(records)
    lines = []
    for ours in (group for group in groups if group[0].model == "dcn"):
        for theirs in (group for group in groups if group[0].model != "dcn"):
            for metric in ("accuracy", "logloss"):
                a, b = (Spread.of([record.test[metric] for record in group]) for group in (ours, theirs))
                if a.error is not None and b.error is not None:
                    error = math.hypot(a.error, b.error)
                    other = NAMES.get(theirs[0].model, theirs[0].model)
                    if sum(group[0].model == theirs[0].model for group in groups) > 1:
                        other += f" ({setting_text(theirs[0])})"
                    lines.append(f"DCN - {other}, {metric}: {a.mean - b.mean:+.5f} ± {error:.5f}")
    return lines


def setting_text(record: Record) -> str:
    """What a person would say of a setting."""
    options = record.options
    parts = [f"{options['cross_layers']} cross layers"] if options.get("cross_layers") else []
    if record.deep:
        parts.append(f"deep {record.deep[0]} × {record.deep[1]}")
    elif options.get("deep_layers"):
        parts.append(f"deep {options['deep_layers']}")
    if "residual_units" in options:
        parts.append(f"{options['residual_units']} units")
        parts += (
            [f"{options['input_dim']} → {options['cross_dim']}"] if {"input_dim", "cross_dim"} <= {*options} else []
        )
    if options.get("crosses"):
        parts.append(f"{len(options['crosses'])} crosses")
    return ", ".join([*parts, f"lr {record.training['lr']:g}"])


def _validation(record: Record) -> float:
    return record.validation["logloss"]


def _networks(trials: Iterable[Record]) -> list[Record]:
    """Those of table 2, 3 and figure 3: DCN and DNN."""
    return [record for record in complete(trials) if record.model in ("dcn", "dnn") and record.validation]


def _losses(found: Sequence[Record]) -> list[float]:
    """From the best logloss that both models reach to the worst best, rounded up to what is seen in a table."""
    best = [min(_validation(one) for one in found if one.model == model) for model in models_of(found)]
    if not best:
        return []
    low, high = max(best), max(_validation(record) for record in found)
    return sorted({math.ceil(1e4 * (low + (high - low) * i / (2 * LOSSES))) / 1e4 for i in range(LOSSES)})


def _budgets(found: Sequence[Record]) -> list[float]:
    """Spread by their logarithm over the sizes that were tried, each rounded up to two digits."""
    counts = sorted(record.dense_parameters or 1 for record in found)
    if not counts:
        return []
    ratio = counts[-1] / counts[0]
    return sorted({_rounded_up(counts[0] * ratio ** ((i + 1) / LOSSES)) for i in range(LOSSES)})


def _rounded_up(number: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(round(number / unit, 6)) * unit


def _best_by_shape(trials: Iterable[Record], model: str) -> dict[tuple[int, int], float]:
    best: dict[tuple[int, int], float] = {}
    for record in _networks(trials):
        if record.model == model and record.deep:
            best[record.deep] = min(best.get(record.deep, math.inf), _validation(record))
    return best


def text(table: Table) -> str:
    """As Markdown."""
    lines = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
