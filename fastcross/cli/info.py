"""fastcross info: the environment, a run or a cache."""

import contextlib
import importlib.metadata
import os
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
from fastcross.ops.backends import choose
from fastcross.training.run_folder import Run
from fastcross.training.trained import Trained, load_model

PACKAGES = (
    "numba",
    "triton",
    "numpy",
    "pyarrow",
    "safetensors",
    "tqdm",
    "matplotlib",
    "onnx",
    "onnxscript",
    "torchrec",
)
SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")


def info(args: Namespace) -> int:
    if args.path is None:
        print_environment()
    elif (Path(args.path) / "config.json").exists():
        print_run(Run(args.path))
    else:
        print_cache(Cache.open(args.path))
    return 0


def print_environment() -> None:
    """What a report of a defect should say."""
    print(f"fastcross {__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"CPU: {_processor()}, {_usable_cores()} cores to use of {os.cpu_count()}, {torch.get_num_threads()} threads")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"GPU: {', '.join(gpus) or 'none'}; PyTorch is built for {_built_for()}")
    print(f"backends: {', '.join(_backends())}")
    print("packages: torch " + torch.__version__ + "".join(f", {name} {_version(name)}" for name in PACKAGES))
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    print("environment: " + (", ".join(f"{name}={value}" for name, value in settings.items()) or "nothing set"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _backends() -> list[str]:
    """What can run here, and why the others cannot."""
    found = ["torch", "reference"]
    for name, device in (("numba", "cpu"), ("triton", "cuda" if torch.cuda.is_available() else "cpu")):
        try:
            found.append(choose(name, torch.device(device), torch.float32))
        except ValueError as error:
            found.append(f"not {name} ({error})")
    return found


def _built_for() -> str:
    return (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if (hip := torch.version.hip) else "CPUs"
    )


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """Its name, as Linux tells it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()


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
