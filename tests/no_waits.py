"""A mode in which an operator whose result depends on data raises: on a GPU the host would wait for it."""

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
        return function(*args, **(kwargs or {}))
