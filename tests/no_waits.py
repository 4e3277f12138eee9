"""A mode in which an operator whose result depends on data raises: on a GPU the host would wait for it."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("_local_scalar_dense", "nonzero", "unique", "coalesce", "masked_select", "equal", "is_nonzero", "to_dense")


class NoWaits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.operators.append(name)
        by_mask = name.startswith("index") and any(
            index is not None and str(index.dtype) in ("torch.bool", "torch.uint8")
            for index in (args[1] if isinstance(args[1], (list, tuple)) else ())
        )
        if by_mask or (name != "is_coalesced" and name.strip("_").startswith(tuple(w.strip("_") for w in WAITS))):
            raise AssertionError(f"{function} waits for the device")
        if name == "clone" and args[0].is_sparse:
            # Autograd puts a gradient into .grad as it is; it makes a copy only where a mode like this one looks on.
            contents = args[0]._indices(), args[0]._values(), args[0].shape
            return torch.sparse_coo_tensor(*contents, check_invariants=False, is_coalesced=args[0].is_coalesced())
        return function(*args, **(kwargs or {}))
