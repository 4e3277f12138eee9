"""Runs as files that serve: raw values at their oddest, and the encoder beside a graph of ids."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch

from fastcross.data import Columns, prepare, read_for_prediction
from fastcross.data.blocks import to_block
from fastcross.data.encoder import Encoder, Vocabulary
from fastcross.data.generate import write_click_log
from fastcross.data.numbers import Number, Numbers
from fastcross.interop import export as export_module
from fastcross.interop.raw_values import check_expressible
from fastcross.interop.serving import export_run
from fastcross.models.dcn import DCN
from fastcross.training.experiment import build
from tests.serving_tables import ALONE, COLUMNS, EXAMPLES, write_movies

pytest.importorskip("onnxscript")

onnxruntime = pytest.importorskip("onnxruntime")
HOURS = Vocabulary(pa.array(["12", "0", None, "23"]))
DAYS = Vocabulary(pa.array(["Thursday", "Monday", "Wednesday"]))


def encoder_of(columns, categorical=(), bags=(), format="parquet"):
    numbers = Numbers(tuple(Number(t == "log", mean=i, scale=0.5) for i, t in enumerate(columns.transforms)))
    return Encoder(format, columns, numbers, tuple(categorical), tuple(bags))


def model_of(encoder, **options):
    torch.manual_seed(0)
    schema = encoder.schema
    sizes = {"bag_cardinalities": schema.bag_cardinalities, "num_outputs": schema.num_outputs}
    options = {"cross_layers": 1, "deep_layers": (4,), "batch_norm": False} | sizes | options
    return DCN(schema.cardinalities, len(schema.dense_names), 64, **options).eval()


def expected(model, encoder, table):
    batch, _ = encoder.encode(to_block(pa.table(table), encoder.columns, labelled=False))
    logits = model(batch.dense, batch.categorical, batch.bags).detach().double()
    return torch.sigmoid(logits).numpy() if logits.dim() == 1 else torch.softmax(logits, 1).numpy()


def objects(*values):
    return np.array(values, object)


def test_names_gaps_times_weights_and_tables_beside_the_file(tmp_path, monkeypatch):
    """Columns that are called as the graph's own values are; a vocabulary with "", one with "None", one with null."""
    monkeypatch.setattr(export_module, "PROTOBUF_BYTES", 1000)
    columns = Columns(
        "label",
        (),
        ("dense", "select", "val_0"),
        ("probability", "bags_0_0"),
        datetimes=("when",),
        weights={"probability": "categorical"},
        classes=("no", "yes"),
    )
    texts = ["x", "", None], ["7", "None"], [None, "é"]
    vocabularies = [Vocabulary(pa.array(each)) for each in texts]
    bags = Vocabulary(pa.array([f"t{i}" for i in range(300)])), Vocabulary(pa.array(["a", None]))
    encoder = encoder_of(columns, (*vocabularies, HOURS, DAYS), bags)
    model = model_of(encoder)
    exported = export_run(model, encoder, tmp_path / "model.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    session = onnxruntime.InferenceSession(exported.path)
    assert [entry.name for entry in session.get_inputs()] == [port.name for port in exported.inputs]
    noon = 1_706_702_400  # Wednesday, 2024-01-31 12:00
    times = [noon, noon * 10**3, noon * 10**6, noon * 10**9, -1, None, None]  # -1: Wednesday, 23:59:59
    raw = {
        "dense": objects("x", "", None, "nan", "new", "x", "x"),
        "select": objects(7, "None", "", None, "8", 7, 7),
        "val_0": objects("é", None, "", np.nan, "<NA>", "e", "é"),
        "when": np.array([np.nan if time is None else time for time in times], float),
        "probability_in": objects("t0|t299|new", "", "t1", "t1|t1", None, "t5", "t7|t8"),
        "bags_0_0": objects("a", "a||a", "", "b|a", None, "a|", "|"),
        "categorical": objects("0.5|2|1", "", "3", "1|0.25", "", "1", "1|1"),
    }
    raw["when"][-1] = np.array(["NaT"], "datetime64[us]").astype(float)[0]
    table = {
        "dense": ["x", "", None, None, "new", "x", "x"],
        "select": ["7", "None", None, "None", "8", "7", "7"],
        "val_0": ["é", None, None, None, None, "e", "é"],
        "when": pa.array([None if time is None else min(time, noon) * 10**6 for time in times], pa.timestamp("us")),
        "probability": [["t0", "t299", "new"], [], ["t1"], ["t1", "t1"], None, ["t5"], ["t7", "t8"]],
        "bags_0_0": [["a"], ["a", None, "a"], [], ["b", "a"], [], ["a", None], [None, None]],
        "categorical": [[0.5, 2.0, 1.0], [], [3.0], [1.0, 0.25], [], [1.0], [1.0, 1.0]],
    }
    (found,) = session.run(["probability"], raw)
    np.testing.assert_allclose(found, expected(model, encoder, table), rtol=0, atol=1e-6)
    one = {name: values[:1] for name, values in raw.items()}
    np.testing.assert_allclose(session.run(None, one)[0], found[:1], rtol=0, atol=1e-6)
    # One weight too few, and one too many: as many as there are values over all rows.
    wrong = raw | {"categorical": objects("0.5|2", "", "3|1", "1|0.25", "", "1", "1|1")}
    (partly,) = session.run(None, wrong)
    assert np.isnan(partly).tolist() == [True, False, True, False, False, False, False]
    np.testing.assert_array_equal(partly[3:], found[3:])
    for name in raw:
        with pytest.raises(Exception, match="ONNXRuntimeError"):
            session.run(None, raw | {name: raw[name][:1]})


def test_numbers_alone_and_bags_alone(tmp_path):
    """Three classes, mixed transforms, numbers that float32 would round; rows without any value."""
    columns = Columns("label", ("a", "b", "c"), (), (), transform=("log", "none", "standard"), classes=("x", "y", "z"))
    encoder = encoder_of(columns)
    model = model_of(encoder)
    session = onnxruntime.InferenceSession(export_run(model, encoder, tmp_path / "numbers.onnx").path)
    values = np.array([[-5, 0.25, 3], [np.nan, np.nan, np.nan], [1e6, -2, 16777217.0]])
    (found,) = session.run(["probability"], {name: values[:, i] for i, name in enumerate("abc")})
    table = {name: pa.array(values[:, i], from_pandas=True) for i, name in enumerate("abc")}
    np.testing.assert_allclose(found, expected(model, encoder, table), rtol=0, atol=1e-6)

    columns = Columns("label", (), (), ("tags",), separators={"tags": ", "}, classes=("0", "1"))
    encoder = encoder_of(columns, (), (Vocabulary(pa.array(["a", "b"])),), "csv")
    model = model_of(encoder)
    session = onnxruntime.InferenceSession(export_run(model, encoder, tmp_path / "bags.onnx").path)
    for texts in (["a, b", "", "NA", "c, a, a"], ["", "?"], ["b"]):
        (found,) = session.run(["probability"], {"tags": objects(*texts)})
        lists = [text.split(", ") if text not in ("", "NA", "?") else [] for text in texts]
        np.testing.assert_allclose(
            found, expected(model, encoder, {"tags": pa.array(lists, pa.list_(pa.string()))}), rtol=0, atol=1e-6
        )


def test_the_calendar_of_eight_centuries(tmp_path):
    """Leap years and those that are none, in seconds of Unix time, before 1970 and after."""
    days = np.arange(-136_000, 158_000)
    table = pa.table({"at": pa.array(days * 86400 + 4321, pa.timestamp("s")), "label": days % 2})
    encoder = prepare([table], tmp_path / "c", min_frequency=1).encoder
    assert encoder.schema.dense_names == ("at.day", "at.year", "at.days")
    assert encoder.schema.categorical_names == ("at.weekday", "at.month")
    model = model_of(encoder, embedding_std=3.0)
    session = onnxruntime.InferenceSession(export_run(model, encoder, tmp_path / "dates.onnx").path)
    raw = np.append(days * 86400.0 + 4321, np.nan)
    (found,) = session.run(None, {"at": raw})
    times = pa.array(raw, pa.float64(), from_pandas=True).cast(pa.int64()).cast(pa.timestamp("s"))
    np.testing.assert_allclose(found, expected(model, encoder, {"at": times}), rtol=0, atol=1e-6)


def test_what_cannot_be_said_in_onnx(monkeypatch):
    columns = Columns("label", (), ("shop",), ("tags",), classes=("0", "1"))
    shops = Vocabulary(pa.array(["a|b"]))  # a separator in a column that is not taken apart
    check_expressible(encoder_of(columns, (shops,), (Vocabulary(pa.array(["x", None])),)))
    with pytest.raises(ValueError, match=r"column tags has the value 'x\|y', with the separator '\|' .*; --encoded"):
        check_expressible(encoder_of(columns, (shops,), (Vocabulary(pa.array(["x|y"])),)))
    monkeypatch.setattr("fastcross.interop.raw_values.LARGEST_TEXTS", 1)
    with pytest.raises(ValueError, match=r"the vocabularies take .* GiB, and an ONNX file has room for .*; --encoded"):
        check_expressible(encoder_of(columns, (shops,), (Vocabulary(pa.array(["x"])),)))


# What a server does: reads a file with Arrow, and hands the rows to the reader.
READ = """
import sys
sys.path.insert(0, sys.argv[4])
import numpy, pyarrow, pyarrow.csv, read_encoder
about, texts = read_encoder.load(sys.argv[1])
columns = about["columns"]
times = dict.fromkeys(columns["datetimes"] or (), pyarrow.timestamp("us"))
names = [*columns["categorical"], *(columns["bags"] or ()), *columns["weights"].values()]
types = dict.fromkeys(names, pyarrow.string()) | dict.fromkeys(columns["dense"], pyarrow.float64()) | times
null = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?"]
rows = pyarrow.csv.read_csv(
    sys.argv[2],
    parse_options=pyarrow.csv.ParseOptions(delimiter="\\t" if about["format"] == "criteo" else ","),
    convert_options=pyarrow.csv.ConvertOptions(column_types=types, null_values=null, strings_can_be_null=True),
)
numpy.savez(sys.argv[3], **read_encoder.encode(about, texts, rows))
"""


@pytest.fixture
def arrays_of(tmp_path):
    def arrays_of(encoder, rows):
        """By the reader, in a process that can import numpy and pyarrow alone."""
        script, out = tmp_path / "read.py", tmp_path / "arrays.npz"
        script.write_text(READ)
        command = [
            sys.executable,
            "-I",
            "-c",
            ALONE,
            "numpy,pyarrow,read_encoder",
            script,
            encoder,
            rows,
            out,
            EXAMPLES,
        ]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return dict(np.load(out))

    return arrays_of


def assert_same_batch(found, batch):
    expected = {"dense": batch.dense, "categorical": batch.categorical}
    for i, bag in enumerate(batch.bags):
        expected |= {f"bags_{i}_0": bag.values, f"bags_{i}_1": bag.offsets}
        expected |= {} if bag.weights is None else {f"bags_{i}_2": bag.weights}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(found[name], tensor.numpy(), err_msg=name)


def test_the_reader_is_short():
    assert len((EXAMPLES / "read_encoder.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("options", [{}, {"hash_buckets": 50}], ids=["vocabularies", "hashed"])
def test_ratings(tmp_path, arrays_of, options):
    """Bags, weights, date-times, gaps, unseen values."""
    write_movies(tmp_path / "old.csv", 800)
    write_movies(tmp_path / "new.csv", 300, seed=1, new=15)
    cache = prepare(tmp_path / "old.csv", tmp_path / "cache", columns=COLUMNS, **options)
    (batch,) = read_for_prediction(tmp_path / "new.csv", cache)
    assert_same_batch(arrays_of(tmp_path / "cache" / "encoder", tmp_path / "new.csv"), batch)


def test_compiled_model_and_its_encoder(tmp_path, arrays_of):
    (tmp_path / "table.csv").write_text("label,x,shop\n" + "".join(f"{i % 2},{i % 7}.5,s{i % 5}\n" for i in range(300)))
    cache = prepare(tmp_path / "table.csv", tmp_path / "cache", columns=Columns("label", ("x",), ("shop",)))
    torch.manual_seed(0)
    model = build("lr", {}, cache.schema).eval()
    exported = export_run(model, cache.encoder, tmp_path / "model.pt2")
    assert exported.encoder == tmp_path / "model.encoder"
    assert [port.name for port in exported.inputs] == ["dense", "categorical"]
    found = arrays_of(exported.encoder, tmp_path / "table.csv")
    (batch,) = read_for_prediction(tmp_path / "table.csv", exported.encoder)
    assert_same_batch(found, batch)
    arrays = torch.from_numpy(found["dense"]), torch.from_numpy(found["categorical"])
    served = torch._inductor.aoti_load_package(str(exported.path))(*arrays)
    torch.testing.assert_close(served, model(batch.dense, batch.categorical).detach(), rtol=1e-5, atol=1e-5)


def test_click_log_and_damage(tmp_path, arrays_of):
    write_click_log(tmp_path / "clicks.txt", 600, largest_vocabulary=20)
    cache = prepare(tmp_path / "clicks.txt", tmp_path / "cache")
    header = "\t".join(["label", *cache.encoder.columns.dense, *cache.schema.categorical_names])
    (tmp_path / "headed.tsv").write_text(f"{header}\n{(tmp_path / 'clicks.txt').read_text()}")
    (batch,) = read_for_prediction(tmp_path / "clicks.txt", cache)
    folder = tmp_path / "cache" / "encoder"
    assert_same_batch(arrays_of(folder, tmp_path / "headed.tsv"), batch)
    sys.path.insert(0, str(EXAMPLES))
    try:
        import read_encoder
    finally:
        sys.path.remove(str(EXAMPLES))
    for name, byte in (("encoder.json", 22), ("categorical3.arrow", -9)):
        whole = (folder / name).read_bytes()
        flipped = bytearray(whole)
        flipped[byte] ^= 1
        (folder / name).write_bytes(flipped)
        with pytest.raises(ValueError, match="is damaged"):
            read_encoder.load(folder)
        (folder / name).write_bytes(whole)
    read_encoder.load(folder)
