"""Bad input is refused at the door, naming both values; the backend asked for is the one that runs, or an error."""

import subprocess
import sys

import pytest
import torch

import fastcross
from fastcross.ops import backends

X0, W, B, V = torch.randn(6, 5), torch.randn(3, 5), torch.randn(3, 5), torch.randn(2, 5)


def network(x0=X0, weight=W, bias=B, **options):
    return fastcross.cross_network(x0, weight, bias, **options)


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: network(weight=torch.randn(3, 4)), ValueError, ["(3, 4)", "(6, 5)"]),
        (lambda: network(weight=torch.randn(5)), ValueError, ["(5,)", "(6, 5)"]),
        (lambda: network(weight=torch.randn(0, 5)), ValueError, ["(0, 5)", "(6, 5)"]),
        (lambda: network(bias=torch.randn(2, 5)), ValueError, ["(2, 5)", "3 rows of weight"]),
        (lambda: network(bias=torch.randn(3, 6)), ValueError, ["(3, 6)", "(6, 5)"]),
        (lambda: network(weight=None), TypeError, ["weight is missing", "(6, 5)"]),
        (lambda: network(weight=[1.0]), TypeError, ["list", "(6, 5)"]),
        (lambda: network(x0=3.0), TypeError, ["float"]),
        (lambda: network(x0=torch.tensor(1.0)), TypeError, ["()"]),
        (lambda: network(x0=X0.long()), TypeError, ["torch.int64", "torch.float32"]),
        (lambda: network(weight=W.long()), TypeError, ["torch.int64", "torch.float32"]),
        (lambda: network(weight=W.to("meta")), ValueError, ["meta", "cpu"]),
        (lambda: network(backend="cuda"), ValueError, ["'cuda'", "triton, cpu"]),
        (lambda: network(backend="triton"), ValueError, ["GPU", "cpu"]),
        (
            lambda: network(x0=X0.to("meta").to(torch.float8_e5m2), weight=W.to("meta"), bias=None, backend="cpu"),
            ValueError,
            ["float8_e5m2", "float32"],
        ),
        (lambda: fastcross.cross_logits(X0, W, B, None), TypeError, ["head is missing", "(6, 5)"]),
        (lambda: fastcross.cross_logits(X0, W, B, torch.randn(2, 4)), ValueError, ["(2, 4)", "(6, 5)"]),
        (lambda: fastcross.cross_layer(X0, torch.randn(6, 4), W[0]), ValueError, ["x (6, 4)", "x0 (6, 5)"]),
        (lambda: fastcross.cross_layer(X0, X0.double(), W[0]), TypeError, ["torch.float64", "torch.float32"]),
        (lambda: fastcross.cross_layer(X0, None, W[0]), TypeError, ["NoneType", "(6, 5)"]),
        (lambda: fastcross.cross_layer(X0, X0, W), ValueError, ["(3, 5)", "(6, 5)"]),
        (lambda: fastcross.cross_layer(X0, X0.to("meta"), W[0]), ValueError, ["meta", "cpu"]),
    ],
)
def test_bad_input_is_named(call, error, names):
    with pytest.raises(error) as caught:
        call()
    for name in names:
        assert name in str(caught.value)


def test_auto_takes_the_fused_kernels_on_a_cpu(cpu_kernels):
    for x0, chosen in ((X0, "cpu"), (X0.half(), "cpu"), (X0.bfloat16(), "cpu"), (X0.to("meta"), "torch")):
        assert backends.choose("auto", x0) == chosen


def test_without_the_library_auto_warns_once_and_cpu_says_how_to_build_it():
    script = """
import warnings, torch
from pathlib import Path
from fastcross.kernels import cpu
cpu.LIBRARY = Path("nowhere.so")
import fastcross
x0, w = torch.randn(3, 4), torch.randn(2, 4)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compiled = torch.compile(fastcross.cross_network, backend="eager", fullgraph=True)
    for network in (compiled, fastcross.cross_network, compiled):
        assert torch.equal(network(x0, w), fastcross.cross_network(x0, w, backend="torch"))
(warned,) = [str(each.message) for each in caught if each.category is UserWarning]
assert "C++ kernels, which were not built" in warned
try:
    fastcross.cross_network(x0, w, backend="cpu")
except ValueError as error:
    assert "build them with: pip install" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_library_that_cannot_be_loaded_says_why(tmp_path):
    damaged = tmp_path / "library.abi3.so"
    damaged.write_bytes(b"no library")
    script = f"""
from pathlib import Path
from fastcross.kernels import cpu
cpu.LIBRARY = Path({str(damaged)!r})
import fastcross.ops
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "fastcross's CPU kernels cannot be loaded" in result.stderr
    assert "build them again: pip install" in result.stderr


def test_import_is_light():
    """Neither Triton nor a driver is touched by the import, nor by that of every public name."""
    script = "import sys; from fastcross import *; assert not {'triton'} & set(sys.modules); import torch; "
    subprocess.run([sys.executable, "-c", script + "assert not torch.cuda.is_initialized()"], check=True)
