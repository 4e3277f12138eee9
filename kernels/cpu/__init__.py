"""The CPU kernels, in C++: one library, which registers its operators with PyTorch when it is loaded."""

from pathlib import Path

import torch

LIBRARY = Path(__file__).parent / "library.abi3.so"
BUILD = "pip install --no-build-isolation -e ."
MISSING = f"the C++ kernels, which were not built; build them with: {BUILD}"


def load() -> bool:
    """Loads the library; False where it was not built. One that cannot be loaded raises, and says why."""
    if not LIBRARY.is_file():
        return False
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        raise ImportError(f"fastcross's CPU kernels cannot be loaded ({error}); build them again: {BUILD}") from error
    return True
