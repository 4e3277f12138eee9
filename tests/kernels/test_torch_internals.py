"""What PyTorch does not document and the CPU kernels use is as this version has it, and is not needed."""

import pytest
import torch

from fastcross.kernels.cpu import internals


def test_the_private_name_is_there():
    """The canary: where this fails, PyTorch took it away and the fallback runs, right but slower."""
    assert callable(torch._C._dynamo.guards._empty_strided_cpu)


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_made(dtype, fallback, monkeypatch):
    if fallback:
        monkeypatch.setattr(internals, "_empty_strided", None)
    make = internals.maker((3, 5), (8, 1), dtype)
    with torch.device("meta"):  # which is not for what a kernel writes to
        t = make()
    assert (t.shape, t.stride(), t.dtype, t.device.type) == ((3, 5), (8, 1), dtype, "cpu")
    assert t.untyped_storage().nbytes() >= (2 * 8 + 5) * dtype.itemsize
    assert t.data_ptr() % 64 == 0
    assert not t.requires_grad
    with torch.inference_mode():
        assert make().is_inference()
    assert internals.maker((0, 5), (5, 1), dtype)().shape == (0, 5)


def test_what_is_filled():
    """In the deterministic mode of the tests fresh memory is NaN."""
    assert internals.filling_maker((3, 5), (5, 1), torch.float32)().isnan().all()
