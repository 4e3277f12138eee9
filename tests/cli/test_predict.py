"""fastcross predict as a user types it."""

import csv
from pathlib import Path

import numpy as np

from fastcross.cli.main import main
from tests.cli.helpers import BAD_ROWS, edited


def test_predict_csv_and_npy_agree_labels_or_not(run, log):
    with open("unlabelled.txt", "w") as file:
        file.writelines(line.split("\t", 1)[1] for line in log.read_text().splitlines(keepends=True))
    assert main(["predict", str(run), str(log), "--output", "p.csv"]) == 0
    assert main(["predict", str(run), "unlabelled.txt", "--output", "p.npy"]) == 0
    with open("p.csv") as file:
        rows = list(csv.DictReader(file))
    probability = np.load("p.npy")
    assert len(rows) == len(probability) == 2000
    assert ((probability > 0) & (probability < 1)).all()
    np.testing.assert_allclose([float(row["probability"]) for row in rows], probability, rtol=1e-8)


def test_predict_reports_unknown_values(run, log, capsys):
    line = log.read_text().splitlines()[0].split("\t")
    line[14] = "ffffffff"
    with open("new.txt", "w") as file:
        file.write("\t".join(line) + "\n")
    assert main(["predict", str(run), "new.txt", "--output", "p.csv"]) == 0
    assert "C1 100.0% of the rows" in capsys.readouterr().err


def test_bad_rows_at_prediction(run, log, capsys, tmp_path, fails):
    (tmp_path / "bad.txt").write_bytes(edited(log, 17, BAD_ROWS["columns"][0]))
    assert "bad.txt, line 17" in fails("predict", run, "bad.txt", "--output", "p.csv")
    assert not (tmp_path / "p.csv").exists()
    assert main(["predict", str(run), "bad.txt", "--output", "p.csv", "--on-error", "skip"]) == 0
    assert "skipped 1 bad rows" in capsys.readouterr().err
    assert len(Path("p.csv").read_text().splitlines()) == 2000  # a header and 1,999 predictions
