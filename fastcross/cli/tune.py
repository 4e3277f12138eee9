"""fastcross tune: a search over the settings of one or several models."""

from argparse import Namespace
from collections import Counter
from dataclasses import fields

from fastcross.cli.conflicts import check_resume
from fastcross.cli.data import plain
from fastcross.cli.experiment import MODEL_OPTIONS, experiment
from fastcross.cli.printing import bars, show
from fastcross.extras import require
from fastcross.files import atomic
from fastcross.training.config import TrainingConfig
from fastcross.training.experiment import run_name
from fastcross.training.loop import Interrupted
from fastcross.training.run_folder import write_json
from fastcross.tuning.importance import draw_importances, importances
from fastcross.tuning.search import search, seeds, time_share
from fastcross.tuning.space import PAPER, read_spaces, without
from fastcross.tuning.study import Study

WITH_RESUME = ("trials", "budget", "seeds")


def tune(args: Namespace) -> int:
    require("training", "train")
    require("tune", "tune")
    if args.resume:
        check_resume(args, "a study", WITH_RESUME)
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
        show(f"interrupted; go on with: fastcross tune --resume {study.path}{_again(args)}")
        return 130
    _report(study)
    return 0


def _create(args: Namespace) -> Study:
    if args.trials is None and args.budget is None and not args.grid:
        raise ValueError("say how long to search: --trials N, --budget 2h, or --grid for every point of a grid")
    given = [
        name for name in (*MODEL_OPTIONS, *(entry.name for entry in fields(TrainingConfig))) if _is_given(args, name)
    ]
    read = read_spaces(args.space) if args.space else {}
    if foreign := [model for model in read if model not in args.model]:
        raise ValueError(f"{args.space} has a space for {', '.join(foreign)}; --model names {', '.join(args.model)}")
    plans = {name: experiment(args, name, 0, strict=False) for name in args.model}  # an unknown name is an error here
    return Study.create(
        args.study or run_name("tune"),
        plans,
        {name: without(read.get(name, PAPER[name]), given) for name in plans},
        pruner=args.pruner or ("none" if args.grid else "halving"),
        whole_grid=args.grid,
        seed=args.search_seed,
    )


def _is_given(args: Namespace, name: str) -> bool:
    return getattr(args, name, None) is not None


def _again(args: Namespace) -> str:
    """How long to search is no property of the study."""
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
        facts[model] = {"best": best.to_dict(), "importances": shares}
    steps, total = time_share([*study.records(), *study.records(kind="seeds")])
    share = steps / max(total, 1e-9)
    print(f"training steps took {steps:.1f} s of {total:.1f} s, {share:.1%}; the rest evaluated, saved and chose")
    write_json(study.path / "summary.json", {"models": facts, "training_seconds": steps, "total_seconds": total})
    if found:
        with atomic(study.path / "importances.png") as temporary:
            temporary.write_bytes(draw_importances(found))
    print(f"study: {study.path}; its tables: fastcross paper --study {study.path}")
