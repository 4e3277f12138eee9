"""fastcross info: the environment, a run or a cache."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastcross.cli.explain import print_strongest
from fastcross.cli.printing import print_metrics
from fastcross.data import Cache
from fastcross.training.environment import describe_environment
from fastcross.training.run_folder import Run
from fastcross.training.trained import load_model


def info(args: Namespace) -> int:
    if args.path is None:
        print("\n".join(describe_environment()))
    elif (Path(args.path) / "config.json").exists():
        print_run(Run(args.path))
    else:
        print_cache(Cache.open(args.path))
    return 0


def print_run(run: Run) -> None:
    plan = run.config
    print(f"run {run.path}: {plan['model']}, {'finished' if run.result else 'unfinished'}")
    for name in ("options", "training", "cache", "device", "threads"):
        print(f"{name}: {_plain(plan[name])}")
    if run.result:
        print_metrics(run.result)
        print_strongest(load_model(run.path, "cpu"))
    else:
        print(f"continue with: fastcross train --resume {run.path}")


def print_cache(cache: Cache) -> None:
    schema = cache.schema
    print(f"cache {cache.path}, made from {', '.join(item['name'] for item in cache.manifest['inputs'])}")
    configuration = {name: value for name, value in cache.manifest["configuration"].items() if name != "columns"}
    print(f"made with: {_plain(configuration)}; encoder {cache.encoder_fingerprint[:12]}")
    print(cache.report)
    if cache.manifest["findings"]:
        return  # the report has named each column
    print(f"dense columns ({len(schema.dense_names)}): {', '.join(schema.dense_names)}")
    for kind, names, cardinalities in (
        ("categorical", schema.categorical_names, schema.cardinalities),
        ("multi-valued", schema.bag_names, schema.bag_cardinalities),
    ):
        if names:
            sizes = ", ".join(f"{name} {size:,}" for name, size in zip(names, cardinalities, strict=True))
            print(f"{kind} columns ({len(names)}) with their cardinalities: {sizes}")


def _plain(values: Any) -> str:
    if not isinstance(values, Mapping):
        return str(values)
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
