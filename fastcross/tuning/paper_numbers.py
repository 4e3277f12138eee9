"""What the paper reports (Wang et al. 2017, section 4), to stand beside what is measured here."""

from dataclasses import dataclass, field
from typing import Any

NAMES = {
    "dcn": "DCN",
    "deep_crossing": "Deep Crossing",
    "dnn": "DNN",
    "wide_deep": "Wide & Deep",
    "fm": "FM",
    "lr": "LR",
}


@dataclass(frozen=True)
class Paper:
    """Of one data set: best test metric by model, mean ± deviation over ten runs, and tables 2 to 4."""

    metric: str
    best: dict[str, float]
    mean: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, dict[float, float]] = field(default_factory=dict)  # table 2: logloss -> parameters
    logloss: dict[str, dict[float, float]] = field(default_factory=dict)  # table 3: parameters -> logloss
    differences: dict[int, dict[int, float]] = field(
        default_factory=dict
    )  # table 4: layers -> nodes -> 100 · difference
    note: str = ""


_NODES = (32, 64, 128, 256, 512, 1024)


def _table_4(*rows: tuple[float, ...]) -> dict[int, dict[int, float]]:
    return {layers: dict(zip(_NODES, row, strict=True)) for layers, row in enumerate(rows, start=2)}


PAPERS: dict[str, Paper] = {
    "criteo": Paper(
        "logloss",
        {"dcn": 0.4419, "deep_crossing": 0.4425, "dnn": 0.4428, "fm": 0.4464, "lr": 0.4474},
        {"dcn": "0.4422 ± 0.00009", "dnn": "0.4430 ± 0.00037", "deep_crossing": "0.4430 ± 0.00043"},
        {
            "dnn": {0.4430: 3.2e6, 0.4460: 1.5e5, 0.4470: 1.5e5, 0.4480: 7.8e4},
            "dcn": {0.4430: 7.9e5, 0.4460: 7.3e4, 0.4470: 3.7e4, 0.4480: 3.7e4},
        },
        {
            "dnn": {5e4: 0.4480, 1e5: 0.4471, 4e5: 0.4439, 1.1e6: 0.4433, 2.5e6: 0.4431},
            "dcn": {5e4: 0.4465, 1e5: 0.4453, 4e5: 0.4432, 1.1e6: 0.4426, 2.5e6: 0.4423},
        },
        _table_4(
            (-0.28, -0.10, -0.16, -0.06, -0.05, -0.08),
            (-0.19, -0.10, -0.13, -0.18, -0.07, -0.05),
            (-0.12, -0.10, -0.06, -0.09, -0.09, -0.21),
            (-0.21, -0.11, -0.13, -0.00, -0.06, -0.02),
        ),
        "all of Criteo's seven days, ~41 million rows; each the best of a grid",
    ),
    "covertype": Paper(
        "accuracy",
        {"dcn": 0.9740, "dnn": 0.9737, "deep_crossing": 0.9737},
        note="90 % train and 10 % test at random; each the best of a grid, read on the test part",
    ),
    "higgs": Paper(
        "logloss",
        {"dcn": 0.4494, "dnn": 0.4506},
        note="11 million rows, 90 % train and 10 % test at random; each the best of a grid",
    ),
}


def paper_best(paper: Paper | None, model: str, metric: str) -> Any:
    """The paper's number for a model, None where it has none in this metric."""
    return paper.best.get(model) if paper and paper.metric == metric else None
