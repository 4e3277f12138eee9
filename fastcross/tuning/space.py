"""What a search chooses from: for each model a few parameters, each a list of values or a range.

A parameter is an option of the model or a field of TrainingConfig, by its name; ``hidden_layers`` and ``hidden_size``
are the deep network's, whose layers are all of one size as in the paper. As JSON, for ``fastcross tune --space``:

    {"dcn": {"hidden_layers": [2, 3], "hidden_size": [32, 64], "cross_layers": {"low": 1, "high": 6},
             "lr": {"low": 1e-4, "high": 1e-3, "log": true, "grid": [1e-4, 3e-4, 1e-3]}}}

A range of whole numbers holds all of them; ``grid`` says which values of another range the full grid takes.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcross.training.config import TrainingConfig
from fastcross.training.experiment import Experiment, model_options

if TYPE_CHECKING:
    import optuna

DEEP = ("hidden_layers", "hidden_size")  # together an experiment's deep_layers
# Section 4.2: "from 0.0001 to 0.001 with increments of 0.0001".
RATES = {"low": 1e-4, "high": 1e-3, "log": True, "grid": [round(1e-4 * i, 4) for i in range(1, 11)]}
NETWORK = {"hidden_layers": [2, 3, 4, 5], "hidden_size": [32, 64, 128, 256, 512, 1024], "lr": RATES}
UNITS = {"low": 100, "high": 1026, "log": True, "grid": [100, 256, 512, 1026]}
# The paper says nothing of these two; tables of single weights want larger steps than networks.
LINEAR_RATES = {"low": 1e-4, "high": 1e-1, "log": True, "grid": [1e-4, 1e-3, 1e-2, 1e-1]}
PAPER: dict[str, dict[str, Any]] = {
    "dcn": {**NETWORK, "cross_layers": [1, 2, 3, 4, 5, 6]},
    "deep_crossing": {"residual_units": [1, 2, 3, 4, 5], "input_dim": UNITS, "cross_dim": UNITS, "lr": RATES},
    "dnn": NETWORK,
    "wide_deep": NETWORK,
    "fm": {"embedding_dim": [4, 8, 16, 32], "lr": LINEAR_RATES},
    "lr": {"lr": LINEAR_RATES},
}
# What matters beside the paper's choices on data that is smaller than Criteo's log.
STEPS = {"batch_size": [32, 64, 128, 256, 512], "lr": {"low": 3e-4, "high": 1e-2, "log": True}}
SMALLER = {
    "hidden_layers": [1, 2, 3],
    "hidden_size": [32, 64, 128, 256, 512],
    "dropout": {"low": 0.0, "high": 0.5},
    **STEPS,
}
BY_PRESET: dict[str, dict[str, dict[str, Any]]] = {
    "paper": PAPER,
    "data": {
        "dcn": {**SMALLER, "cross_layers": [1, 2, 3, 4, 5, 6]},
        "deep_crossing": {**PAPER["deep_crossing"], **STEPS},
        "dnn": SMALLER,
        "wide_deep": SMALLER,
        "fm": {**PAPER["fm"], "batch_size": STEPS["batch_size"]},
        "lr": {**PAPER["lr"], "batch_size": STEPS["batch_size"]},
    },
}


@dataclass(frozen=True)
class Parameter:
    """One dimension: values to choose from, or a range; ``grid`` are the values of the full grid, if it has some."""

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    grid: tuple[Any, ...] = ()

    @classmethod
    def parse(cls, name: str, value: object) -> "Parameter":
        if isinstance(value, Sequence) and not isinstance(value, str):
            if not value or not all(isinstance(one, str | int | float) or one is None for one in value):
                raise ValueError(f"the values of {name} must be a list of numbers or names; got {value!r}")
            return cls(name, choices=tuple(value), grid=tuple(value))
        if not isinstance(value, Mapping) or not {"low", "high"} <= {*value} <= {"low", "high", "log", "grid"}:
            raise ValueError(f"{name} must be a list, or a range of low and high with log and grid; got {value!r}")
        low, high, log = value["low"], value["high"], bool(value.get("log", False))
        if not all(isinstance(one, int | float) and math.isfinite(one) for one in (low, high)) or low > high:
            raise ValueError(f"the range of {name} must go from low up to high; got {low!r} and {high!r}")
        if log and low <= 0:
            raise ValueError(f"the low end of {name}, which is searched by its logarithm, must be positive; got {low}")
        whole = isinstance(low, int) and isinstance(high, int)
        return cls(name, (), low, high, log, tuple(value.get("grid") or (range(low, high + 1) if whole else ())))

    def suggest(self, trial: "optuna.Trial") -> Any:
        """The value that a trial has, or gets now."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(self.name, self.low, self.high, log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)

    @property
    def extremes(self) -> tuple[Any, ...]:
        """Values such that all others are good if these are."""
        return self.choices or (self.low, self.high)


Space = tuple[Parameter, ...]


def parse_space(model: str, values: Mapping[str, Any]) -> Space:
    """A model's space, from JSON's types; a name that the model has not is an error."""
    options = model_options(model)
    deep = DEEP if "deep_layers" in options else ()
    training = tuple(entry.name for entry in fields(TrainingConfig) if entry.name != "seed")
    if unknown := [name for name in values if name not in (*options, *deep, *training)]:
        raise ValueError(f"the space of {model} names {', '.join(unknown)}, which is no option of it or of training")
    if bool(DEEP[0] in values) != bool(DEEP[1] in values):
        raise ValueError(f"the space of {model} must name hidden_layers and hidden_size together; got {list(values)}")
    return tuple(Parameter.parse(name, value) for name, value in values.items())


def read_spaces(path: Path | str) -> dict[str, Any]:
    """The spaces of a JSON file, by model."""
    try:
        content = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(space, dict) for space in content.values()):
        raise ValueError(f'{path} must hold a space for each model as in {{"dcn": {{"lr": [0.001]}}}}; got {content!r}')
    for model, space in content.items():
        parse_space(model, space)
    return content


def without(space: Mapping[str, Any], given: Sequence[str]) -> dict[str, Any]:
    """A space less what the user has given a value: deep_layers are both of DEEP."""
    fixed = {*given, *(DEEP if "deep_layers" in given else ())}
    return {name: value for name, value in space.items() if name not in fixed}


def grid(space: Space) -> list[dict[str, Any]]:
    """Every combination."""
    if endless := [parameter.name for parameter in space if not parameter.grid]:
        raise ValueError(f"a full grid needs values for {', '.join(endless)}: a list, or a range with a grid")
    return [
        dict(zip([parameter.name for parameter in space], values, strict=True))
        for values in itertools.product(*(parameter.grid for parameter in space))
    ]


def check_space(base: Experiment, space: Space) -> None:
    """Raise where a model or the training refuses a value: now, and not after hours in some trial."""
    first = {parameter.name: parameter.extremes[0] for parameter in space}
    for parameter in space:
        for value in (*parameter.extremes, *parameter.grid):
            chosen(base, {**first, parameter.name: value}).check()


def chosen(base: Experiment, parameters: Mapping[str, Any], seed: int = 0) -> Experiment:
    """The experiment with these parameters and this seed."""
    parameters = dict(parameters)
    options: dict[str, Any] = dict(base.options)
    if DEEP[0] in parameters:
        options["deep_layers"] = [parameters.pop(DEEP[1])] * parameters.pop(DEEP[0])
    known = model_options(base.model)
    options |= {name: value for name, value in parameters.items() if name in known}
    training = {name: value for name, value in parameters.items() if name not in known}
    given = asdict(base.training) if isinstance(base.training, TrainingConfig) else base.training
    return replace(base, options=options, training={**given, **training, "seed": seed})
