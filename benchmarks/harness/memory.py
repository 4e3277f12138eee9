"""What a pass keeps for its backward pass, and how much memory a call takes at most."""

import ctypes
import gc
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor


def kept_bytes(forward: Callable[[], Tensor], leaves: Iterable[Tensor]) -> int:
    """Bytes that ``forward`` keeps for the backward pass beyond its inputs and parameters, each storage once."""
    own = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward()
    total = sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in own)
    del y
    return total


def peak_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """The most memory that one call held beyond what was there before it; None where the system does not tell."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed goes back to the system, to be counted anew
    reset.write_text("5")  # Linux: the peak resident size starts again from the present one
    before = _resident("VmRSS")
    step()
    return max(0, _resident("VmHWM") - before)


def available_bytes(device: torch.device) -> float:
    """What can still be allocated; infinity where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), float("inf"))


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
