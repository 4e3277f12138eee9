"""What fastcross runs on: the machine, the versions, and which backends can run here."""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator

import torch

from fastcross._version import __version__
from fastcross.extras import EXTRAS, install_command
from fastcross.kernels import cpu
from fastcross.ops.backends import choose_kernels, instruction_set

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


def describe_environment() -> Iterator[str]:
    """The lines that a bug report should contain."""
    yield f"fastcross {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield (
        f"CPU: {_processor()}, {_usable_cores()} cores to use of {os.cpu_count()}, {torch.get_num_threads()} threads"
    )
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    yield f"GPU: {', '.join(gpus) or 'none'}; driver {_driver()}; PyTorch is built for {_built_for()}"
    yield f"backends: {', '.join(_backends())}"
    yield "packages: torch " + torch.__version__ + "".join(f", {name} {_version(name)}" for name in PACKAGES)
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    yield "environment: " + (", ".join(f"{name}={value}" for name, value in settings.items()) or "nothing set")


def missing_parts() -> list[tuple[str, str]]:
    """What fastcross could use and does not find, each with the command that brings it."""
    found = []
    if not cpu.LIBRARY.is_file():
        found.append(("the C++ kernels", cpu.BUILD))
    if importlib.util.find_spec("triton") is None:
        found.append(("Triton, of the GPU kernels", "pip install triton"))
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        found.append(("a C++ compiler, of torch.compile on a CPU", "apt-get install g++"))
    absent = [name for name in EXTRAS["train"] if importlib.util.find_spec(name) is None]
    return [*found, (", ".join(absent), install_command("train"))] if absent else found


def _gpu(index: int) -> str:
    its = torch.cuda.get_device_properties(index)
    kind = getattr(its, "gcnArchName", "") or f"sm_{its.major}{its.minor}"
    return f"{its.name} ({kind}, {its.multi_processor_count} processors, {its.total_memory / 2**30:.0f} GiB)"


def _driver() -> str:
    """As the kernel's modules tell it."""
    for path in ("/sys/module/nvidia/version", "/sys/module/amdgpu/version"):
        with contextlib.suppress(OSError), open(path) as file:
            return file.read().strip()
    return "none"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _backends() -> list[str]:
    """The backends that can run here, and for each other one the reason."""
    found = ["torch", "reference"]
    for name, device in (("cpu", "cpu"), ("triton", "cuda" if torch.cuda.is_available() else "cpu")):
        try:
            found.append(_detailed(choose_kernels(name, torch.device(device), torch.float32)))
        except ValueError as error:
            found.append(f"not {name} ({error})")
    return found


def _detailed(backend: str) -> str:
    return (
        f"cpu ({instruction_set()}, {cpu.LIBRARY.name}, PyTorch's stable ABI of 2.10)" if backend == "cpu" else backend
    )


def _built_for() -> str:
    return (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if (hip := torch.version.hip) else "CPUs"
    )


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """The processor's name, from Linux."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()
