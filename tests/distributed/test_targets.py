"""Weights, groups, the monitored metric and regression: two processes have the metrics of one."""

import numpy as np
import pytest

from fastcross.cli.main import main
from fastcross.training.run_folder import Run
from tests.distributed.helpers import QUIET

pytest.importorskip("torchrec")
pytestmark = QUIET
MODEL = "--embedding-dim 4 --deep-layers 8 --cross-layers 1 --dropout 0"
SMALL = f"{MODEL} --batch-size 64 --epochs 2 --optimizer sgd --lr 0.05"


@pytest.mark.parametrize(
    "target",
    ["--label click --drop price --group user --monitor gauc --positive-weight 2", "--label price --drop click"],
)
def test_two_processes_have_the_metrics_of_one(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    x, user, w = generator.normal(size=500), generator.integers(0, 9, 500), generator.integers(0, 3, 500)
    rows = zip(x, user, (x > 0).astype(int), 1e4 + 900 * x, w, strict=True)
    lines = "".join(f"{a:.4f},u{b},{c},{d:.2f},{e}\n" for a, b, c, d, e in rows)
    (tmp_path / "t.csv").write_text("x,user,click,price,w\n" + lines)
    shared = ["train", "--data", "t.csv", "--cache", "cache", "--weight", "w", "--threads", "1", *target.split()]
    assert main([*shared, *SMALL.split(), "--run", "one"]) == 0
    assert main([*shared, *SMALL.split(), "--run", "two", "--processes", "2"]) == 0
    one, two = Run("one").result, Run("two").result
    assert two["best_step"] == one["best_step"]
    assert two["validation"] == pytest.approx(one["validation"], rel=1e-4)
