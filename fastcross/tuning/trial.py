"""One trial of a study: its parameters, its training with a look at every evaluation, and its record."""

import contextlib
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastcross.training.input import Opened
from fastcross.training.run_folder import Run
from fastcross.training.step import TrainingError
from fastcross.tuning.records import Record, brief, from_run
from fastcross.tuning.space import chosen
from fastcross.tuning.study import Study

if TYPE_CHECKING:
    import optuna


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

    def run(self, opened: Opened) -> Record:
        """Train; the record is written, Optuna told, and the run folder gone unless it is the best."""
        parameters = {one.name: one.suggest(self.trial) for one in self.study.space(self.model)}
        record = self._train(parameters, opened)
        self.study.put_away(record)
        self._tell(record)
        return record

    def _train(self, parameters: Mapping[str, Any], opened: Opened) -> Record:
        experiment = chosen(self.study.experiments[self.model], parameters)
        folder = self.study.path / "runs" / self.name
        known: dict[str, Any] = {"name": self.name, "parameters": parameters}
        try:
            experiment.run(folder, opened=opened, go_on=True, on_evaluation=self._look)
            return from_run(folder, **known, total_seconds=time.perf_counter() - self.started)
        except Pruned:
            state = "pruned"
        except TrainingError:
            state = "diverged"
        history = Run(folder).history if (folder / "config.json").exists() else []
        best = min((row["validation_logloss"] for row in history), default=math.nan)
        plan = experiment.to_dict()
        return Record(
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
        every = self.study.experiments[self.model].training.evaluate_every
        return math.ceil(row["step"] / every if every else round(row["epoch"], 6))

    def _tell(self, record: Record) -> None:
        import optuna

        states = {"complete": "COMPLETE", "pruned": "PRUNED", "diverged": "FAIL"}
        state = optuna.trial.TrialState[states[record.state]]
        value = record.validation["logloss"] if record.state == "complete" else None
        self.trial.study.tell(self.trial, value, state=state)
