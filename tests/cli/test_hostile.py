"""What looks right and is not: runs, caches, files moved, mixed up, damaged, changed; options that cannot be meant."""

import gzip
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from fastcross.cli.main import main
from fastcross.data import Cache, Encoder
from tests.cli.helpers import SMALL

TINY = ["--epochs", "1", "--deep-layers", "4", "--cross-layers", "1", "--embedding-dim", "2"]


def write(path, rows, flipped=False, name="x"):
    rng = np.random.default_rng(0)
    lines = [f"a,{name},label"]
    for _ in range(rows):
        a, x = rng.choice(["p", "q", "r"]), rng.normal()
        label = int(x + (a == "p") + rng.normal() > 0.3)
        lines.append(f"{a},{x:.4f},{label ^ flipped}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def two(tmp_path):
    """Two files of one size and one encoder, with opposite labels, and a run on the first."""
    for name, flipped in (("A", False), ("B", True)):
        write(tmp_path / f"{name}.csv", 300, flipped)
        assert main(["prepare", f"{name}.csv", "--cache", f"c{name}"]) == 0
        assert main(["train", "--data", f"c{name}", "--run", f"r{name}", *TINY]) == 0
    assert Cache.open("cA").encoder_fingerprint == Cache.open("cB").encoder_fingerprint


def test_the_cache_that_has_moved_is_the_one_that_was_trained_on(two, fails):
    shutil.copytree("cA", "moved")
    assert main(["evaluate", "rA", "--cache", "moved"]) == 0
    assert "made from other data" in fails("evaluate", "rA", "--cache", "cB")
    assert main(["evaluate", "rA", "--data", "cB"]) == 0  # is asked to look at other data


def test_a_checkpoint_of_another_run_is_refused(two, fails):
    for name in ("best.safetensors", "best.safetensors.checksum"):
        shutil.copy(f"rB/{name}", f"rA/{name}")
    said = fails("predict", "rA", "A.csv", "--output", "p.csv")
    assert "the best checkpoint in rA is not that of this run: expected fingerprint" in said


def test_a_file_with_the_size_and_the_time_of_the_one_before(tmp_path, capsys):
    path = write(tmp_path / "A.csv", 300)
    assert main(["prepare", "A.csv", "--cache", "c"]) == 0
    before = path.stat()
    write(path, 300, flipped=True)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    old = Cache.open("c").fingerprint
    assert main(["prepare", "A.csv", "--cache", "c"]) == 0
    assert Cache.open("c").fingerprint != old


@pytest.mark.parametrize("offset", [0, 2**53, 1_700_000_000_000_000_000])
def test_times_that_are_no_float64(tmp_path, offset):
    rows = [f"{offset + v},{'late' if v >= 120 else 'early'},{v % 2}" for v in reversed(range(140))]
    (tmp_path / "t.csv").write_text("\n".join(["t,a,label", *rows]) + "\n")
    assert main(["prepare", "t.csv", "--cache", "c", "--time-column", "t", "--min-frequency", "1"]) == 0
    assert Cache.open("c").schema.cardinalities[0] == 2  # early, and one id for all that is rare


def test_times_in_nanoseconds(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    order = list(reversed(range(140)))
    time = pa.array([1_700_000_000_000_000_000 + v for v in order], pa.timestamp("ns"))
    kind = ["late" if v >= 120 else "early" for v in order]
    pa.parquet.write_table(pa.table({"t": time, "a": kind, "label": [v % 2 for v in order]}), tmp_path / "t.parquet")
    assert main(["prepare", "t.parquet", "--cache", "c", "--time-column", "t", "--min-frequency", "1"]) == 0
    assert Cache.open("c").schema.cardinalities[0] == 2


def test_a_blank_line_of_a_single_column(tmp_path, fails):
    rng = np.random.default_rng(0)
    rows = [f"{x:.3f},{int(x > 0)}" for x in rng.normal(size=200)]
    (tmp_path / "t.csv").write_text("\n".join(["x,label", *rows]) + "\n")
    assert main(["train", "--data", "t.csv", "--run", "r", *TINY]) == 0
    (tmp_path / "one.csv").write_text("x\n0.5\n\n-0.5\n1.5\n")
    said = fails("predict", "r", "one.csv", "--output", "p.csv")
    assert "one.csv, line 3: a blank line, which may be a row or none" in said
    assert main(["predict", "r", "one.csv", "--output", "p.csv", "--on-error", "skip"]) == 0
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ["1", "2", "3", "4"]
    assert lines[2].split(",")[1] == ""
    (tmp_path / "one.csv").write_text('x\n0.5\n""\n-0.5\n')
    assert main(["predict", "r", "one.csv", "--output", "p.csv"]) == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 4


def test_a_cache_folder_that_holds_more(tmp_path, fails):
    write(tmp_path / "A.csv", 300)
    assert main(["prepare", "A.csv", "--cache", "c"]) == 0
    for run in ("c/runs/one", "c"):
        assert "a cache, which `prepare` may replace" in fails("train", "--data", "c", "--run", run, *TINY)
    (tmp_path / "c" / "notes.txt").write_text("mine")
    write(tmp_path / "A.csv", 310)
    assert "holds other things, too (notes.txt)" in fails("prepare", "A.csv", "--cache", "c")
    assert (tmp_path / "c" / "notes.txt").read_text() == "mine"


def test_a_comparison_does_not_replace_another(cache, fails, tmp_path):
    options = ["--data", str(cache), "--max-steps", "3", "--output", "cmp"]
    assert main(["compare", *options, "--models", "lr", "--seeds", "0"]) == 0
    said = fails("compare", *options, "--models", "fm", "--seeds", "2")
    assert "cmp holds the comparison of lr with seeds 0; add to these" in said
    assert main(["compare", *options, "--models", "lr,fm", "--seeds", "0"]) == 0
    assert {row["model"] for row in json.loads((tmp_path / "cmp" / "table.json").read_text())["models"]} == {"lr", "fm"}


def test_every_column_with_unknown_values_is_counted(tmp_path, capsys):
    names = [f"c{i}" for i in range(6)]
    for path, value in (("six.csv", "ab"), ("new.csv", "Z")):
        rows = [",".join([value[i % len(value)]] * 6 + [str(i // 2 % 2)]) for i in range(200)]
        (tmp_path / path).write_text("\n".join([",".join([*names, "label"]), *rows]) + "\n")
    assert main(["train", "--data", "six.csv", "--run", "r", "--split", "random", *TINY]) == 0
    assert main(["predict", "r", "new.csv", "--output", "p.csv"]) == 0
    assert "c2 100.0% of the rows; and of 3 more columns" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["A.csv", "A.csv", "--split", "files"], "A.csv: named twice"),
        (["A.csv", "./A.csv"], "A.csv: named twice"),
        (["A.csv", "--min-frequency", "9" * 21], "must be at most 2147483647"),
        (["A.csv", "--split", "random:nan,0.5,0.5"], "three fractions that add up to 1"),
        (["A.csv", "--split", ""], "split must be"),
        (["A.csv", "--hash-buckets", "10", "--min-frequency", "5"], "--min-frequency has no effect"),
        (["A.csv", "--drop", "label"], "the column label is the label, and cannot be dropped"),
        (["A.csv", "--time-column", "label"], "the column label is the label, and cannot be the time"),
        (["A.csv", "--multi", "a:"], "expected a column and its separator"),
        (["A.csv", "t.parquet"], "t.parquet: a Parquet file, where the format csv is read"),
    ],
)
def test_what_cannot_be_meant(tmp_path, fails, arguments, said):
    write(tmp_path / "A.csv", 60)
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and so on")
    assert said in fails("prepare", *arguments, "--cache", "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "option",
    [
        ["--processes", "9" * 21],
        ["--cross-layers", "9" * 21],
        ["--embedding-dim", "9" * 21],
        ["--threads", "9" * 21],
        ["--deep-layers", "9" * 21],
        ["--deep-layers", "8x0"],
        ["--deep-layers", "0,8"],
    ],
    ids=" ".join,
)
def test_numbers_beyond_reason(cache, fails, option):
    assert "must be at most" in (said := fails("train", "--data", cache, *option)) or "expected layer sizes" in said


def test_an_id_has_no_place_in_an_array(run, log, fails):
    assert "--id-column has no effect on p.npy" in fails("predict", run, log, "--output", "p.npy", "--id-column", "C1")


def write_colours(path, names):
    """600 rows whose label is known by the colour; the names of the colours are all that differs between files."""
    with open(path, "w") as file:
        file.write("colour,label\n")
        file.writelines(f"{names[i * 7 % 5]},{int(i * 7 % 5 < 2)}\n" for i in range(600))


@pytest.fixture
def colours():
    """Two files whose caches have the same columns and cardinalities, and a run on the first."""
    options = ["--split", "random", "--batch-size", "32", "--lr", "0.05", "--epochs", "5"]
    write_colours("first.csv", "abcde")
    write_colours("second.csv", "edcba")
    assert main(["prepare", "second.csv", "--split", "random", "--cache", "second.cache"]) == 0
    assert main(["train", "--data", "first.csv", "--cache", "first.cache", "--run", "run", *SMALL, *options]) == 0
    assert Cache.open("first.cache").schema == Cache.open("second.cache").schema


@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "run", "--data", "second.cache"),
        ("evaluate", "run", "--cache", "second.cache"),
        ("evaluate", "run", "--data", "first.csv", "--cache", "second.cache"),
        ("predict", "run", "first.csv", "--output", "p.csv", "--cache", "second.cache"),
    ],
    ids=lambda command: " ".join(command),
)
def test_a_cache_of_another_encoder_is_refused_with_both_fingerprints(colours, command, fails):
    """Names and cardinalities agree, but an id means another colour: 0.1.0 evaluated it, and was wrong."""
    expected, found = (Encoder.load(folder).fingerprint[:12] for folder in ("run/encoder", "second.cache/encoder"))
    assert expected != found
    assert f"expected encoder {expected}, got {found}" in fails(*command)
    assert not Path("p.csv").exists()


def test_a_cache_of_the_same_encoder_is_taken(colours, capsys):
    shutil.move("first.cache", "moved.cache")
    for options in (["--data", "moved.cache"], ["--cache", "moved.cache"]):
        assert main(["evaluate", "run", *options]) == 0
        assert "accuracy 1.0000" in capsys.readouterr().out
    assert main(["predict", "run", "first.csv", "--output", "p.csv", "--cache", "moved.cache"]) == 0


def test_a_run_that_has_moved_does_without_its_cache(colours, capsys, fails):
    assert main(["predict", "run", "first.csv", "--output", "before.npy"]) == 0
    shutil.move("run", "elsewhere")
    shutil.rmtree("first.cache")
    shutil.rmtree("user", ignore_errors=True)
    assert main(["predict", "elsewhere", "first.csv", "--output", "after.npy"]) == 0
    np.testing.assert_array_equal(np.load("before.npy"), np.load("after.npy"))
    assert main(["evaluate", "elsewhere", "--data", "first.csv"]) == 0
    assert "accuracy 1.0000" in capsys.readouterr().out
    assert main(["info", "elsewhere"]) == 0
    assert "first.cache: no cache here" in fails("evaluate", "elsewhere")


def test_training_on_an_updated_file_leaves_older_runs_as_they_were(colours, capsys):
    assert main(["predict", "run", "first.csv", "--output", "before.npy"]) == 0
    shutil.copy("first.csv", "old.csv")
    write_colours("first.csv", "vwxyz")
    command = ["train", "--data", "first.csv", "--cache", "first.cache", "--run", "newer", "--split", "random", *SMALL]
    assert main(command) == 0
    assert main(["predict", "run", "old.csv", "--output", "after.npy"]) == 0
    np.testing.assert_array_equal(np.load("before.npy"), np.load("after.npy"))
    assert main(["evaluate", "run", "--data", "old.csv"]) == 0
    assert "accuracy 1.0000" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[]", "{}", "3", '{"model": "dcn"}', "{", ""], ids=lambda text: text or "empty")
def test_a_config_that_is_none(run, log, fails, text):
    shutil.copytree(run, "damaged")
    Path("damaged/config.json").write_text(text)
    for command in (
        ("evaluate", "damaged"),
        ("predict", "damaged", log, "--output", "p.csv"),
        ("export", "damaged", "--output", "m.onnx"),
        ("info", "damaged"),
        ("train", "--resume", "damaged"),
        ("convert", "damaged", "out", "--to", "sharded"),
    ):
        message = fails(*command)
        assert "damaged/config.json" in message
        assert "defect" not in message
    assert not Path("out").exists()


def flip(path, at):
    content = bytearray(Path(path).read_bytes())
    content[at % len(content)] ^= 1
    Path(path).write_bytes(content)


@pytest.mark.parametrize("file", ["train/label.npy", "validation/dense.npy", "train/categorical.npy", "manifest.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_cache(cache, fails, file, damage):
    shutil.copytree(cache, "c")
    if damage == "flipped":
        flip(f"c/{file}", -1000)
    elif damage == "cut":
        Path("c", file).write_bytes(Path("c", file).read_bytes()[:-7])
    else:
        Path("c", file).unlink()
    message = fails("train", "--data", "c", "--run", "r", *SMALL)
    assert Path(file).name in message
    assert "defect" not in message
    assert not Path("r").exists()


@pytest.mark.parametrize("file", ["best.safetensors", "encoder/categorical3.arrow", "encoder/encoder.json"])
def test_a_damaged_run(run, log, fails, file):
    shutil.copytree(run, "damaged")
    flip(f"damaged/{file}", -50)
    message = fails("predict", "damaged", log, "--output", "p.csv")
    assert f"damaged/{file}" in message
    assert "defect" not in message
    assert not Path("p.csv").exists()


def test_a_checkpoint_of_another_seed_is_told_apart(two, fails):
    assert main(["train", "--data", "cA", "--run", "rC", "--seed", "1", *TINY]) == 0
    for name in ("best.safetensors", "best.safetensors.checksum"):
        shutil.copy(f"rC/{name}", f"rA/{name}")
    said = fails("predict", "rA", "A.csv", "--output", "p.csv")
    assert "the best checkpoint in rA is not that of this run: expected seed 0, got 1" in said


def test_a_training_on_a_file_that_breaks_off_is_not_all_right(tmp_path, capsys):
    path = write(tmp_path / "A.csv", 3000)
    whole = gzip.compress(path.read_bytes())
    (tmp_path / "A.csv.gz").write_bytes(whole[: len(whole) * 3 // 4])
    assert main(["train", "--data", "A.csv.gz", "--on-error", "skip", "--run", "r", *TINY]) == 1
    assert "is damaged or ends early" in capsys.readouterr().err
    assert (tmp_path / "r" / "result.json").exists()
