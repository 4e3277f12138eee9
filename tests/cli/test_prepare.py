"""fastcross prepare: what it says, and bad rows by file and line."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from fastcross.cli.main import main
from fastcross.data import Cache
from tests.cli.helpers import BAD_ROWS, SMALL, edited


def test_prepare_says_what_it_made(log, capsys):
    assert main(["prepare", str(log), "--cache", "made", "--split", "random:0.5,0.25,0.25"]) == 0
    printed = capsys.readouterr().out
    assert (
        "split at random: 0.5 train, 0.25 validation, 0.25 test; rows: train 1,000, validation 500, test 500" in printed
    )
    assert "dense columns (13): I1" in printed
    assert "C26" in printed


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_bad_rows_name_file_and_line_or_are_skipped_and_counted(log, capsys, tmp_path, kind, fails):
    edit, expected = BAD_ROWS[kind]
    (tmp_path / "bad.txt").write_bytes(edited(log, 17, edit))
    message = fails("prepare", "bad.txt", "--format", "criteo", "--cache", "c")
    assert "bad.txt, line 17" in message
    assert expected.lower() in message.lower()
    assert not (tmp_path / "c").exists()
    assert main(["prepare", "bad.txt", "--format", "criteo", "--cache", "c", "--on-error", "skip"]) == 0
    captured = capsys.readouterr()
    assert "skipped 1 bad rows" in captured.err
    assert "line 17" in captured.err


def test_bad_files(run, log, tmp_path, fails):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(log.read_bytes())[:-5000])
    assert "empty" in fails("train", "--data", "empty.txt")
    assert "cut.txt.gz" in fails("train", "--data", "cut.txt.gz", "--format", "criteo")
    assert "nowhere.txt" in fails("prepare", "nowhere.txt", "--cache", "c")
    assert "nowhere.txt" in fails("predict", run, "nowhere.txt", "--output", "p.csv")
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def films():
    """Ids that are numbers, several genres in one cell, a label in words, rows that are not in the order of time."""
    with open("films.csv", "w") as file:
        file.write("number,user_id,genres,length,seen,liked\n")
        for i in range(2000):
            genres = "|".join(("comedy", "crime", "western")[: 1 + i % 3])
            file.write(f"{i},{1000 + i * 7 % 97},{genres},{90 + i % 50}.5,{(i * 37) % 2000},{('no', 'yes')[i % 2]}\n")
    return "films.csv"


def test_what_was_inferred_is_printed_with_reasons(films, capsys):
    """At every prepare and every train, also where the cache is there already."""
    assert main(["prepare", films, "--cache", "c", "--label", "liked"]) == 0
    printed = capsys.readouterr().out
    reasons = {line.split()[0]: line.split()[1] for line in printed.splitlines() if line.startswith("  ")}
    assert reasons["user_id"] == "categorical"
    assert reasons["genres"] == "multi-valued"
    assert reasons["length"] == "dense"
    assert "label liked: no is 0 (1,000 rows), yes is 1 (1,000 rows)" in printed
    assert "split by time: the first 0.8571 of the rows train" in printed
    for data in ("c", films):
        options = [] if data == "c" else ["--label", "liked", "--cache", "c"]
        for run in ("first", "second"):
            assert main(["train", "--data", data, *options, "--run", f"{data}-{run}", *SMALL]) == 0
            errors = capsys.readouterr().err
            assert "genres multi-valued several values with | between them" in " ".join(errors.split())
            assert "label liked: no is 0" in errors
            assert "split by time" in errors


def test_options_say_what_columns_are(films, capsys):
    options = ["--label", "liked", "--dense", "user_id", "--categorical", "length,genres", "--drop", "number"]
    assert main(["prepare", films, "--cache", "c", *options, "--time-column", "seen"]) == 0
    printed = capsys.readouterr().out
    kinds = {line.split()[0]: line.split(maxsplit=2)[1:] for line in printed.splitlines() if line.startswith("  ")}
    assert kinds["user_id"] == ["dense", "declared"]
    assert kinds["genres"][0] == kinds["length"][0] == "categorical"
    assert kinds["number"] == ["dropped", "declared"]
    assert "by column seen" in printed
    assert main(["prepare", films, "--cache", "d", "--label", "liked", "--multi", "genres:e"]) == 0
    assert "genres" in capsys.readouterr().out
    assert Cache.open("d").encoder.columns.separators == {"genres": "e"}


def test_columns_that_cannot_be_meant(films, fails):
    message = fails("prepare", films, "--cache", "c", "--label", "liked", "--dense", "weight")
    assert "no column weight; the columns are number, user_id, genres, length, seen, liked" in message
    assert "declared twice: user_id" in fails(
        "prepare", films, "--cache", "c", "--dense", "user_id", "--drop", "user_id"
    )
    assert "name the label column; the columns are" in fails("prepare", films, "--cache", "c")
    assert "expected a column and its separator" in fails("prepare", films, "--cache", "c", "--multi", ":|")
    options = ("--label", "liked", "--split", "random", "--time-column", "seen")
    assert "time_column" in fails("prepare", films, "--cache", "c", *options)
    assert not Path("c").exists()


@pytest.mark.parametrize("text", ["[1]", "{", "3", '"label"', '{"dense": 5}', '{"dens": ["a"]}', '{"label": ["x"]}'])
def test_a_file_of_columns_that_is_none(films, fails, text):
    Path("columns.json").write_text(text)
    message = fails("prepare", films, "--cache", "c", "--columns", "columns.json")
    assert "defect" not in message
    assert any(word in message for word in ("columns.json", "must be", "unknown key"))
    both = fails("prepare", films, "--cache", "c", "--columns", "columns.json", "--dense", "user_id")
    assert "in the file of --columns or by --dense, not both" in both


def test_files_that_are_not_what_their_name_says(fails, tmp_path):
    (tmp_path / "random.parquet").write_bytes(np.random.default_rng(0).bytes(20_000))
    (tmp_path / "half.parquet").write_bytes(b"PAR1" + bytes(1000))
    for name in ("random.parquet", "half.parquet"):
        for command in (["prepare", name, "--cache", "c"], ["train", "--data", name, "--format", "parquet"]):
            message = fails(*command)
            assert name in message
            assert "defect" not in message
    assert not (tmp_path / "runs").exists()


def test_labels_of_one_class(fails, tmp_path):
    (tmp_path / "same.csv").write_text("a,label\n" + "1,0\n2,0\n" * 500)
    message = fails("train", "--data", "same.csv")
    assert "the label (column label) is 0 in all 1,000 rows" in message
    assert not (tmp_path / "runs").exists()
