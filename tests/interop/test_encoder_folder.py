"""The encoder beside an exported graph of ids, read in fifty lines without fastcross and PyTorch to the same arrays."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from fastcross.data import Columns, prepare, read_for_prediction
from fastcross.data.generate import write_click_log
from fastcross.interop.serving import export_run
from fastcross.training.experiment import build
from tests.serving_tables import ALONE, COLUMNS, EXAMPLES, write_movies

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
    assert len((EXAMPLES / "read_encoder.py").read_text().splitlines()) <= 50


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
    header = "\t".join(["label", *cache.schema.dense_names, *cache.schema.categorical_names])
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
