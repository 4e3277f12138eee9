"""Raw values: RowEncoder's batches are those of a file, and a Ranker of tables scores as the run predicts."""

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from serving_tables import COLUMNS, NUMBERS, rows_of, write_movies

from fastcross import Ranker
from fastcross.cli.main import main
from fastcross.data import prepare, read_for_prediction
from fastcross.data.columns import DataError
from fastcross.data.encoder import Encoder
from fastcross.data.prediction import RowEncoder
from fastcross.training.run_folder import load_model

ITEM = ("film", "minutes", "genres", "tags", "weight", "country")


def assert_same(found, batch):
    for ours, theirs in zip(found.tensors, batch.tensors, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"hash_buckets": 50}], ids=["vocabularies", "hashed"])
def test_rows_are_encoded_as_a_file_is(tmp_path, options):
    write_movies(tmp_path / "old.csv", 800)
    write_movies(tmp_path / "new.csv", 300, seed=1, new=15)
    encoder = Encoder.load(
        prepare(tmp_path / "old.csv", tmp_path / "cache", columns=COLUMNS, **options).path / "encoder"
    )
    reader = read_for_prediction(tmp_path / "new.csv", encoder)
    (batch,) = reader
    found, unseen = RowEncoder(encoder)(rows_of(tmp_path / "new.csv"))
    assert_same(found, batch)
    parts = {name: count for name, count in reader.unknown.items() if not name.startswith("seen_at.")}
    assert unseen == (parts if not options else {})


def test_values_as_json_has_them(movies):
    """An integer is its digits, a list is a bag, Unix times are date-times."""
    row = rows_of(movies / "new.csv")[0] | {"film": "7", "genres": "Drama|Comedy", "tags": "t1 t2", "weight": "0.5 2"}
    encode = RowEncoder(load_model(movies / "run").encoder)
    expected, _ = encode([row | {"seen_at": "2024-01-31 12:30:00"}])
    same = {"film": 7, "genres": ["Drama", "Comedy"], "tags": ["t1", "t2"], "weight": [0.5, 2]}
    for time in (1706704200, 1706704200.0, 1706704200000, "1706704200", "2024-01-31T12:30", "2024-01-31T14:30+02:00"):
        assert_same(encode([row | same | {"seen_at": time}])[0], expected)
    missing, unseen = encode([dict.fromkeys(row)])
    empty, _ = encode([dict.fromkeys(row, "") | dict.fromkeys(NUMBERS, math.nan)])
    assert_same(missing, empty)
    assert not any(unseen.values())
    nothing, _ = encode([])
    assert len(nothing) == 0


BAD = {
    "age": ["old", "31", True, [1], {}, math.inf, -math.inf, 1e39, 10**400],
    "user": [[1], {"a": 1}, "\ud800"],
    "genres": [3, {"a": 1}, [["x"]], True],
    "weight": ["a b", ["x"], [None], [1.0, 2.0, 3.0, 4.0], [math.nan], 5],
    "seen_at": ["yesterday", [1], True, {}, 1e300, math.inf],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values], ids=str
)
def test_bad_values_name_row_and_column(movies, name, value):
    good = rows_of(movies / "new.csv")[0] | {"tags": ["t1"], "weight": [1.0]}
    encode = RowEncoder(load_model(movies / "run").encoder)
    with pytest.raises(DataError, match=f"^row 2: column {name} must .*; got "):
        encode([good, good | {name: value}])
    with pytest.raises(DataError, match=f"^row 2: column {name} is missing"):
        encode([good, {key: v for key, v in good.items() if key != name}])
    with pytest.raises(DataError, match=r"^row 1 must map columns to values; got list of 1"):
        encode([[3]])


def test_a_ranker_of_tables(movies, tmp_path):
    """As the run predicts the full rows; items from a file of theirs, one by one or saved."""
    trained, rows = load_model(movies / "run"), rows_of(movies / "new.csv")
    items = [
        {"key": f"k{i}", **{name: None if row[name] in ("", "NA") else row[name] for name in ITEM}}
        for i, row in enumerate(rows)
    ]
    table = pa.Table.from_pylist(items)
    ranker = Ranker(movies / "run", table, key="key")
    assert set(ranker.context_columns) == {"user", "age", "seen_at", "probability"}
    context = {name: rows[3][name] for name in ranker.context_columns}
    batch, _ = RowEncoder(trained.encoder)([row | context for row in rows])
    with torch.no_grad():
        exact = trained.model(batch.dense, batch.categorical, batch.bags)
    torch.testing.assert_close(ranker.score(context), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ranker.score(pa.Table.from_pylist([context])), exact, rtol=1e-5, atol=1e-5)
    best = ranker.top(context, 5, output=2)
    assert [key for key, _ in best] == [f"k{i}" for i in exact[:, 2].argsort(descending=True)[:5].tolist()]
    assert ranker.key == "key"
    columns = {name: [item[name] for item in items] for name in items[0]}
    for other in (columns, pytest.importorskip("pandas").DataFrame(columns)):
        found = Ranker(trained, other, key="key").score(context)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    ranker.save(tmp_path / "items")
    again = Ranker.load(tmp_path / "items", movies / "run")
    assert torch.equal(again.score(context), ranker.score(context))
    again.update(table.slice(4, 1).set_column(0, "key", pa.array(["k3"])))
    again.add(table.slice(4, 1).set_column(0, "key", pa.array(["new"])))
    torch.testing.assert_close(again.score(context, ["k3", "new"]), exact[[4, 4]], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"the items need the columns .*; missing: minutes"):
        again.add(table.drop_columns(["minutes"]))
    with pytest.raises(ValueError, match="row 1: column age is missing"):
        again.score({name: value for name, value in context.items() if name != "age"})
    with pytest.raises(ValueError, match="the items have no column name; theirs are key, film"):
        Ranker(movies / "run", table, key="name")
    with pytest.raises(ValueError, match="the items have none of the model's columns"):
        Ranker(movies / "run", {"key": [1]}, key="key")
    with pytest.raises(ValueError, match="the column tags and its weights weight must be the items' or the context's"):
        Ranker(movies / "run", table.drop_columns(["weight"]), key="key")
    with pytest.raises(ValueError, match="row 2: column minutes must be finite; got inf"):
        Ranker(movies / "run", {"film": ["1", "2"], "minutes": [3.0, np.inf]})


def test_export_folded(movies, tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    for options in ([], ["--fold"]):
        assert main(["export", str(movies / "run"), "--output", str(tmp_path / "model.onnx"), *options]) == 0
        rows = rows_of(movies / "new.csv")
        columns = {n: [row[n] for row in rows] for n in rows[0]}
        inputs = {}
        for entry in onnxruntime.InferenceSession(tmp_path / "model.onnx").get_inputs():
            values = columns[entry.name.removesuffix("_in")]
            if entry.name == "seen_at":
                inputs[entry.name] = np.array([v or "NaT" for v in values], "datetime64[us]").astype(np.float64)
            else:
                inputs[entry.name] = np.array(values, np.float64 if entry.name in NUMBERS else object)
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        (found,) = session.run(None, inputs)
        batch, _ = RowEncoder(load_model(movies / "run").encoder)(rows)
        exact = torch.softmax(load_model(movies / "run").model(batch.dense, batch.categorical, batch.bags), 1)
        np.testing.assert_allclose(found, exact.detach().numpy(), rtol=0, atol=1e-6)
