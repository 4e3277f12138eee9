"""fastcross info: the environment, a run or a cache."""

from argparse import Namespace
from pathlib import Path

from fastcross.cli.data import plain, print_cache
from fastcross.cli.printing import print_metrics
from fastcross.data import Cache
from fastcross.training.processes import describe_environment
from fastcross.training.run_folder import Run, load_model


def info(args: Namespace) -> int:
    if args.path is None:
        print("\n".join(describe_environment()))
        return 0
    path = Path(args.path)
    if (path / "config.json").exists():
        print_run(Run(path))
    elif (path / "manifest.json").exists():
        print_cache(Cache.open(path))
    elif not path.exists():
        raise ValueError(f"there is no {path}")
    else:
        raise ValueError(f"{path} is neither a run folder, with a config.json, nor a cache, with a manifest.json")
    return 0


def print_run(run: Run) -> None:
    plan = run.config
    print(f"run {run.path}: {plan['model']}, {'finished' if run.result else 'unfinished'}")
    for name in ("options", "training", "cache", "device", "threads"):
        print(f"{name}: {plain(plan[name])}")
    if run.result:
        print_metrics(run.result)
        from fastcross.cli.explain import print_strongest  # draws, with matplotlib: only where it is needed

        print_strongest(load_model(run.path, "cpu"))
    else:
        print(f"continue with: fastcross train --resume {run.path}")
