"""A study: its records, the run that is kept, pruning, and what happens to it when a process dies."""

import json
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fastcross.files import read_checked_json
from fastcross.training.loop import Interrupted
from fastcross.training.run_folder import load_model
from fastcross.tuning.report import draw_importances, importances
from fastcross.tuning.search import Trial, _take, search, time_share
from fastcross.tuning.study import Study
from tests.tuning.conftest import SPACES, silent


def test_every_trial_leaves_a_record(study):
    for model in ("dcn", "dnn"):
        records = study.records(model)
        assert [record.name for record in records] == [f"{model}-{number:04}" for number in range(4)]
        for record in records:
            assert record.state == "complete"
            assert {"logloss", "auc", "accuracy"} <= {*record.validation} & {*record.test}
            assert 0 < record.dense_parameters < record.parameter_count
            assert 0 < record.seconds < record.total_seconds
            assert [row["step"] for row in record.history] == [5, 10, 15, 20, 25, 26]
            assert min(row["logloss"] for row in record.history) == pytest.approx(record.validation["logloss"])
        assert records[0].parameters == {}  # the defaults come first
        for record in records[1:]:
            assert len(record.options["deep_layers"]) == record.parameters["hidden_layers"]
    steps, total = time_share(study.records())
    assert 0 < steps < total


def test_all_time_counts_for_some_trial(cache, experiments, tmp_path):
    """What choosing and keeping take is not left out of the share that training is said to have."""
    made = Study.create(tmp_path / "study", {"dcn": experiments["dcn"]}, {"dcn": SPACES["dcn"]})
    search(made, (cache, {}), trials=2, show=lambda line: time.sleep(3), progress=silent)
    second = made.records()[1]
    assert second.total_seconds > second.seconds + 3  # the time in which the first trial was told of


def test_the_best_run_alone_is_kept(study):
    kept = {path.name for path in (study.path / "runs").iterdir()}
    assert kept == {study.best("dcn").name, study.best("dnn").name}
    best = study.best("dcn")
    assert best.validation["logloss"] == min(record.validation["logloss"] for record in study.records("dcn"))
    assert load_model(study.path / "runs" / best.name).model.config.cross_layers == best.options["cross_layers"]
    assert (study.path / "runs" / best.name / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert not any((study.path / "working").iterdir())


def test_seeds_repeat_the_best_setting(study):
    for model in ("dcn", "dnn"):
        best, again = study.best(model), study.records(model, "seeds")
        assert [record.seed for record in again] == [1, 2]
        assert {record.setting for record in again} == {best.setting}
        assert len({record.test["logloss"] for record in (best, *again)}) == 3


def test_importances_are_drawn(study):
    found = {model: importances(study, model) for model in study.models}
    assert set(found["dnn"]) == {"hidden_layers", "hidden_size", "lr"} & set(found["dnn"])
    assert sum(found["dnn"].values()) == pytest.approx(1)
    assert draw_importances(found)[:4] == b"\x89PNG"


def test_it_is_opened_as_it_was_made(study, tmp_path):
    new = Study.create(tmp_path / "new", study.experiments, SPACES)
    assert (new.path / "study.db").exists()  # made by one process, before others can come
    again = Study.open(study.path)
    assert again.experiments == study.experiments
    assert again.spaces == study.spaces
    with pytest.raises(ValueError, match="already holds a study; go on with --resume"):
        Study.create(study.path, study.experiments, SPACES)
    with pytest.raises(ValueError, match=r"is not a study: it has no study\.json"):
        Study.open(tmp_path)
    content = read_checked_json(study.path / "study.json")
    (tmp_path / "study.json").write_text(json.dumps({**content, "pruner": "sharp"}))
    with pytest.raises(ValueError, match="damaged"):
        Study.open(tmp_path)


def test_a_study_goes_on_where_it_stopped_and_repeats_itself(study, cache, experiments, tmp_path):
    """Interrupted in the midst of a trial: the next process goes on with that trial, and ends with the same records."""
    again = Study.create(tmp_path / "again", {"dcn": experiments["dcn"]}, {"dcn": SPACES["dcn"]}, pruner="none")
    with Trial.take(again, "dcn") as trial:
        seen = []

        def look(row):
            seen.append(row)
            if len(seen) == 2:
                raise Interrupted

        trial._look = look
        with pytest.raises(Interrupted):
            trial.run((cache, {}))
    assert again.records() == []
    search(Study.open(again.path), (cache, {}), trials=2, show=silent, progress=silent)
    found, expected = again.records("dcn"), study.records("dcn")[:2]
    assert [record.parameters for record in found] == [record.parameters for record in expected]
    assert [record.validation for record in found] == [record.validation for record in expected]


def test_a_trial_at_work_is_left_to_its_process(cache, experiments, tmp_path):
    made = Study.create(tmp_path / "study", {"dcn": experiments["dcn"]}, {"dcn": SPACES["dcn"]}, whole_grid=True)
    with Trial.take(made, "dcn") as first, Trial.take(made, "dcn") as second:
        assert first.name != second.name
    with Trial.take(made, "dcn") as third:
        assert third.name == first.name


def test_pruning_saves_steps(cache, experiments, tmp_path):
    """The whole grid, with a rate that learns nothing among the values: those trials end at their first evaluation."""
    spaces = {"dnn": {**SPACES["dnn"], "lr": [1e-7, 0.01]}}
    for pruner in ("halving", "median"):
        options = {"pruner": pruner, "whole_grid": True}
        made = Study.create(tmp_path / pruner, {"dnn": experiments["dnn"]}, spaces, **options)
        told = []
        search(made, (cache, {}), show=told.append, progress=silent)
        records = made.records()
        assert len(records) == len(told) == 8
        assert len({json.dumps(record.parameters) for record in records}) == 8
        pruned = [record for record in records if record.state == "pruned"]
        assert pruned
        assert all(record.steps < 26 and not record.test for record in pruned)
        if pruner == "halving":
            assert all(record.steps >= 20 for record in pruned), "not before the fourth of the evaluations"
        assert made.best("dnn").parameters["lr"] == 0.01
        search(made, (cache, {}), show=told.append, progress=silent)
        assert len(told) == 8  # nothing is left to do


def test_a_training_that_diverges_is_one_trial_lost(cache, experiments, tmp_path):
    wild = replace(experiments["dnn"], training=replace(experiments["dnn"].training, max_loss=1e-6))
    made = Study.create(tmp_path / "study", {"dnn": wild}, {"dnn": SPACES["dnn"]})
    told = []
    search(made, (cache, {}), trials=2, show=told.append, progress=silent)
    assert [record.state for record in made.records()] == ["diverged", "diverged"]
    assert "diverged, no evaluation" in told[0]
    assert made.best("dnn") is None
    assert not any((made.path / "runs").iterdir())


def test_a_budget_of_time(cache, experiments, tmp_path):
    made = Study.create(tmp_path / "study", experiments, SPACES)
    search(made, (cache, {}), budget=0.001, show=silent, progress=silent)
    assert len(made.records()) <= 1
    search(made, (cache, {}), budget=3, show=silent, progress=silent)
    assert {record.model for record in made.records()} == {"dcn", "dnn"}


def work(path, cache):
    search(Study.open(path), (cache, {}), show=silent, progress=silent)


def test_two_processes_share_a_grid(cache, experiments, tmp_path):
    spaces = {"dnn": {**SPACES["dnn"], "lr": [0.01]}}
    made = Study.create(tmp_path / "study", {"dnn": experiments["dnn"]}, spaces, whole_grid=True)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(made.path, cache)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    assert len({json.dumps(record.parameters) for record in made.records()}) == len(made.records()) == 4
    kept = [path.name for path in (made.path / "runs").iterdir()]
    assert kept == [made.best("dnn").name]


def test_the_last_trial_is_taken_once(experiments, tmp_path):
    """Eight at once, of a grid of four: whoever finds none that waits does not make a fifth."""
    spaces = {"dnn": {**SPACES["dnn"], "lr": [0.01]}}
    path = Study.create(tmp_path / "study", {"dnn": experiments["dnn"]}, spaces, whole_grid=True).path
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: _take(Study.open(path), None, 0.0, by_time=False), range(8)))
    names = [trial.name for trial in taken if trial]
    for trial in taken:
        if trial:
            trial.held.close()
    assert sorted(names) == ["dnn-0000", "dnn-0001", "dnn-0002", "dnn-0003"]


def test_quantities_have_no_logloss_to_search_by(experiments, tmp_path):
    quantities = SimpleNamespace(path="houses", sizes={"validation": 5}, schema=SimpleNamespace(task="regression"))
    made = Study.create(tmp_path / "study", experiments, SPACES)
    with pytest.raises(ValueError, match="the label of houses is a quantity"):
        search(made, (quantities, {}), trials=1, show=silent, progress=silent)


def test_without_validation_rows_there_is_nothing_to_choose_by(experiments, tmp_path):
    class NoValidation:
        path, sizes = "somewhere", {"train": 5, "validation": 0, "test": 5}

    made = Study.create(tmp_path / "study", experiments, SPACES)
    with pytest.raises(ValueError, match="somewhere has no rows in it"):
        search(made, (NoValidation(), {}), trials=1, show=silent, progress=silent)
