"""What is exported runs elsewhere, for any batch size, with the same numbers; and stands there whole or not at all."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import fastcross
from fastcross.interop import export as export_module
from fastcross.interop.export import export, trace

BATCHES = (1, 2, 7, 512)


def dcn():
    torch.manual_seed(0)
    model = fastcross.DCN([100, 50, 7], 4, embedding_dim=5, cross_layers=3, deep_layers=(16, 8))
    nn.init.normal_(model.cross.bias)
    return model.eval()


def inputs(rows):
    return torch.randn(rows, 4), torch.randint(0, 7, (rows, 3))


def operators(program):
    return [node for node in program.graph.nodes if node.op == "call_function" and node.meta.get("val") is not None]


def test_graph_holds_plain_operators_of_the_closed_form():
    def wide(num_layers):
        """Operators that write a (B, d) tensor; casts to the dtype it has are none."""
        program = trace(fastcross.CrossNetwork(16, num_layers), torch.randn(3, 16))
        assert all(str(node.target).startswith("aten.") for node in operators(program))
        batch = program.graph.find_nodes(op="placeholder")[-1].meta["val"].shape
        written = [node for node in operators(program) if node.meta["val"].shape == batch]
        return [str(node.target) for node in written if "aten.to" not in str(node.target)]

    assert wide(2) == wide(8) == ["aten.mul.Tensor", "aten.add.Tensor"]


@pytest.mark.parametrize("backend", ["auto", "cpu", "triton", "torch"])
def test_no_custom_operator_whatever_the_backend(backend):
    program = trace(fastcross.CrossNetwork(8, 2, backend=backend), torch.randn(3, 8))
    assert not any("fastcross" in str(node.target) for node in operators(program))


@pytest.mark.parametrize("example_rows", [1, 2, 5])
def test_dynamic_batch(example_rows):
    model = dcn()
    program = trace(model, inputs(example_rows)).module()
    for rows in BATCHES:
        batch = inputs(rows)
        torch.testing.assert_close(program(*batch), model(*batch))


def test_a_model_in_training_is_exported_for_evaluation_and_goes_on_training():
    model = dcn().train()
    model.deep[1].eval()
    program = trace(model, inputs(3)).module()
    assert model.training
    assert [layer.training for layer in model.deep[:3]] == [True, False, True]
    batch = inputs(4)
    torch.testing.assert_close(program(*batch), model.eval()(*batch))


def test_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = dcn()
    path = export(model, tmp_path / "dcn.onnx", inputs(3), to="onnx")
    session = onnxruntime.InferenceSession(path)
    names = [entry.name for entry in session.get_inputs()]
    assert [entry.shape for entry in (*session.get_inputs(), *session.get_outputs())] == [
        ["batch", 4],
        ["batch", 3],
        ["batch"],
    ]
    for rows in BATCHES:
        batch = inputs(rows)
        (logits,) = session.run(None, {name: x.numpy() for name, x in zip(names, batch, strict=True)})
        torch.testing.assert_close(torch.from_numpy(logits), model(*batch).detach(), rtol=1e-5, atol=1e-5)
    assert [file.name for file in tmp_path.iterdir()] == ["dcn.onnx"]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    return dcn(), export(dcn(), folder / "dcn.pt2", inputs(3))


SERVE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("fastcross", "kernels", "cpu"):
            raise ModuleNotFoundError(f"{name} is not on the serving machine")

sys.meta_path.insert(0, Blocked())
import torch
model = torch._inductor.aoti_load_package(sys.argv[1])
batches = torch.load(sys.argv[2])
torch.save([model(*batch) for batch in batches], sys.argv[3])
assert not any(name.startswith("fastcross") for name in sys.modules)
"""


def test_package_runs_without_fastcross(package, tmp_path):
    model, path = package
    batches = [inputs(rows) for rows in BATCHES]
    torch.save(batches, tmp_path / "in.pt")
    command = [sys.executable, "-I", "-c", SERVE, path, tmp_path / "in.pt", tmp_path / "out.pt"]
    subprocess.run(command, check=True, cwd=tmp_path)
    for batch, served in zip(batches, torch.load(tmp_path / "out.pt"), strict=True):
        torch.testing.assert_close(served, model(*batch).detach(), rtol=1e-5, atol=1e-5)


def test_eight_threads_answer_like_one(package):
    model, path = package
    served = torch._inductor.aoti_load_package(str(path))
    requests = [inputs(rows) for rows in BATCHES * 10]
    for answer in (served, torch.no_grad()(model)):
        alone = [answer(*request) for request in requests]
        with ThreadPoolExecutor(8) as threads:
            together = list(threads.map(lambda request, answer=answer: answer(*request), requests))
        for a, b in zip(alone, together, strict=True):  # a GEMM's last bit may depend on where its buffers lie
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_swapped_model_exports_the_closed_form():
    torchfm = pytest.importorskip("torchfm.model.dcn")
    model = torchfm.DeepCrossNetworkModel([20] * 3, 4, num_layers=6, mlp_dims=(8,), dropout=0.0)
    x = torch.randint(0, 20, (5, 3))
    expected = model.eval()(x)
    fastcross.swap(model)
    program = trace(model, x)
    batch = program.graph.find_nodes(op="placeholder")[-1].meta["val"].shape[0]
    wide = [node for node in operators(program) if node.meta["val"].shape == (batch, 12)]
    assert [str(node.target) for node in wide if "aten.to" not in str(node.target)] == [
        "aten.view.default",  # the embeddings
        "aten.mul.Tensor",
        "aten.add.Tensor",
    ]
    torch.testing.assert_close(program.module()(x), expected)
    for rows in (1, 9):
        assert program.module()(torch.randint(0, 20, (rows, 3))).shape == (rows,)


def test_multi_valued_features_vary_in_length_on_their_own():
    model = fastcross.DCN([7], 2, embedding_dim=4, bag_cardinalities=[9], cross_layers=2, deep_layers=(8,)).eval()

    def batch(rows, values):
        offsets = torch.arange(rows) * values // rows
        return torch.randn(rows, 2), torch.randint(0, 7, (rows, 1)), ((torch.randint(0, 9, (values,)), offsets),)

    program = trace(model, batch(3, 5)).module()
    for rows, values in ((1, 4), (2, 2), (6, 3)):
        given = batch(rows, values)
        torch.testing.assert_close(program(*given), model(*given))


def test_bad_input(tmp_path, monkeypatch):
    model = fastcross.CrossNetwork(4, 2)
    with pytest.raises(ValueError, match="to must be one of pt2, onnx; got 'tflite'"):
        export(model, tmp_path / "m", torch.randn(2, 4), to="tflite")
    with pytest.raises(ValueError, match=r"must be named \*\.pt2; got m\.bin"):
        export(model, tmp_path / "m.bin", torch.randn(2, 4))
    with pytest.raises(FileNotFoundError, match="no folder"):
        export(model, tmp_path / "nowhere" / "m.pt2", torch.randn(2, 4))
    with pytest.raises(ValueError, match="at least one row"):
        trace(model, torch.randn(0, 4))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs onnxscript; .*pip install .*\[export\]"):
        export(model, tmp_path / "m.onnx", torch.randn(2, 4), to="onnx")
    assert not list(tmp_path.iterdir())


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
