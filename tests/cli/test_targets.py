"""--task, --weight, --group, --monitor and --positive-weight, from a file to predictions."""

import csv

import numpy as np
import pytest

from fastcross.cli.main import main
from tests.cli.helpers import SMALL, read

ROWS = 600


@pytest.fixture
def table(tmp_path):
    generator = np.random.default_rng(0)
    x, user = generator.normal(size=ROWS), generator.integers(0, 9, ROWS)
    price, click = 5000 + 900 * x, (x > 0).astype(int)
    weight = generator.integers(0, 3, ROWS)
    rows = zip(x, user, price, click, weight, strict=True)
    lines = "".join(f"{a:.4f},u{b},{c:.2f},{d},{e}\n" for a, b, c, d, e in rows)
    path = tmp_path / "t.csv"
    path.write_text("x,user,price,click,w\n" + lines)
    return path


def test_regression_from_a_file_to_predictions_and_an_export(table, capsys, tmp_path):
    arguments = ["train", "--data", str(table), "--label", "price", "--drop", "click,w", "--run", "run", *SMALL]
    assert main([*arguments, "--lr", "0.03", "--epochs", "20", "--monitor", "mae"]) == 0
    said = capsys.readouterr()
    assert "label price: a quantity (regression), mean 49" in said.err
    assert "validation rmse" in said.err
    assert "test: rmse " in said.out
    result = read("run/result.json")
    assert result["test"]["r2"] > 0.5
    assert main(["evaluate", "run", "--output", "metrics.json"]) == 0
    assert read("metrics.json")["test"] == pytest.approx(result["test"], rel=1e-6)
    assert main(["evaluate", "run", "--data", str(table)]) == 0
    assert main(["predict", "run", str(table), "--output", "out.csv"]) == 0
    with open("out.csv") as file:
        rows = list(csv.DictReader(file))
    predicted = np.array([float(row["prediction"]) for row in rows])
    assert list(rows[0]) == ["row", "prediction"]
    assert abs(predicted.mean() - 5000) < 500
    assert main(["predict", "run", str(table), "--output", "out.npy"]) == 0
    np.testing.assert_allclose(np.load("out.npy"), predicted, rtol=1e-8)
    assert main(["info", "run"]) == 0

    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["export", "run", "--output", "model.onnx"]) == 0
    session = onnxruntime.InferenceSession("model.onnx")
    with open(table) as file:
        columns = list(csv.DictReader(file))
    inputs = {}
    for port in session.get_inputs():
        values = [row[port.name] for row in columns]
        inputs[port.name] = np.array(values if "string" in port.type else [float(v) for v in values])
    (served,) = session.run(["prediction"], inputs)
    np.testing.assert_allclose(served, predicted, rtol=1e-5)


def test_weights_groups_and_the_monitored_metric(table, capsys):
    arguments = ["--data", str(table), "--label", "click", "--drop", "price", "--weight", "w", "--group", "user"]
    assert main(["train", *arguments, "--monitor", "gauc", "--positive-weight", "2", "--run", "run", *SMALL]) == 0
    said = capsys.readouterr()
    assert "weight w: mean" in said.err
    assert "validation gauc" in said.err
    assert "gauc" in read("run/result.json")["validation"]
    assert read("run/config.json")["training"]["monitor"] == "gauc"


def test_what_cannot_be_is_one_line_and_no_run(table, fails, tmp_path):
    data = ["--data", table, "--label", "click", "--run", "run", *SMALL]
    assert "there is no rmse to monitor: a binary label has logloss, auc, accuracy, ece" in fails(
        "train", *data, "--monitor", "rmse"
    )
    assert "monitor must be one of" in fails("train", *data, "--monitor", "loss")
    assert "no column nobody" in fails("train", *data, "--weight", "nobody")
    assert "gauc takes a column of groups (--group)" in fails("train", *data, "--monitor", "gauc")
    message = fails("train", *data, "--task", "regression", "--positive-weight", "2")
    assert "positive_weight is for a label of two classes; the task of" in message
    assert "--task, --weight have no effect on the generated log" in fails(
        "train", "--weight", "w", "--task", "regression", "--run", "run"
    )
    assert not (tmp_path / "run").exists()


def test_compare_ranks_by_rmse(table, capsys):
    arguments = ["compare", "--data", str(table), "--label", "price", "--models", "lr,dnn", "--output", "out"]
    assert main([*arguments, *SMALL]) == 0
    assert "| model | rmse" in capsys.readouterr().out
