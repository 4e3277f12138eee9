"""What launch.py needs to know of a device, from the properties that PyTorch has cached: no synchronisation."""

import functools

import torch

from fastcross.kernels.gpu.launch import Hardware


@functools.cache
def of(device: torch.device) -> Hardware:
    """The defaults stand for the interpreter and for devices whose properties PyTorch does not give."""
    if device.type != "cuda":
        return Hardware()
    properties = torch.cuda.get_device_properties(device)
    warp_size = getattr(properties, "warp_size", 32)
    return Hardware(properties.multi_processor_count, warp_size, amd=torch.version.hip is not None)
