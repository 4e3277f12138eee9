"""The page of ``fastcross paper``: tables 1 to 4 and figure 3 from records of trainings, beside the paper's numbers.

tables.md     the page
figure-3.png  logloss against the number of cross layers
results.json  every record; ``fastcross paper --study results.json`` makes the page from it again

A record counts where its training ran to its end: a pruned trial has no test metrics, and its validation logloss is not
what the setting can reach. What is chosen is chosen on the validation part.
"""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from fastcross.files import atomic
from fastcross.training.run_folder import Run, read_json, write_json
from fastcross.tuning.search import time_share
from fastcross.tuning.study import Study, TrialRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = list[str]
Table = list[Row]  # the first row is the head

LOSSES = 4  # loglosses and budgets of parameters that tables 2 and 3 show, where the paper's do not fit
LEAST_TRIALS = 4  # complete ones, below which importances are noise
KINDS = ("trials", "seeds", "runs")  # of records
TITLES = (
    "best test logloss of each model",
    "least parameters, without embeddings, that reach a validation logloss",
    "best validation logloss within a budget of parameters, without embeddings",
    "validation logloss of DCN less that of DNN, × 10⁻², by hidden layers and nodes",
)


@dataclass(frozen=True)
class Results:
    """What there is to report. facts: of the study, for the reader."""

    trials: Sequence[TrialRecord] = ()
    seeds: Sequence[TrialRecord] = ()
    runs: Sequence[TrialRecord] = ()
    unfinished: Sequence[str] = ()
    facts: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, study: Path | str | None, runs: Iterable[Path | str]) -> Results:
        """From a study, or a results.json that was made of one, and from run folders."""
        folders = sorted(map(str, runs))
        unfinished = [folder for folder in folders if Run(folder).result is None]
        finished = [TrialRecord.of_run(folder) for folder in folders if folder not in unfinished]
        if study is None:
            return cls(runs=finished, unfinished=unfinished)
        path = Path(study)
        if path.is_file():
            content = read_json(path)
            found = {kind: [TrialRecord.parse(one, path) for one in content.get(kind, [])] for kind in KINDS}
            found["runs"] += finished
            return cls(**found, unfinished=unfinished, facts=content.get("study"))
        opened = Study.open(path)
        facts = {"spaces": opened.spaces, "pruner": opened.pruner, "grid": opened.whole_grid, "seed": opened.seed}
        return cls(opened.records(), opened.records(kind="seeds"), finished, unfinished, facts)


def write_report(folder: Path | str, results: Results, *, beside: str | None, title: str) -> Path:
    """Write the page; ``beside``: the paper's data set whose numbers are to stand beside these, one of PAPERS."""
    if not complete([*results.trials, *results.runs]):
        raise ValueError("there is nothing to report yet: no training has come to its end")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paper = PAPERS[beside] if beside else None
    parts = [f"# {title}"]
    if results.trials:
        parts += [_searched(results), *_tables(results, paper)]
        if curves := depth_curves(results.trials):
            with atomic(folder / "figure-3.png") as temporary:
                temporary.write_bytes(draw_depth(curves))
            parts.append("## Figure 3: validation logloss against cross layers\n\n![Figure 3](figure-3.png)")
    if results.runs:
        table = markdown(runs_table(results.runs, paper)) + _differences(results.runs)
        parts.append(f"## Runs\n\nOn the test part; mean ± standard deviation (number of runs).\n\n{table}")
    if results.unfinished:
        parts.append(f"Left out, for they are not finished: {', '.join(Path(run).name for run in results.unfinished)}.")
    if paper:
        parts.append(f"The paper's: {paper.note}.")
    with atomic(folder / "tables.md") as temporary:
        temporary.write_text("\n\n".join(part.strip() for part in parts) + "\n")
    records = {kind: [asdict(one) for one in getattr(results, kind)] for kind in KINDS}
    write_json(folder / "results.json", {"study": results.facts, **records})
    return folder / "tables.md"


def _searched(results: Results) -> str:
    """What was tried, in a few lines."""
    lines = []
    for model in models_of(results.trials):
        trials = [record for record in results.trials if record.model == model]
        states = ", ".join(f"{count} {state}" for state, count in sorted(Counter(one.state for one in trials).items()))
        again = sum(record.model == model for record in results.seeds)
        steps = sum(record.steps for record in trials)
        lines.append(f"- {model}: {len(trials)} trials ({states}), {steps:,} steps; {again} further seeds of the best")
    training, total = time_share([*results.trials, *results.seeds])
    if total:
        lines.append(f"- {total:,.0f} s in all, {training / total:.1%} of them in training steps")
    if results.facts:
        how = "every point of a grid" if results.facts["grid"] else f"chosen by TPE, seed {results.facts['seed']}"
        lines.append(f"- {how}; pruner: {results.facts['pruner']}")
    return "\n".join(lines)


def _tables(results: Results, paper: Paper | None) -> list[str]:
    """What is asked of the data is not asked of every study: a table without a row is left out."""
    made = [table(results.trials, paper) for table in (table_2, table_3, table_4)]
    made.insert(0, table_1(results.trials, results.seeds, paper))
    parts = []
    for number, (title, table) in enumerate(zip(TITLES, made, strict=True), start=1):
        if len(table) > 1:
            told = _differences(results.seeds) if number == 1 else ""
            parts.append(f"## Table {number}: {title}\n\n{markdown(table)}{told}")
    return parts


def _differences(records: Sequence[TrialRecord]) -> str:
    lines = differences(records)
    told = "\n".join(f"- {line}" for line in lines)
    return f"\nDifferences of the means over the seeds, ± their standard error:\n\n{told}\n" if lines else ""


def draw_depth(curves: Mapping[tuple[int, int], Mapping[int, float]]) -> bytes:
    """A PNG of figure 3: one curve for each deep network; 0 cross layers is the DNN."""
    from matplotlib.figure import Figure  # without pyplot, which would look for a display

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for index, ((layers, nodes), curve) in enumerate(curves.items()):
        marker = "osD^vP*X"[index % 8]
        axes.plot(list(curve), list(curve.values()), marker=marker, label=f"{layers} layers, {nodes} nodes")
    axes.set(xlabel="cross layers (0: DNN)", ylabel="validation logloss")
    axes.set_xticks(sorted({depth for curve in curves.values() for depth in curve}))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return _png(figure)


@dataclass(frozen=True)
class Spread:
    """A mean over runs that differ in their seed alone."""

    mean: float
    deviation: float | None
    number: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(mean(values), stdev(values) if len(values) > 1 else None, len(values))

    @property
    def error(self) -> float | None:
        """The standard error of the mean."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.number)

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (f" ± {self.deviation:.4f} ({self.number})" if self.deviation is not None else "")


def complete(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    return [record for record in records if record.state == "complete"]


def models_of(records: Iterable[TrialRecord]) -> list[str]:
    """In the order of the paper's table 1."""
    found = {record.model for record in records}
    return [name for name in NAMES if name in found] + sorted(found - {*NAMES})


def table_1(trials: Sequence[TrialRecord], seeds: Sequence[TrialRecord], paper: Paper | None) -> Table:
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
        if paper:
            best = paper.best.get(model) if paper.metric == "logloss" else None
            row += [f"{best:.4f}" if best else "–", paper.mean.get(model, "–")]
        table.append(row)
    return table


def table_2(trials: Sequence[TrialRecord], paper: Paper | None) -> Table:
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


def table_3(trials: Sequence[TrialRecord], paper: Paper | None) -> Table:
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


def table_4(trials: Sequence[TrialRecord], paper: Paper | None) -> Table:
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


def depth_curves(trials: Sequence[TrialRecord]) -> dict[tuple[int, int], dict[int, float]]:
    """Figure 3: by (layers, nodes) of the deep network the best validation logloss by cross layers; 0: DNN."""
    curves: dict[tuple[int, int], dict[int, float]] = {}
    for record in _networks(trials):
        if record.deep and record.model in ("dcn", "dnn"):
            depth = record.options["cross_layers"] if record.model == "dcn" else 0
            curve = curves.setdefault(record.deep, {})
            curve[depth] = min(curve.get(depth, math.inf), _validation(record))
    return {shape: dict(sorted(curve.items())) for shape, curve in sorted(curves.items()) if len(curve) > 1}


def runs_table(records: Sequence[TrialRecord], paper: Paper | None) -> Table:
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
        best = paper.best.get(first.model) if paper else None
        table.append(row + ([f"{best:.4f}" if best else "–"] if paper else []))
    return table


def by_setting(records: Iterable[TrialRecord]) -> list[list[TrialRecord]]:
    """Runs that differ in their seed alone, together; models in the order of table 1."""
    groups: dict[str, list[TrialRecord]] = {}
    for record in sorted(complete(records), key=lambda one: one.seed):
        if record.test:
            groups.setdefault(record.setting, []).append(record)
    order = models_of(complete(records))
    return sorted(groups.values(), key=lambda group: order.index(group[0].model))


def differences(records: Sequence[TrialRecord]) -> list[str]:
    """Each setting of DCN less every other model, and less the settings of DCN after it, in each metric, with the
    standard error of the difference, where there are seeds."""
    groups = by_setting(records)
    several = {model for model, count in Counter(group[0].model for group in groups).items() if count > 1}
    lines = []
    for ours, theirs in itertools.combinations(groups, 2):
        if ours[0].model != "dcn":
            continue
        a, b = (
            NAMES.get(one.model, one.model) + (f" ({setting_text(one)})" if one.model in several else "")
            for one in (ours[0], theirs[0])
        )
        for metric in ("accuracy", "logloss"):
            of_a, of_b = (Spread.of([record.test[metric] for record in group]) for group in (ours, theirs))
            if of_a.error is not None and of_b.error is not None:
                error = math.hypot(of_a.error, of_b.error)
                lines.append(f"{a} - {b}, {metric}: {of_a.mean - of_b.mean:+.5f} ± {error:.5f}")
    return lines


def setting_text(record: TrialRecord) -> str:
    """What a person would say of a setting."""
    options = record.options
    parts = [f"{options['cross_layers']} cross layers"] if options.get("cross_layers") else []
    parts += [f"{name} {options[key]}" for key, name in CROSS_OPTIONS.items() if options.get(key)]
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


def _validation(record: TrialRecord) -> float:
    return record.validation["logloss"]


def _networks(trials: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Those of table 2, 3 and figure 3: DCN and DNN."""
    return [record for record in complete(trials) if record.model in ("dcn", "dnn") and record.validation]


def _losses(found: Sequence[TrialRecord]) -> list[float]:
    """From the best logloss that both models reach to the worst best, rounded up to what is seen in a table."""
    best = [min(_validation(one) for one in found if one.model == model) for model in models_of(found)]
    if not best:
        return []
    low, high = max(best), max(_validation(record) for record in found)
    return sorted({math.ceil(1e4 * (low + (high - low) * i / (2 * LOSSES))) / 1e4 for i in range(LOSSES)})


def _budgets(found: Sequence[TrialRecord]) -> list[float]:
    """Spread by their logarithm over the sizes that were tried, each rounded up to two digits."""
    counts = sorted(record.dense_parameters or 1 for record in found)
    if not counts:
        return []
    ratio = counts[-1] / counts[0]
    return sorted({_rounded_up(counts[0] * ratio ** ((i + 1) / LOSSES)) for i in range(LOSSES)})


def _rounded_up(number: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(round(number / unit, 6)) * unit


def _best_by_shape(trials: Iterable[TrialRecord], model: str) -> dict[tuple[int, int], float]:
    best: dict[tuple[int, int], float] = {}
    for record in _networks(trials):
        if record.model == model and record.deep:
            best[record.deep] = min(best.get(record.deep, math.inf), _validation(record))
    return best


def markdown(table: Table) -> str:
    lines = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def importances(study: Study, model: str) -> dict[str, float] | None:
    """By parameter, largest first; they sum to 1. None where too few trials ran to their end."""
    import optuna

    complete = [trial for trial in study.trials(model) if trial.state == optuna.trial.TrialState.COMPLETE]
    varied = {
        name for trial in complete for name in trial.params if len({one.params.get(name) for one in complete}) > 1
    }
    if len(complete) < LEAST_TRIALS or not varied:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental in Optuna 4
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return optuna.importance.get_param_importances(study.search(model), evaluator=evaluator, params=sorted(varied))


def draw_importances(found: Mapping[str, Mapping[str, float]]) -> bytes:
    """A PNG with a panel for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(found) + 1, 3.2), layout="constrained")
    for axes, (model, shares) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        bars = axes.barh(list(shares), list(shares.values()), color="tab:blue")
        axes.bar_label(bars, [f"{share:.0%}" for share in shares.values()], padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set(title=model, xlabel="importance for the validation logloss")
    return _png(figure)


def _png(figure: Figure) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()


CROSS_OPTIONS = {"cross_type": "type", "rank": "rank", "experts": "experts"}
NAMES = {
    "dcn": "DCN",
    "deep_crossing": "Deep Crossing",
    "dnn": "DNN",
    "wide_deep": "Wide & Deep",
    "fm": "FM",
    "lr": "LR",
}


@dataclass(frozen=True)
class Paper:
    """What the paper reports (Wang et al. 2017, section 4) of one data set.

    Best test metric by model, mean ± deviation over ten runs, and tables 2 to 4.
    """

    metric: str
    best: dict[str, float]
    mean: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, dict[float, float]] = field(default_factory=dict)  # table 2: logloss -> parameters
    logloss: dict[str, dict[float, float]] = field(default_factory=dict)  # table 3: parameters -> logloss
    differences: dict[int, dict[int, float]] = field(
        default_factory=dict
    )  # table 4: layers -> nodes -> 100 · difference
    note: str = ""


_NODES = (32, 64, 128, 256, 512, 1024)


def _table_4(*rows: tuple[float, ...]) -> dict[int, dict[int, float]]:
    return {layers: dict(zip(_NODES, row, strict=True)) for layers, row in enumerate(rows, start=2)}


PAPERS: dict[str, Paper] = {
    "criteo": Paper(
        "logloss",
        {"dcn": 0.4419, "deep_crossing": 0.4425, "dnn": 0.4428, "fm": 0.4464, "lr": 0.4474},
        {"dcn": "0.4422 ± 0.00009", "dnn": "0.4430 ± 0.00037", "deep_crossing": "0.4430 ± 0.00043"},
        {
            "dnn": {0.4430: 3.2e6, 0.4460: 1.5e5, 0.4470: 1.5e5, 0.4480: 7.8e4},
            "dcn": {0.4430: 7.9e5, 0.4460: 7.3e4, 0.4470: 3.7e4, 0.4480: 3.7e4},
        },
        {
            "dnn": {5e4: 0.4480, 1e5: 0.4471, 4e5: 0.4439, 1.1e6: 0.4433, 2.5e6: 0.4431},
            "dcn": {5e4: 0.4465, 1e5: 0.4453, 4e5: 0.4432, 1.1e6: 0.4426, 2.5e6: 0.4423},
        },
        _table_4(
            (-0.28, -0.10, -0.16, -0.06, -0.05, -0.08),
            (-0.19, -0.10, -0.13, -0.18, -0.07, -0.05),
            (-0.12, -0.10, -0.06, -0.09, -0.09, -0.21),
            (-0.21, -0.11, -0.13, -0.00, -0.06, -0.02),
        ),
        "all of Criteo's seven days, ~41 million rows; each the best of a grid",
    ),
    "covertype": Paper(
        "accuracy",
        {"dcn": 0.9740, "dnn": 0.9737, "deep_crossing": 0.9737},
        note="90 % train and 10 % test at random; each the best of a grid, read on the test part",
    ),
    "higgs": Paper(
        "logloss",
        {"dcn": 0.4494, "dnn": 0.4506},
        note="11 million rows, 90 % train and 10 % test at random; each the best of a grid",
    ),
}
