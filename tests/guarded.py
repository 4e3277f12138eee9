"""Tensors between protected pages: an access beyond one ends the process."""

import ctypes
import mmap
import os

import torch

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Guarded:
    """Tensors that begin, or end, at a page that the system protects."""

    def __init__(self, at_end):
        self.at_end, self.maps = at_end, []

    def empty_strided(self, shape, stride, dtype):
        elements = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        size = elements * dtype.itemsize
        pages = max(1, -(-size // PAGE))
        memory = mmap.mmap(-1, (pages + 2) * PAGE)
        self.maps.append(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for page in (start, start + (pages + 1) * PAGE):
            assert LIBC.mprotect(page, PAGE, 0) == 0, os.strerror(ctypes.get_errno())
        offset = PAGE + (pages * PAGE - size if self.at_end else 0)
        flat = torch.frombuffer(memory, dtype=dtype, count=max(elements, 1), offset=offset) if size else torch.empty(0)
        flat = flat.to(dtype)[:elements]
        if dtype.is_floating_point:
            flat.fill_(float("nan"))  # what is read before it is written shows
        return flat.as_strided(shape, stride)

    def empty(self, shape, dtype):
        stride = [1]
        for n in reversed(shape[1:]):
            stride.insert(0, stride[0] * n)
        return self.empty_strided(shape, stride, dtype)

    def copy(self, tensor):
        return self.empty_strided(tensor.shape, tensor.stride(), tensor.dtype).copy_(tensor)
