"""The paper's tables from records that a person can check by hand."""

import pytest

from fastcross.tuning import report
from fastcross.tuning.report import PAPERS
from fastcross.tuning.study import TrialRecord


def record(model, validation, test, *, parameters=100, deep=(8, 8), cross=None, seed=0, state="complete", lr=0.01):
    options = {"deep_layers": list(deep)} | ({"cross_layers": cross} if cross is not None else {})
    return TrialRecord(
        name=f"{model}-{validation}",
        model=model,
        state=state,
        seed=seed,
        parameters={},
        options=options,
        training={"lr": lr},
        seconds=2.0,
        parameter_count=1000,
        dense_parameters=parameters,
        validation={"logloss": validation},
        test={"logloss": test, "accuracy": 1 - test} if state == "complete" else {},
    )


TRIALS = [
    record("dcn", 0.440, 0.450, cross=1, parameters=120),
    record("dcn", 0.430, 0.445, cross=2, parameters=150),
    record("dcn", 0.435, 0.441, cross=2, deep=(16, 16), parameters=300),
    record("dcn", 0.400, 0.400, cross=3, parameters=1, state="pruned"),
    record("dnn", 0.450, 0.455, parameters=100),
    record("dnn", 0.438, 0.447, deep=(16, 16), parameters=250),
    record("lr", 0.480, 0.481, deep=()),
]


def test_table_1_chooses_on_validation_and_shows_what_the_test_part_would_have_chosen():
    seeds = [record("dcn", 0.43, test, cross=2, seed=seed) for seed, test in ((1, 0.44), (2, 0.45), (3, 0.46))]
    other = record("dcn", 0.43, 0.1, cross=1, seed=4)  # another setting, which is none of its seeds
    table = report.table_1(TRIALS, [*seeds, other], PAPERS["criteo"])
    assert [row[0] for row in table[1:]] == ["DCN", "DNN", "LR"]
    dcn = dict(zip(table[0], table[1], strict=True))
    assert dcn["chosen on validation: test logloss"] == "0.4450"
    assert dcn["best on test, as the paper read it"] == "0.4410"
    assert dcn["mean ± deviation over further seeds"] == "0.4500 ± 0.0100 (3)"
    assert dcn["setting"] == "2 cross layers, deep 2 × 8, lr 0.01"
    assert (dcn["in the paper"], dcn["its ten runs"]) == ("0.4419", "0.4422 ± 0.00009")
    assert table[3][-2:] == ["0.4474", "–"]


def test_table_2_and_3_count_parameters_without_embeddings():
    paper = PAPERS["criteo"]
    two = {row[0]: row[1:] for row in report.table_2(TRIALS, paper)}
    assert two["validation logloss"] == ["0.4430", "0.4460", "0.4470", "0.4480"]
    assert two["DCN"] == ["120"] * 4
    assert two["DNN"] == ["250"] * 4
    assert two["DNN in the paper"] == ["3,200,000", "150,000", "150,000", "78,000"]
    own = report.table_2(TRIALS, None)
    assert own[0][1] == "0.4380"  # the best that both reach
    assert {row[0]: row[1] for row in own} == {"validation logloss": "0.4380", "DCN": "150", "DNN": "250"}
    three = {row[0]: row[1:] for row in report.table_3(TRIALS, None)}
    budgets = [float(cell.replace(",", "")) for cell in three["parameters, at most"]]
    assert budgets == sorted(budgets)
    assert budgets[-1] >= 300
    assert three["DCN"][-1] == "0.4300"
    assert three["DNN"][-1] == "0.4380"
    assert report.table_3(TRIALS, paper)[0][1:] == ["50,000", "100,000", "400,000", "1,100,000", "2,500,000"]


def test_table_4_is_dcn_less_dnn():
    table = report.table_4(TRIALS, None)
    assert table == [["layers \\ nodes", "8", "16"], ["2", "-2.00", "-0.30"]]
    wide = [record("dcn", 0.44, 0.4, cross=1, deep=(32, 32)), record("dnn", 0.45, 0.4, deep=(32, 32))]
    assert report.table_4(wide, PAPERS["criteo"])[1:] == [["2", "-1.00"], ["2 in the paper", "-0.28"]]


def test_figure_3():
    assert report.depth_curves(TRIALS) == {
        (2, 8): {0: 0.450, 1: 0.440, 2: 0.430},
        (2, 16): {0: 0.438, 2: 0.435},
    }


def test_runs_by_setting_and_their_difference():
    runs = [record("dcn", 0, test, cross=8, seed=seed) for seed, test in enumerate((0.10, 0.12))]
    runs += [record("dnn", 0, test, seed=seed) for seed, test in enumerate((0.11, 0.11, 0.14))]
    table = report.runs_table(runs, PAPERS["covertype"])
    assert [row[0] for row in table[1:]] == ["DCN", "DNN"]
    assert table[1][2:5] == ["0, 1", "0.8900 ± 0.0141 (2)", "0.1100 ± 0.0141 (2)"]
    assert [row[-1] for row in table[1:]] == ["0.9740", "0.9737"]
    # errors of the means: 0.01414/√2 and 0.01732/√3, both 0.01
    assert report.differences(runs)[1] == "DCN - DNN, logloss: -0.01000 ± 0.01414"
    runs += [record("dnn", 0, test, seed=seed, deep=(9, 9)) for seed, test in enumerate((0.1, 0.2))]
    assert report.differences(runs)[3].startswith("DCN - DNN (deep 2 × 9, lr 0.01), logloss: -0.04")


def test_cross_types_stand_beside_each_other():
    runs = []
    for cross_type, tests in (("low_rank", (0.1, 0.2)), ("vector", (0.4, 0.5))):
        for seed, test in enumerate(tests):
            one = record("dcn", 0, test, cross=2, seed=seed)
            one.options.update({"cross_type": cross_type} | ({"rank": 4} if cross_type == "low_rank" else {}))
            runs.append(one)
    assert [row[1] for row in report.runs_table(runs, None)[1:]] == [
        "2 cross layers, type low_rank, rank 4, deep 2 × 8, lr 0.01",
        "2 cross layers, type vector, deep 2 × 8, lr 0.01",
    ]
    a, b = (f"DCN ({row[1]})" for row in report.runs_table(runs, None)[1:])
    assert report.differences(runs)[1] == f"{a} - {b}, logloss: -0.30000 ± 0.07071"


def test_text_is_markdown():
    assert report.markdown([["a", "b"], ["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_a_single_run_has_no_deviation():
    assert str(report.Spread.of([0.5])) == "0.5000"
    assert report.Spread.of([0.5]).error is None
    assert report.Spread.of([1.0, 2.0]).error == pytest.approx(0.5)
