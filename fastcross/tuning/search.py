"""The search itself: trials of each model until there are enough or time is up, then further seeds of the best setting.

Several processes may run it on one study at a time; each takes what no other has taken.
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable

from fastcross.training.input import Opened, Show
from fastcross.training.run_folder import RunInUse
from fastcross.tuning.records import Record, from_run, write_record
from fastcross.tuning.space import chosen
from fastcross.tuning.study import Study
from fastcross.tuning.trial import Trial

Progress = Callable[[str, int, int], None]  # stage, done, total


def search(
    study: Study,
    opened: Opened,
    *,
    trials: int | None = None,
    budget: float | None = None,
    show: Show,
    progress: Progress,
) -> None:
    """Trials of every model, in turn the one that has had the least.

    Args:
        trials: of each model, those that the study has already among them; None for the whole grid, or without end.
        budget: seconds after which no further trial is started.
    """
    if not opened[0].sizes.get("validation"):
        raise ValueError(
            f"a search chooses by the validation part, and {opened[0].path} has no rows in it; "
            "prepare the data with, say, --split random:0.8,0.1,0.1"
        )
    if opened[0].schema.task == "regression":
        raise ValueError(
            f"a search compares loglosses, and the label of {opened[0].path} is a quantity, which has none"
        )
    end = time.monotonic() + budget if budget is not None else float("inf")
    mark = time.perf_counter()  # all time counts for some trial: that of choosing for the one that was chosen
    while time.monotonic() < end:
        done, total = _progress(study, trials)
        progress("tune", done, total)
        taken = _take(study, trials, mark, by_time=budget is not None)
        if taken is None:
            break
        with taken as trial:
            record = trial.run(opened)
        mark += record.total_seconds or 0.0
        show(_line(record, study.best(trial.model)))
    done, total = _progress(study, trials)
    progress("tune", done, max(done, total))


def seeds(study: Study, opened: Opened, number: int, *, show: Show, progress: Progress) -> None:
    """The best setting of each model with the seeds 1 … number: the trial that chose it had seed 0."""
    plans = [
        (model, best, seed) for model in study.models if (best := study.best(model)) for seed in range(1, number + 1)
    ]
    for done, (model, best, seed) in enumerate(plans):
        progress("seeds", done, len(plans))
        name = f"{best.name}-seed-{seed}"
        path = study.path / "seeds" / f"{name}.json"
        if path.exists():
            continue
        started = time.perf_counter()
        folder = study.path / "runs" / name
        try:
            chosen(study.experiments[model], best.parameters, seed).run(folder, opened=opened, go_on=True)
        except RunInUse:  # another process is at it
            continue
        took = time.perf_counter() - started
        record = from_run(folder, name=name, parameters=best.parameters, total_seconds=took)
        write_record(path, record)
        shutil.rmtree(folder, ignore_errors=True)
        show(_line(record, best))
    progress("seeds", len(plans), len(plans))


def time_share(records: list[Record]) -> tuple[float, float]:
    """Seconds of training steps, and of everything, over trainings that were timed."""
    timed = [record for record in records if record.total_seconds]
    return sum(record.seconds for record in timed), sum(record.total_seconds or 0.0 for record in timed)


def _take(study: Study, trials: int | None, started: float, *, by_time: bool) -> Trial | None:
    """The next trial, None at the end: chosen and taken under one lock, or two processes would take the last one."""
    with study.alone():
        model = _next(study, trials, by_time=by_time)
        return Trial.take(study, model, started) if model else None


def _next(study: Study, trials: int | None, *, by_time: bool) -> str | None:
    """The model with the fewest trials, or under a budget of time the fewest seconds; None at the end."""
    open_models = []
    for model in study.models:
        states = Counter(trial.state.name for trial in study.trials(model))
        begun = states.total() - states["WAITING"]
        left = _left_by_the_dead(study, model) if states["RUNNING"] else 0
        # Where there is nothing to choose, one trial says it all.
        more = states["WAITING"] if study.whole_grid else bool(study.spaces[model]) or not begun
        if left or (more and (trials is None or begun < trials)):
            spent = sum(record.total_seconds or 0.0 for record in study.records(model)) if by_time else begun - left
            open_models.append((spent, model))
    return min(open_models)[1] if open_models else None


def _left_by_the_dead(study: Study, model: str) -> int:
    """Trials that were begun and that nobody works on."""
    count = 0
    for trial in study.trials(model):
        if trial.state.name == "RUNNING" and (held := study.claim(f"{model}-{trial.number:04}")):
            held.close()
            count += 1
    return count


def _progress(study: Study, trials: int | None) -> tuple[int, int]:
    known = {model: study.trials(model) for model in study.models}
    done = sum(trial.state.is_finished() for found in known.values() for trial in found)
    each = [len(found) if trials is None else trials for found in known.values()]
    if study.whole_grid and trials is not None:
        each = [min(trials, len(found)) for found in known.values()]
    return done, sum(each)


def _line(record: Record, best: Record | None) -> str:
    logloss = f"logloss {record.validation['logloss']:.5f}" if record.validation else "no evaluation"
    beside = f" (best {best.validation['logloss']:.5f}, {best.name})" if best else ""
    setting = ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in record.parameters.items()
    )
    return (
        f"{record.name}: {record.state}, {logloss}{beside}; {record.steps:,} steps in {record.seconds:.1f} s; {setting}"
    )
