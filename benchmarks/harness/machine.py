"""Where a measurement was made: the machine and the versions, and nothing that changes from run to run."""

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from fastcross.ops.backends import instruction_set

PACKAGES = ("torch", "triton", "numpy", "deepctr-torch", "torchrec", "fuxictr", "torchfm")


def machine() -> dict[str, str]:
    """Processor, cores and memory; the GPU where there is one."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    described = {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "memory": f"{memory:.0f} GiB",
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    return described


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    try:
        found["CPU kernels"] = instruction_set()
    except ValueError:
        found["CPU kernels"] = "not built"
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
