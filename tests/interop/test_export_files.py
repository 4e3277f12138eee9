"""What is exported stands there whole or not at all, whatever happens on the way; and one hint says what to install."""

import subprocess
import sys

import pytest
import torch

import fastcross
from fastcross.interop import export as export_module
from fastcross.interop.export import export

# As on a full disk: from the moment the model is compiled no file may grow beyond 100 kB, and write(2) fails.
FULL = """
import resource, sys, torch, torch._inductor, fastcross

def fill_the_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

def then(function, after):
    def both(*args, **kwargs):
        result = function(*args, **kwargs)
        after()
        return result
    return both

path = sys.argv[1]
if path.endswith("pt2"):
    torch._inductor.aot_compile = then(torch._inductor.aot_compile, fill_the_disk)
else:
    fill_the_disk()
torch.manual_seed(0)
model = fastcross.DCN([10_000], 4, embedding_dim=16, cross_layers=2, deep_layers=(16,))
try:
    fastcross.export(model, path, (torch.randn(3, 4), torch.zeros(3, 1, dtype=torch.int64)), to=path.rsplit(".")[-1])
except OSError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("before", [None, b"the model of yesterday"], ids=["", "overwriting"])
@pytest.mark.parametrize("to", ["pt2", "onnx"])
def test_full_disk(tmp_path, to, before):
    if to == "onnx":
        pytest.importorskip("onnxscript")
    path = tmp_path / f"m.{to}"
    if before:
        path.write_bytes(before)
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1] == f"OSError: [Errno 27] cannot be written: File too large: '{path}'"
    assert "frame #" not in done.stderr
    assert list(tmp_path.iterdir()) == ([path] if before else [])
    assert not before or path.read_bytes() == before


def test_a_compiler_that_fails_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    expected = r"m\.pt2: PyTorch's compiler failed \([\d,]+ MiB are free in .*\): \S"
    # monkeypatch would delete the option instead of setting it back: it is no attribute of its own
    with torch._inductor.config.patch({"cpp.cxx": ("false",)}), pytest.raises(RuntimeError, match=expected) as raised:
        export(fastcross.CrossNetwork(5, 3), tmp_path / "m.pt2", torch.randn(2, 5))
    assert len(str(raised.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_tables_that_no_protobuf_holds_lie_beside_the_model(tmp_path, monkeypatch):
    """The two files are moved into place together: 0.1.0's command lost the second."""
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(export_module, "PROTOBUF_BYTES", 1000)
    model = fastcross.CrossNetwork(512, 32).eval()
    path = export(model, tmp_path / "m.onnx", torch.randn(3, 512), to="onnx")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert (tmp_path / "m.onnx.data").stat().st_size >= 512 * 32 * 4
    x = torch.randn(5, 512)
    (found,) = onnxruntime.InferenceSession(path).run(None, {"x0": x.numpy()})
    torch.testing.assert_close(torch.as_tensor(found), model(x).detach(), rtol=1e-5, atol=1e-5)


def test_one_hint_for_what_is_missing(tmp_path, monkeypatch):
    for package in ("onnx", "onnxscript"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError) as raised:
        export(fastcross.CrossNetwork(4, 2), tmp_path / "m.onnx", torch.randn(2, 4), to="onnx")
    assert "exporting to onnx needs onnx and onnxscript" in str(raised.value)
    assert str(raised.value).count("pip install") == 1
    assert "[export]" in str(raised.value)
    assert list(tmp_path.iterdir()) == []
