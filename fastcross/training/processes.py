"""Where a training runs: the processes that train together, here just one, and the machine they run on."""

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastcross._version import __version__
from fastcross.models.base import Model
from fastcross.ops.backends import choose_kernels, instruction_set
from fastcross.optim import Optimizer, configure
from fastcross.training.config import CAPTURABLE, TrainingConfig, choose_device
from fastcross.training.run_folder import Run

PACKAGES = (
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
SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")


class Processes:
    """One process of ``size``, which calls each of these together with the others; the base class is alone."""

    rank, size = 0, 1

    def mean(self, value: Tensor) -> Tensor:
        """The mean of the ranks' values."""
        return value

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set on any rank."""
        return flags

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, one rank after the other."""
        return rows

    def share(self, value: Any) -> Any:
        """What rank 0 has."""
        return value

    def place(
        self, model: Model, config: TrainingConfig, *, device: str, sharding: str | None, embedding: str
    ) -> tuple[Any, Optimizer]:
        """The model where it is trained, and its optimiser."""
        if sharding is not None:
            raise ValueError(f"sharding {sharding!r} needs the processes of fastcross.distributed.sharding.join")
        model = model.to(choose_device(device))
        return model, make_optimizer(model, config)

    def open_run(self, path: Path | str) -> Run:
        """A run folder, to be written and read by all of them."""
        return Run(path)


ALONE = Processes()


def make_optimizer(model: Model, config: TrainingConfig) -> Optimizer:
    """The configuration's, for a model that is where it is trained: on a GPU one whose steps can be captured."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    capturable = on_gpu and config.graph != "off" and config.optimizer in CAPTURABLE
    return configure(model, lr=config.lr, name=config.optimizer, capturable=capturable)


def describe_environment() -> Iterator[str]:
    """What a report of a defect should say, line by line."""
    yield f"fastcross {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield (
        f"CPU: {_processor()}, {_usable_cores()} cores to use of {os.cpu_count()}, {torch.get_num_threads()} threads"
    )
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield f"GPU: {', '.join(gpus) or 'none'}; PyTorch is built for {_built_for()}"
    yield f"backends: {', '.join(_backends())}"
    yield "packages: torch " + torch.__version__ + "".join(f", {name} {_version(name)}" for name in PACKAGES)
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    yield "environment: " + (", ".join(f"{name}={value}" for name, value in settings.items()) or "nothing set")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _backends() -> list[str]:
    """What can run here, and why the others cannot."""
    found = ["torch", "reference"]
    for name, device in (("cpu", "cpu"), ("triton", "cuda" if torch.cuda.is_available() else "cpu")):
        try:
            found.append(_detailed(choose_kernels(name, torch.device(device), torch.float32)))
        except ValueError as error:
            found.append(f"not {name} ({error})")
    return found


def _detailed(backend: str) -> str:
    return f"cpu ({instruction_set()})" if backend == "cpu" else backend


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
