"""fastcross prepare: what it says, and bad rows by file and line."""

import gzip

import pytest

from fastcross.cli.main import main
from tests.cli.helpers import BAD_ROWS, edited


def test_prepare_says_what_it_made(log, capsys):
    assert main(["prepare", str(log), "--cache", "made", "--split", "random:0.5,0.25,0.25"]) == 0
    printed = capsys.readouterr().out
    assert "train 1000, validation 500, test 500" in printed
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
