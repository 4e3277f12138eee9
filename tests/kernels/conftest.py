import pytest
import torch
from triton_place import INTERPRETING


@pytest.fixture
def device():
    """Whose tensors the Triton kernels take here."""
    if INTERPRETING:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no GPU, and TRITON_INTERPRET is not set")
    return torch.device("cuda", 0)
