"""fastcross info: the environment, a run or a cache."""

import importlib.metadata
import importlib.util
import platform
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastcross._version import __version__
from fastcross.cli.printing import print_metrics
from fastcross.data import Cache
from fastcross.models.dcn import DCN
from fastcross.training.run_folder import Run
from fastcross.training.trained import Trained, load_model


def info(args: Namespace) -> int:
    if args.path is None:
        print_environment()
    elif (Path(args.path) / "config.json").exists():
        print_run(Run(args.path))
    else:
        print_cache(Cache.open(args.path))
    return 0


def print_environment() -> None:
    def version(name: str) -> str:
        return importlib.metadata.version(name) if importlib.util.find_spec(name) else "not installed"

    print(f"fastcross {__version__}, Python {platform.python_version()}, PyTorch {torch.__version__}")
    print(f"CPU: {torch.get_num_threads()} threads; backend numba: {version('numba')}")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"GPU: {', '.join(gpus) or 'none'}; backend triton: {version('triton')}")
    for name in ("pyarrow", "safetensors", "tqdm", "matplotlib", "onnx", "torchrec"):
        print(f"{name}: {version(name)}")


def print_run(run: Run) -> None:
    plan = run.config
    print(f"run {run.path}: {plan['model']}, {'finished' if run.result else 'unfinished'}")
    for name in ("options", "training", "cache", "device", "threads"):
        print(f"{name}: {_plain(plan[name])}")
    if run.result:
        print_metrics(run.result)
        print_crosses(load_model(run.path, "cpu"))
    else:
        print(f"continue with: fastcross train --resume {run.path}")


def print_crosses(trained: Trained) -> None:
    """What the cross network found: the pairs of features that it crosses most strongly."""
    schema = trained.schema
    if isinstance(trained.model, DCN) and trained.model.parallel:
        names = (*schema.categorical_names, *schema.bag_names, *schema.dense_names)
        strongest = trained.model.strongest_crosses(5, names)
        print("strongest crosses: " + ", ".join(f"{' × '.join(pair)} {strength:.3g}" for pair, strength in strongest))


def print_cache(cache: Cache) -> None:
    schema = cache.schema
    print(f"cache {cache.path}, made from {', '.join(item['name'] for item in cache.manifest['inputs'])}")
    print(f"made with: {_plain(cache.manifest['configuration'])}")
    print(f"rows: {_plain(cache.sizes)}")
    print(f"label: {schema.task}, {schema.num_outputs} output{'s' if schema.num_outputs > 1 else ''}")
    print(f"dense columns ({len(schema.dense_names)}): {', '.join(schema.dense_names)}")
    for kind, names, cardinalities in (
        ("categorical", schema.categorical_names, schema.cardinalities),
        ("multi-valued", schema.bag_names, schema.bag_cardinalities),
    ):
        sizes = ", ".join(f"{name} {size:,}" for name, size in zip(names, cardinalities, strict=True))
        print(f"{kind} columns ({len(names)}) with their cardinalities: {sizes}")


def _plain(values: Any) -> str:
    if not isinstance(values, Mapping):
        return str(values)
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
