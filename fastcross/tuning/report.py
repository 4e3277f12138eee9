"""The page of ``fastcross paper``: tables 1 to 4 and figure 3 as Markdown and PNG, and the records they were made from.

tables.md     the page
figure-3.png  logloss against the number of cross layers
results.json  every record; ``fastcross paper --study results.json`` makes the page from it again
"""

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcross.files import atomic
from fastcross.training.run_folder import read_json, write_json
from fastcross.tuning import tables
from fastcross.tuning.paper_numbers import PAPERS
from fastcross.tuning.records import Record, finished_runs, record_from
from fastcross.tuning.search import time_share
from fastcross.tuning.study import Study

TITLES = {
    "table_1": "Table 1: best test logloss of each model",
    "table_2": "Table 2: least parameters, without embeddings, that reach a validation logloss",
    "table_3": "Table 3: best validation logloss within a budget of parameters, without embeddings",
    "table_4": "Table 4: validation logloss of DCN less that of DNN, × 10⁻², by hidden layers and nodes",
}


@dataclass(frozen=True)
class Results:
    """What there is to report. facts: of the study, for the reader."""

    trials: Sequence[Record] = ()
    seeds: Sequence[Record] = ()
    runs: Sequence[Record] = ()
    unfinished: Sequence[str] = ()
    facts: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, study: Path | str | None, runs: Iterable[Path | str]) -> "Results":
        """From a study, or a results.json that was made of one, and from run folders."""
        finished, unfinished = finished_runs(runs)
        if study is None:
            return cls(runs=finished, unfinished=unfinished)
        path = Path(study)
        if path.is_file():
            content = read_json(path)
            kinds = {
                kind: [record_from(one, path) for one in content.get(kind, [])] for kind in ("trials", "seeds", "runs")
            }
            kinds["runs"] += finished
            return cls(**kinds, unfinished=unfinished, facts=content.get("study"))
        opened = Study.open(path)
        facts = {"spaces": opened.spaces, "pruner": opened.pruner, "grid": opened.whole_grid, "seed": opened.seed}
        return cls(opened.records(), opened.records(kind="seeds"), finished, unfinished, facts)

    def to_dict(self) -> dict[str, Any]:
        kinds = {kind: [one.to_dict() for one in getattr(self, kind)] for kind in ("trials", "seeds", "runs")}
        return {"study": self.facts, **kinds}


def write_report(folder: Path | str, results: Results, *, beside: str | None, title: str) -> Path:
    """Write the page; ``beside``: the paper's data set whose numbers are to stand beside these, one of PAPERS."""
    if not tables.complete([*results.trials, *results.runs]):
        raise ValueError("there is nothing to report yet: no training has come to its end")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paper = PAPERS[beside] if beside else None
    parts = [f"# {title}"]
    if results.trials:
        parts += [_searched(results), *_tables(results, beside)]
        if curves := tables.depth_curves(results.trials):
            with atomic(folder / "figure-3.png") as temporary:
                temporary.write_bytes(draw_depth(curves))
            parts.append("## Figure 3: validation logloss against cross layers\n\n![Figure 3](figure-3.png)")
    if results.runs:
        parts.append(
            f"## Runs\n\nOn the test part; mean ± standard deviation (number of runs).\n\n{_runs(results, beside)}"
        )
    if results.unfinished:
        parts.append(f"Left out, for they are not finished: {', '.join(Path(run).name for run in results.unfinished)}.")
    if paper:
        parts.append(f"The paper's: {paper.note}.")
    with atomic(folder / "tables.md") as temporary:
        temporary.write_text("\n\n".join(part.strip() for part in parts) + "\n")
    write_json(folder / "results.json", results.to_dict())
    return folder / "tables.md"


def _searched(results: Results) -> str:
    """What was tried, in a few lines."""
    lines = []
    for model in tables.models_of(results.trials):
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


def _tables(results: Results, beside: str | None) -> list[str]:
    """What is asked of the data is not asked of every study: a table without a row is left out."""
    paper = PAPERS[beside] if beside else None
    made = {"table_1": tables.table_1(results.trials, results.seeds, paper)}
    for name in ("table_2", "table_3", "table_4"):
        made[name] = getattr(tables, name)(results.trials, paper)
    parts = {name: f"## {TITLES[name]}\n\n{tables.text(table)}" for name, table in made.items() if len(table) > 1}
    if "table_1" in parts:
        parts["table_1"] += _differences(results.seeds)
    return list(parts.values())


def _runs(results: Results, beside: str | None) -> str:
    table = tables.text(tables.runs_table(results.runs, PAPERS[beside] if beside else None))
    return table + _differences(results.runs)


def _differences(records: Sequence[Record]) -> str:
    lines = tables.differences(records)
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
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()
