"""Raw values in ONNX at their oddest: names, missing values, times, weights that do not fit, tables beside the file."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from fastcross.data.blocks import to_block
from fastcross.data.columns import Columns
from fastcross.data.encoder import Encoder, Standardisation, Vocabulary
from fastcross.interop import export as export_module
from fastcross.interop.raw_values import check_expressible
from fastcross.interop.serving import export_run
from fastcross.models.dcn import DCN

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
HOURS = Vocabulary(pa.array(["12", "0", None, "23"]))
DAYS = Vocabulary(pa.array(["Thursday", "Monday", "Wednesday"]))


def encoder_of(columns, categorical=(), bags=(), format="parquet"):
    numbers = len(columns.dense or ())
    scaling = Standardisation(np.arange(numbers, dtype=float), np.full(numbers, 0.5))
    return Encoder(format, columns, scaling, tuple(categorical), tuple(bags))


def model_of(encoder):
    torch.manual_seed(0)
    schema = encoder.schema
    sizes = {"bag_cardinalities": schema.bag_cardinalities, "num_outputs": schema.num_outputs}
    options = {"cross_layers": 1, "deep_layers": (4,), "batch_norm": False} | sizes
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


def test_what_cannot_be_said_in_onnx(monkeypatch):
    columns = Columns("label", (), ("shop",), ("tags",), classes=("0", "1"))
    shops = Vocabulary(pa.array(["a|b"]))  # a separator in a column that is not taken apart
    check_expressible(encoder_of(columns, (shops,), (Vocabulary(pa.array(["x", None])),)))
    with pytest.raises(ValueError, match=r"column tags has the value 'x\|y', with the separator '\|' .*; --encoded"):
        check_expressible(encoder_of(columns, (shops,), (Vocabulary(pa.array(["x|y"])),)))
    monkeypatch.setattr("fastcross.interop.raw_values.LARGEST_TEXTS", 1)
    with pytest.raises(ValueError, match=r"the vocabularies take .* GiB, and an ONNX file has room for .*; --encoded"):
        check_expressible(encoder_of(columns, (shops,), (Vocabulary(pa.array(["x"])),)))
