"""The folder of a study: what is searched, Optuna's memory of it, and a small record of each training.

study.json     data, models, spaces, training: what every process that works on the study reads
study.db       Optuna's, SQLite: a process that is killed leaves it whole, and several may write (Optuna's own file
               format, a journal of lines, is spoilt by a line that was half written)
trials/        a record of each trial, seeds/ of each further run of the best setting
runs/          run folders: of trials at work, and of the best trial of each model
working/       a lock for each trial at work, by which it is known whose process died
"""

import contextlib
import fcntl
import json
import os
import random
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcross.extras import require
from fastcross.files import read_checked_json, write_checked_json
from fastcross.training.experiment import Experiment
from fastcross.training.run_folder import Run, RunInUse, locked
from fastcross.tuning.space import Space, check_space, grid, parse_space

if TYPE_CHECKING:
    import optuna

STATES = ("complete", "pruned", "diverged")
PRUNERS = ("halving", "median", "none")
DEFAULT = "default"  # the mark of the trial that has the defaults
FIRST_LOOK = 4  # evaluations, before which no trial is halved away
LOCK_SECONDS = 100  # so long a process waits for another's writing before SQLite gives up


@dataclass(frozen=True)
class TrialRecord:
    """What is known of one training once it is over, as JSON: of a trial in a study, or of a run by itself.

    name: by which a person finds it again; parameters: what a search chose; options, training: all of the setting, with
    the training's seed in its own field; validation, test: metrics of the best weights (of a pruned trial: validation,
    as far as it came); dense_parameters: without embeddings, as the paper counts; steps: of training; seconds: of these
    steps; total_seconds: of everything from the choice of the parameters to this record.
    """

    name: str
    model: str
    state: str
    seed: int
    parameters: Mapping[str, Any]
    options: Mapping[str, Any]
    training: Mapping[str, Any]
    steps: int = 0
    seconds: float = 0.0
    total_seconds: float | None = None
    parameter_count: int | None = None
    dense_parameters: int | None = None
    validation: Mapping[str, float] = field(default_factory=dict)
    test: Mapping[str, float] = field(default_factory=dict)
    history: Sequence[Mapping[str, float]] = ()

    @property
    def setting(self) -> str:
        """The same for runs that differ in nothing but their seed."""
        return json.dumps([self.model, self.options, self.training], sort_keys=True)

    @property
    def deep(self) -> tuple[int, int] | None:
        """(layers, nodes) of a deep network whose layers are all of one size."""
        sizes: Sequence[int] = self.options.get("deep_layers") or ()
        return (len(sizes), sizes[0]) if len(set(sizes)) == 1 else None

    @classmethod
    def of_run(cls, folder: Path | str, **known: Any) -> "TrialRecord":
        """Of a finished run folder; ``known`` is what the folder does not say."""
        run = Run(folder)
        config, result = run.config, run.result
        if result is None:
            raise ValueError(f"the run {folder} is not finished; it can be resumed: fastcross train --resume {folder}")
        training = dict(config["training"])
        facts = {
            "name": Path(folder).name,
            "model": config["model"],
            "state": "complete",
            "seed": training.pop("seed", 0),
            "parameters": {},
            "options": config["options"],
            "training": training,
            "steps": result["steps"],
            "seconds": result["seconds"],
            "parameter_count": result["parameters"],
            "dense_parameters": result["dense_parameters"],
            "validation": result.get("validation", {}),
            "test": result.get("test", {}),
            "history": brief(run.history),
        }
        return cls(**{**facts, **known})

    @classmethod
    def parse(cls, content: Mapping[str, Any], path: Path | str) -> "TrialRecord":
        """From JSON that was read from ``path``."""
        names = {entry.name for entry in fields(cls)}
        try:
            record = cls(**{name: value for name, value in content.items() if name in names})
        except TypeError as error:
            raise ValueError(f"{path} holds no record of a training: {error}") from None
        if record.state not in STATES:
            told = f"its state must be one of {STATES}; got {record.state!r}"
            raise ValueError(f"{path} holds no record of a training: {told}")
        return record


def brief(history: Iterable[Mapping[str, float]]) -> list[dict[str, float]]:
    """Of each evaluation the step and the validation logloss."""
    seen = (row for row in history if "validation_logloss" in row)
    return [{"step": row["step"], "logloss": row["validation_logloss"]} for row in seen]


@dataclass(frozen=True)
class Study:
    """A study's folder.

    experiments: by model, what is the same in all of its trials; spaces: by model, as JSON; pruner: one of PRUNERS;
    whole_grid: whether the trials are all points of the grid and no others; seed: of the sampler.
    """

    path: Path
    experiments: Mapping[str, Experiment]
    spaces: Mapping[str, Any]
    pruner: str = "halving"
    whole_grid: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.pruner not in PRUNERS:
            raise ValueError(f"the pruner must be one of {', '.join(PRUNERS)}; got {self.pruner!r}")
        if self.experiments.keys() != self.spaces.keys():
            raise ValueError(f"each model needs a space; got {list(self.experiments)} and {list(self.spaces)}")

    @classmethod
    def create(
        cls, path: Path | str, experiments: Mapping[str, Experiment], spaces: Mapping[str, Any], **others: Any
    ) -> "Study":
        """A new study; a folder that holds something already is left alone."""
        require("tune", "tune")
        study = cls(Path(path), experiments, spaces, **others)
        for model, experiment in experiments.items():
            space = parse_space(model, spaces[model])
            check_space(experiment, space)
            experiment.check()
            if study.whole_grid:
                grid(space)
        if study.path.exists() and any(study.path.iterdir()):
            holds = (
                "already holds a study; go on with --resume" if (study.path / "study.json").exists() else "is not empty"
            )
            raise ValueError(f"{study.path} {holds}, or choose another folder")
        for name in ("trials", "seeds", "runs", "working"):
            (study.path / name).mkdir(parents=True, exist_ok=True)
        study._begin()
        write_checked_json(  # last: a folder that has it is whole
            study.path / "study.json",
            {
                "experiments": {model: experiment.to_dict() for model, experiment in experiments.items()},
                "spaces": {model: dict(space) for model, space in spaces.items()},
                "pruner": study.pruner,
                "whole_grid": study.whole_grid,
                "seed": study.seed,
            },
        )
        return study

    @classmethod
    def open(cls, path: Path | str) -> "Study":
        path = Path(path)
        if not (path / "study.json").is_file():
            raise ValueError(f"{path} is not a study: it has no study.json")
        content = read_checked_json(path / "study.json")
        try:
            experiments = {model: Experiment.from_dict(one) for model, one in content.pop("experiments").items()}
            return cls(path, experiments, **content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path / 'study.json'} does not describe a study: {error}") from None

    @property
    def models(self) -> list[str]:
        return list(self.experiments)

    def space(self, model: str) -> Space:
        return parse_space(model, self.spaces[model])

    def records(self, model: str | None = None, kind: str = "trials") -> list[TrialRecord]:
        """Of the trials, or of kind "seeds", of one model or of all."""
        found = [TrialRecord.parse(read_checked_json(path), path) for path in sorted((self.path / kind).glob("*.json"))]
        return [record for record in found if model in (None, record.model)]

    def best(self, model: str) -> TrialRecord | None:
        """The trial that the search chooses: the lowest validation logloss among those that ran to their end."""
        complete = [record for record in self.records(model) if record.state == "complete"]
        return min(complete, key=lambda record: record.validation["logloss"], default=None)

    @cached_property
    def storage(self) -> "optuna.storages.RDBStorage":
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        url = f"sqlite:///{(self.path / 'study.db').resolve()}"
        return optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": LOCK_SECONDS}})

    @cached_property
    def _searches(self) -> "dict[str, optuna.Study]":
        return {}

    def search(self, model: str) -> "optuna.Study":
        """Optuna's study of one model, with a sampler whose next draw depends on the seed and what is known alone."""
        import optuna

        if model not in self._searches:  # kept, for Optuna remembers in it what it has read of finished trials
            self._searches[model] = optuna.create_study(
                storage=self.storage, study_name=model, load_if_exists=True, pruner=self._pruner()
            )
        found = self._searches[model]
        seed = self.seed + len(found.get_trials(deepcopy=False))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # multivariate is experimental in Optuna 4
            found.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
        return found

    def trials(self, model: str) -> "list[optuna.trial.FrozenTrial]":
        return self.search(model).get_trials(deepcopy=False)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time, while it takes a trial or puts one away."""
        with open(self.path / "study.lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def claim(self, trial_name: str) -> contextlib.ExitStack | None:
        """Hold a trial: close the stack to let go. None where a living process holds it."""
        folder = self.path / "working" / trial_name
        folder.mkdir(exist_ok=True)
        stack = contextlib.ExitStack()
        stack.callback(_remove_empty, folder)
        try:
            stack.enter_context(locked(folder))
        except RunInUse:
            return None
        return stack

    def put_away(self, record: TrialRecord) -> None:
        """Write a trial's record, and keep its run folder only if it is the best of its model."""
        with self.alone():
            before = self.best(record.model)
            write_checked_json(self.path / "trials" / f"{record.name}.json", asdict(record))
            best = self.best(record.model)
            if best and best.name == record.name:  # no other trial waits for its curves, which are slow to draw
                run = Run(self.path / "runs" / record.name)
                run.draw(run.result or {}, run.history)
            for loser in {name for one in (before, record) if one and (name := one.name) != (best and best.name)}:
                shutil.rmtree(self.path / "runs" / loser, ignore_errors=True)

    def _pruner(self) -> "optuna.pruners.BasePruner":
        import optuna

        if self.pruner == "median":
            return optuna.pruners.MedianPruner(n_startup_trials=4)
        if self.pruner == "halving":
            # Not at the first evaluations: docs/paper has a search whose best network looks like the others until then.
            return optuna.pruners.SuccessiveHalvingPruner(min_resource=FIRST_LOOK, reduction_factor=2)
        return optuna.pruners.NopPruner()

    def _begin(self) -> None:
        """Make the database, for processes that come later and at once; of a grid, all points as trials that wait.

        They wait in an order of their own, for a pruner that saw the worst rates first would spare them. Without a grid
        the first trial has the defaults: the best of a study is never worse than they are.
        """
        for model in self.models:
            search = self.search(model)
            points = grid(self.space(model)) if self.whole_grid else []
            random.Random(self.seed).shuffle(points)
            for point in points:
                search.enqueue_trial(point)
            if not self.whole_grid and self.spaces[model]:
                search.enqueue_trial({}, user_attrs={DEFAULT: True})


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another process has just claimed it
        os.rmdir(folder)
