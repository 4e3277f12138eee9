"""The search itself: trials of each model until there are enough or time is up, then further seeds of the best setting.

Several processes may run it on one study at a time; each takes what no other has taken.
"""

import contextlib
import math
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fastcross.files import write_checked_json
from fastcross.training.experiment import Opened
from fastcross.training.run_folder import Run, RunInUse
from fastcross.training.step import Show, TrainingError
from fastcross.tuning.space import chosen
from fastcross.tuning.study import DEFAULT, Study, TrialRecord, brief

if TYPE_CHECKING:
    import optuna

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
            plan = chosen(study.experiments[model], best.parameters, seed)
            plan.run(folder, opened=opened, go_on=True, curves=False)
        except RunInUse:  # another process is at it
            continue
        took = time.perf_counter() - started
        record = TrialRecord.of_run(folder, name=name, parameters=best.parameters, total_seconds=took)
        write_checked_json(path, asdict(record))
        shutil.rmtree(folder, ignore_errors=True)
        show(_line(record, best))
    progress("seeds", len(plans), len(plans))


def time_share(records: Sequence[TrialRecord]) -> tuple[float, float]:
    """Seconds of training steps, and of everything, over trainings that were timed."""
    timed = [record for record in records if record.total_seconds]
    return sum(record.seconds for record in timed), sum(record.total_seconds or 0.0 for record in timed)


def _take(study: Study, trials: int | None, started: float, *, by_time: bool) -> "Trial | None":
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


def _line(record: TrialRecord, best: TrialRecord | None) -> str:
    logloss = f"logloss {record.validation['logloss']:.5f}" if record.validation else "no evaluation"
    beside = f" (best {best.validation['logloss']:.5f}, {best.name})" if best else ""
    setting = (
        "the defaults"
        if not record.parameters
        else ", ".join(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in record.parameters.items()
        )
    )
    return (
        f"{record.name}: {record.state}, {logloss}{beside}; {record.steps:,} steps in {record.seconds:.1f} s; {setting}"
    )


class Pruned(Exception):
    """The pruner sees no use in going on."""


@dataclass
class Trial:
    """A trial that this process holds; leave it as a context manager, whatever happens in it."""

    study: Study
    model: str
    trial: "optuna.Trial"
    held: contextlib.ExitStack
    started: float

    @classmethod
    def take(cls, study: Study, model: str, started: float | None = None) -> "Trial":
        """One that a dead process left, to go on with, or the next one: of the grid, or as the sampler chooses.

        Several processes may do so, one at a time: under :meth:`Study.alone`.

        started: since when its time counts, by time.perf_counter.
        """
        import optuna

        started = time.perf_counter() if started is None else started
        search = study.search(model)
        for left in search.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            if held := study.claim(f"{model}-{left.number:04}"):
                known = study.storage.get_study_id_from_name(model)
                number = study.storage.get_trial_id_from_study_id_trial_number(known, left.number)
                return cls(study, model, optuna.Trial(search, number), held, started)
        trial = search.ask()
        held_now = study.claim(f"{model}-{trial.number:04}")
        assert held_now is not None, "its number is new"
        return cls(study, model, trial, held_now, started)

    @property
    def name(self) -> str:
        return f"{self.model}-{self.trial.number:04}"

    def __enter__(self) -> "Trial":
        return self

    def __exit__(self, *error: object) -> None:
        self.held.close()

    def run(self, opened: Opened) -> TrialRecord:
        """Train; the record is written, Optuna told, and the run folder gone unless it is the best."""
        space = () if DEFAULT in self.trial.user_attrs else self.study.space(self.model)
        parameters = {one.name: one.suggest(self.trial) for one in space}
        record = self._train(parameters, opened)
        self.study.put_away(record)
        self._tell(record)
        return record

    def _train(self, parameters: Mapping[str, Any], opened: Opened) -> TrialRecord:
        experiment = chosen(self.study.experiments[self.model], parameters)
        folder = self.study.path / "runs" / self.name
        known: dict[str, Any] = {"name": self.name, "parameters": parameters}
        try:
            experiment.run(folder, opened=opened, go_on=True, on_evaluation=self._look, curves=False)
            return TrialRecord.of_run(folder, **known, total_seconds=time.perf_counter() - self.started)
        except Pruned:
            state = "pruned"
        except TrainingError:
            state = "diverged"
        history = Run(folder).history if (folder / "config.json").exists() else []
        best = min((row["validation_logloss"] for row in history), default=math.nan)
        plan = experiment.to_dict()
        return TrialRecord(
            **known,
            model=self.model,
            state=state,
            seed=plan["training"].pop("seed"),
            options=plan["options"],
            training=plan["training"],
            steps=int(history[-1]["step"]) if history else 0,
            seconds=history[-1]["seconds"] if history else 0.0,
            total_seconds=time.perf_counter() - self.started,
            validation={"logloss": best} if history else {},
            history=brief(history),
        )

    def _look(self, row: Mapping[str, float]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a resumed training reports the evaluations since its checkpoint again
            self.trial.report(row["validation_logloss"], step=self._evaluations(row))
        if self.trial.should_prune():
            raise Pruned

    def _evaluations(self, row: Mapping[str, float]) -> int:
        """How many there have been: the resource that a pruner counts in."""
        every = Run(self.study.path / "runs" / self.name).config["training"]["evaluate_every"]
        return math.ceil(row["step"] / every if every else round(row["epoch"], 6))

    def _tell(self, record: TrialRecord) -> None:
        import optuna

        states = {"complete": "COMPLETE", "pruned": "PRUNED", "diverged": "FAIL"}
        state = optuna.trial.TrialState[states[record.state]]
        value = record.validation["logloss"] if record.state == "complete" else None
        self.trial.study.tell(self.trial, value, state=state)
