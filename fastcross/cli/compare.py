"""fastcross compare, tune and paper: many trainings on the same data, and their tables."""

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fastcross.cli.printing import bars, plain, show
from fastcross.cli.train import TRAINING, check_resume, dataset, experiment, given, given_options
from fastcross.explain.explanation import CrossStrength
from fastcross.extras import require
from fastcross.files import atomic
from fastcross.models import MODELS
from fastcross.training.experiment import Experiment, model_options, run_name
from fastcross.training.loop import Interrupted
from fastcross.training.run_folder import Run, draw_curves, read_json, write_json
from fastcross.tuning.crosses import cross_finder, find_crosses
from fastcross.tuning.report import Results, draw_importances, importances, write_report
from fastcross.tuning.search import search, seeds, time_share
from fastcross.tuning.space import BY_PRESET, read_spaces, without
from fastcross.tuning.study import Study


def compare(args: Namespace) -> int:
    """The paper's table 1 for your data: the same split and training, one run folder per model and seed."""
    require("training", "train")
    folder = Path(args.output or run_name("compare"))
    plans = {(name, seed): experiment(args, name, seed, strict=False) for name in args.models for seed in args.seeds}
    finder = _finder(args)
    for plan in [*plans.values(), *([finder] if finder else [])]:
        plan.check()
    _check_folder(folder, args)
    with bars() as progress:
        cache, optimum = dataset(args).open(show, progress=progress)
    crosses: list[CrossStrength] = []
    if finder:
        show("dcn without a deep network, to find crosses")
        crosses = find_crosses(finder, folder / "crosses", (cache, optimum), args.auto_crosses, show)
        print(
            f"crosses of {' and '.join(filter(takes_crosses, args.models))}, by their standard deviation in the logit:"
        )
        print(", ".join(f"{' × '.join(cross.fields)} {cross.strength:.3g}" for cross in crosses))
        found = [list(cross.fields) for cross in crosses]
        for (name, seed), plan in plans.items():
            if takes_crosses(name):
                plans[name, seed] = replace(plan, options={**plan.options, "crosses": found})
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in args.models}
    for (name, seed), plan in plans.items():
        show(f"{name}, seed {seed}")
        result = plan.run(folder / f"{name}-{seed}", show=show, go_on=True, opened=(cache, optimum))
        results[name].append(result)
    part = "test" if cache.sizes.get("test") else "validation"
    rows = sorted((summary(name, found, part) for name, found in results.items()), key=lambda row: row[_main(row)])
    table = markdown(rows, optimum.get(part))
    first = {name: Run(folder / f"{name}-{args.seeds[0]}").history for name in args.models}
    with atomic(folder / "curves.png") as temporary:
        temporary.write_bytes(draw_curves(first, optimum.get("validation")))
    facts = {"part": part, "seeds": args.seeds, "optimum": optimum.get(part), "models": rows}
    write_json(folder / "table.json", facts | ({"crosses": [cross._asdict() for cross in crosses]} if crosses else {}))
    with atomic(folder / "table.md") as temporary:
        temporary.write_text(table)
    print(f"{part} part, {cache.sizes[part]:,} rows, seeds {', '.join(map(str, args.seeds))}\n\n{table}")
    print(f"saved: {folder}/table.md, table.json, curves.png, and a run folder for each model")
    return 0


def _check_folder(folder: Path, args: Namespace) -> None:
    """A comparison can be continued and extended, but does not replace another one."""
    if not (folder / "table.json").exists():
        return
    found = read_json(folder / "table.json")
    models, seeds = [row["model"] for row in found["models"]], found["seeds"]
    if not (set(models) <= set(args.models) and set(seeds) <= set(args.seeds)):
        held = f"{', '.join(models)} with seeds {', '.join(map(str, seeds))}"
        raise ValueError(f"{folder} holds the comparison of {held}; add to these, or choose another --output")


def takes_crosses(model: str) -> bool:
    return "crosses" in model_options(model)


def _finder(args: Namespace) -> Experiment | None:
    """The experiment that finds crosses; None without --crosses."""
    if args.auto_crosses is None:
        return None
    if args.crosses:
        raise ValueError("name crosses by --cross or have them found by --crosses auto, not both")
    if not any(map(takes_crosses, args.models)):
        takers = [name for name in MODELS if takes_crosses(name)]
        raise ValueError(f"--crosses has no effect on {', '.join(args.models)}, but on {' and '.join(takers)}")
    return cross_finder(experiment(args, "dcn", args.seeds[0], strict=False))


def summary(name: str, results: Sequence[Mapping[str, Any]], part: str) -> dict[str, Any]:
    """Mean and standard deviation over the seeds."""
    row: dict[str, Any] = {"model": name}
    for metric in results[0][part]:
        values = [result[part][metric] for result in results]
        row[metric] = mean(values)
        row[f"{metric}_std"] = stdev(values) if len(values) > 1 else None
    for total in ("parameters", "dense_parameters"):
        row[total] = results[0][total]
    for measured in ("seconds", "rows_per_second"):
        row[measured] = mean(result[measured] for result in results)
    return row


def markdown(rows: Sequence[Mapping[str, Any]], optimum: float | None) -> str:
    """The table, with the best possible logloss as its last line and each model's distance from it, if known."""
    cells = [_cells(row, optimum) for row in rows]
    if optimum is not None:
        cells.append({"model": "Bayes optimum", "logloss": f"{optimum:.4f}"})
    columns = list(cells[0])
    lines = [columns, *([row.get(column, "") for column in columns] for row in cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in padded)


def _cells(row: Mapping[str, Any], optimum: float | None) -> dict[str, str]:
    cells = {"model": row["model"], _main(row): _metric(row, _main(row))}
    if optimum is not None:
        cells["above optimum"] = f"{row['logloss'] - optimum:.4f}"
    cells |= {
        name: _metric(row, name.lower()) for name in ("AUC", "GAUC", "accuracy", "MAE", "R2") if name.lower() in row
    }
    return cells | {
        "parameters": f"{row['parameters']:,}",
        "without embeddings": f"{row['dense_parameters']:,}",
        "seconds": f"{row['seconds']:.1f}",
        "rows/s": f"{row['rows_per_second']:,.0f}",
    }


def _main(row: Mapping[str, Any]) -> str:
    """The metric by which models are ranked."""
    return "logloss" if "logloss" in row else "rmse"


def _metric(row: Mapping[str, Any], name: str) -> str:
    spread = row[f"{name}_std"]
    return f"{row[name]:.4f}" + (f" ± {spread:.4f}" if spread is not None else "")


def tune(args: Namespace) -> int:
    """Search over the settings of one or several models."""
    require("training", "train")
    require("tune", "tune")
    if args.resume:
        check_resume(args, "a study", ("trials", "budget", "seeds"))
        study = Study.open(args.resume)
    else:
        study = _create(args)
    data = next(iter(study.experiments.values())).data
    try:
        with bars() as progress:
            opened = data.open(show, progress=progress)
            search(study, opened, trials=args.trials, budget=args.budget, show=show, progress=progress)
            if args.seeds:
                seeds(study, opened, args.seeds, show=show, progress=progress)
    except (Interrupted, KeyboardInterrupt):
        show(f"interrupted; continue with: fastcross tune --resume {study.path}{_again(args)}")
        return 130
    _report(study)
    return 0


def _create(args: Namespace) -> Study:
    if args.trials is None and args.budget is None and not args.grid:
        raise ValueError("say how long to search: --trials N, --budget 2h, or --grid for every point of a grid")
    fixed = [*given_options(args), *given(args, TRAINING)]
    read = read_spaces(args.space) if args.space else {}
    if foreign := [model for model in read if model not in args.model]:
        raise ValueError(f"{args.space} has a space for {', '.join(foreign)}; --model names {', '.join(args.model)}")
    plans = {name: experiment(args, name, 0, strict=False) for name in args.model}  # an unknown name is an error here
    usual = BY_PRESET[next(iter(plans.values())).preset]
    return Study.create(
        args.study or run_name("tune"),
        plans,
        {name: without(read.get(name, usual[name]), fixed) for name in plans},
        pruner=args.pruner or ("none" if args.grid else "halving"),
        whole_grid=args.grid,
        seed=args.search_seed,
    )


def _again(args: Namespace) -> str:
    """The options of the search's length, which a resumed study needs again."""
    times = {"budget": f"{args.budget:g}s" if args.budget else None, "trials": args.trials, "seeds": args.seeds}
    return "".join(f" --{name} {value}" for name, value in times.items() if value)


def _report(study: Study) -> None:
    facts, found = {}, {}
    for model in study.models:
        best, trials = study.best(model), study.records(model)
        counts = Counter(one.state for one in trials)
        states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        print(f"{model}: {len(trials)} trials ({states or 'none'}), {sum(one.steps for one in trials):,} steps")
        if best is None:
            continue
        test = f", test {best.test['logloss']:.5f}" if best.test else ""
        logloss = f"logloss {best.validation['logloss']:.5f}{test}"
        print(f"  best on validation: {best.name}, {logloss}; {plain(best.parameters)}")
        print(f"  its run folder: {study.path / 'runs' / best.name}")
        if shares := importances(study, model):
            found[model] = shares
        facts[model] = {"best": asdict(best), "importances": shares}
    steps, total = time_share([*study.records(), *study.records(kind="seeds")])
    share = steps / max(total, 1e-9)
    print(f"training steps took {steps:.1f} s of {total:.1f} s, {share:.1%}; the rest evaluated, saved and chose")
    write_json(study.path / "summary.json", {"models": facts, "training_seconds": steps, "total_seconds": total})
    if found:
        with atomic(study.path / "importances.png") as temporary:
            temporary.write_bytes(draw_importances(found))
    print(f"study: {study.path}; its tables: fastcross paper --study {study.path}")


def paper(args: Namespace) -> int:
    """The paper's tables from a study, or from runs."""
    require("paper", "train")  # the figure is drawn with matplotlib
    if not args.study and not args.runs:
        raise ValueError("say what to report: --study STUDY, --runs RUN …, or both")
    results = Results.read(args.study, args.runs)
    for run in results.unfinished:
        show(f"{run} is not finished: left out")
    study = Path(args.study) if args.study else None
    default = study / "paper" if study and study.is_dir() else Path("paper")
    page = write_report(args.output or default, results, beside=args.beside, title=args.title)
    print(page.read_text())
    print(f"page: {page}")
    return 0
