"""What DCNClassifier and DCNRegressor share: from rows to a run, from a run to predictions, there and back on disk.

What is heavy is imported where it is used: ``import fastcross`` looks these names up.
"""

from __future__ import annotations

import difflib
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from fastcross.defaults import PAPER_FREQUENCY
from fastcross.estimators.kept_run import KeptRun
from fastcross.fields import fitted

if TYPE_CHECKING:
    import pyarrow as pa

    from fastcross.data import Cache, Columns
    from fastcross.estimators.rows import Rows
    from fastcross.explain.explanation import Explanation
    from fastcross.interop.serving import Exported
    from fastcross.training import Experiment
    from fastcross.training.metrics import Predicted

Array = npt.NDArray[Any]
FILE = "estimator.json"  # in a saved run folder: what the run itself does not know
ALL_TRAIN = "random:1,0,0"
PREPARATION_OPTIONS = ("min_frequency", "hash_buckets", "time_column")
OF_PREPARATION = {  # types of what neither the model nor the training checks
    **dict.fromkeys(("min_frequency", "hash_buckets"), int | None),
    **dict.fromkeys(("group", "time_column"), str | None),
    "split": str | Sequence[float],
    "split_seed": int,
}
LARGEST_SEED = 2**31 - 1  # what NumPy draws and every platform takes


@dataclass(eq=False, repr=False)  # scikit-learn's own hash and repr
class Estimator(BaseEstimator):
    """Fits on a table in memory, or a file, what ``fastcross train`` fits on a file, bit for bit.

    Parameters are those of ``fastcross train``, under the same names. What is None follows from the number of rows and
    the columns, by the arithmetic in fastcross/defaults.py; ``chosen_`` holds it after fit.

    Args:
        model: a name among fastcross.models.MODELS; an option that it has not is an error.
        preset: "data", or "paper" for the paper's values where a parameter is None.
        columns: what the columns are, as fastcross.data.Columns, a dict of its fields, or None to infer all of them,
            as ``fastcross prepare`` does. A dict without ``infer_rest`` leaves out what it does not name.
        categorical_features: which columns are categories, as in scikit-learn: names, positions, a mask, or
            "from_dtype"; all other numbers are quantities then. None: inferred.
        split: how rows are divided where fit is given no eval_set; "random:0.9,0.1,0" trains on nine tenths and stops
            early by the last. "time" and the others are those of the command line.
        group: a column such as the user, within whose rows AUC is measured, too (gauc).
        random_state: of weights, order of rows and dropout; the command line's ``--seed`` where it is an integer.
        learning_rate: another name of lr.
        warm_start: a second fit goes on from the first: ids, vocabularies and weights stay, new values get new ids.
        verbose: print what the columns were taken for, and a line for each evaluation.

    After fit: ``report_`` says what the columns were taken for, ``result_`` what result.json of a run holds,
    ``history_`` what was measured at each evaluation, ``n_iter_`` how many epochs were trained.
    """

    task: ClassVar[str]  # of fastcross.data.Columns

    def __new__(cls, *args: Any, **parameters: Any) -> Self:
        known = cls._get_param_names()
        if unknown := [name for name in parameters if name not in known]:
            close = difflib.get_close_matches(unknown[0], known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"{cls.__name__} has no parameter {unknown[0]}{hint}")
        return super().__new__(cls)

    model: str = "dcn"
    _: KW_ONLY
    preset: str = "data"
    cross_layers: int | None = None
    cross_type: str | None = None
    rank: int | None = None
    experts: int | None = None
    deep_layers: Sequence[int] | str | None = None
    embedding_dim: int | Sequence[int] | None = None
    structure: str | None = None
    dropout: float | None = None
    batch_norm: bool | None = None
    l2: float | None = None
    crosses: Sequence[Sequence[str]] | None = None
    residual_units: int | None = None
    input_dim: int | None = None
    cross_dim: int | None = None
    backend: str | None = None
    batch_size: int | None = None
    epochs: int | None = None
    max_steps: int | None = None
    lr: float | None = None
    learning_rate: float | None = None
    schedule: str | None = None
    warmup_steps: int | None = None
    optimizer: str | None = None
    clip_norm: float | None = None
    evaluate_every: int | None = None
    patience: int | None = None
    monitor: str | None = None
    positive_weight: float | None = None
    max_loss: float | None = None
    bf16: bool | None = None
    graph: str | None = None
    columns: Columns | Mapping[str, Any] | None = None
    categorical_features: Any = None
    group: str | None = None
    split: str = "random:0.9,0.1,0"
    split_seed: int = 0
    time_column: str | None = None
    min_frequency: int | None = None
    hash_buckets: int | None = None
    device: str = "auto"
    threads: int | None = None
    random_state: Any = None
    warm_start: bool = False
    verbose: bool = False

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, eval_set: Any = None) -> Self:
        """Train on rows.

        Args:
            X: a pandas, polars or Arrow table, a dict of arrays, an array, or the path of a file that ``fastcross
                prepare`` reads.
            y: the labels, or the name of the column of X that holds them.
            sample_weight: how much each row counts: an array, or the name of a column of X.
            eval_set: (X, y) or (X, y, sample_weight) of rows that tell when to stop; None: ``split`` sets some aside.
        """
        if self.warm_start and hasattr(self, "run_"):
            return self._keeping(lambda: self._go_on(X, y, sample_weight, eval_set, self.split, {}))
        plan = self._plan()
        return self._keeping(lambda: self._fit(plan, X, y, sample_weight, eval_set, self.split))

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any) -> Self:
        """One epoch over rows, all of which train: of a new model, or on from the fitted one."""
        once: dict[str, Any] = {"epochs": 1, "max_steps": None}
        if hasattr(self, "run_"):
            return self._keeping(lambda: self._go_on(X, y, sample_weight, None, ALL_TRAIN, once))
        plan = self._plan()
        plan = replace(plan, training={**self._training(), **once})
        return self._keeping(lambda: self._fit(plan, X, y, sample_weight, None, ALL_TRAIN))

    def _plan(self) -> Experiment:
        from fastcross.data.columns import Columns
        from fastcross.models import MODELS
        from fastcross.training.experiment import Experiment, model_options

        options = self._given(name for model in MODELS for name in model_options(model))
        plan = Experiment(
            model=self.model,
            options=options,
            training=self._training(),
            device=self.device,
            threads=self.threads,
            preset=self.preset,
        )
        plan.check()
        for name, hint in OF_PREPARATION.items():
            fitted(name, getattr(self, name), hint)
        fitted("columns", self.columns, Columns | Mapping | None)
        return plan

    def _keeping(self, fit: Callable[[], None]) -> Self:
        """What was fitted before stays so where the fit fails."""
        before = dict(vars(self))
        try:
            fit()
        except BaseException:
            self.__dict__ = before
            raise
        return self

    def _fit(self, plan: Experiment, X: Any, y: Any, sample_weight: Any, eval_set: Any, split: Any) -> None:
        show = print if self.verbose else None
        kept = KeptRun(self.device)
        with tempfile.TemporaryDirectory(prefix="fastcross-") as folder:
            cache = self._prepare(X, y, sample_weight, eval_set, Path(folder) / "cache", split)
            if show:
                show(cache.report)
            result = plan.run(kept.path, show=show, opened=(cache, {}), curves=False, signals=False)
            self._set_run(kept, cache, result)

    def _go_on(
        self, X: Any, y: Any, sample_weight: Any, eval_set: Any, split: Any, training: Mapping[str, Any]
    ) -> None:
        """Train the fitted model on with new rows, whose frequent new values get ids."""
        from fastcross.data.preparation import prepare
        from fastcross.training.extension import extend

        if is_path(X):
            raise ValueError(f"X is the file {X}; warm_start and partial_fit take tables, fastcross extend takes files")
        show = print if self.verbose else None
        kept, encoder = KeptRun(self.device), self.run_.trained.encoder
        rows = self._rows(self._table(X), y, sample_weight, "X", getattr(self, "classes_", None))
        tables = [rows.table] if eval_set is None else [rows.table, self._evaluated(eval_set, rows)]
        columns = replace(encoder.columns, label=rows.label, sample_weight=rows.weight)
        with tempfile.TemporaryDirectory(prefix="fastcross-") as folder:
            options = {"seed": self.split_seed, "split": split, "min_frequency": self._least()}
            cache = prepare(tables, Path(folder) / "cache", columns=columns, grow=self.run_.path / "encoder", **options)
            if show:
                show(cache.report)
            given = {**self._given_training(), **training}
            told: dict[str, Any] = {"show": show, "signals": False, "opened": cache, "device": self.device}
            result = extend(self.run_.path, (), kept.path, training=given, threads=self.threads, **told)
            self._set_run(kept, cache, result)

    def _set_run(self, kept: KeptRun, cache: Cache, result: dict[str, Any]) -> None:
        from fastcross.training.loop import CUT_SHORT, is_cut_short

        kept.look_at(cache)
        self.run_, self.result_, self.report_ = kept, result, cache.report
        self._set_history(kept)
        self._warn(cache.warnings)
        if is_cut_short(result):
            message = CUT_SHORT.format(result["steps"])
            warnings.warn(message, ConvergenceWarning, stacklevel=6)

    def _set_history(self, kept: KeptRun) -> None:
        from fastcross.training.run_folder import Run

        run = Run(kept.path)
        self.history_, self.chosen_ = run.history, run.config.get("by_the_data", {})
        self.n_iter_ = max(1, math.ceil(self.history_[-1]["epoch"])) if self.history_ else 1

    def _prepare(self, X: Any, y: Any, sample_weight: Any, eval_set: Any, path: Path, split: Any) -> Cache:
        from fastcross.data import prepare
        from fastcross.estimators.rows import has_names

        options = {"seed": self.split_seed, "split": split, **self._given(PREPARATION_OPTIONS)}
        options["min_frequency"] = self._least()
        if is_path(X):
            _check_names(X, y=y, sample_weight=sample_weight, eval_set=eval_set)
            said = self.columns or self.group or y or sample_weight or self.task == "regression"
            facts = {"label": y, "sample_weight": sample_weight, "task": self.task}
            if self.categorical_features is not None:
                facts |= {"categorical": self._names_of_a_file(), "infer_rest": True}
                said = True
            columns = self._columns(**facts) if said else None
            cache = prepare(X, path, columns=columns, **options)
            self._check_task(cache.schema.task, X)
            self._set_classes(_values(cache.encoder.classes))
            self._set_features([*cache.encoder.columns.inputs])
            return cache
        if y is None and not has_names(X):
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        rows = self._rows(self._table(X, fitting=True), y, sample_weight, "X")
        if has_names(X):
            self._set_features(rows.features)
        if len(rows.table) < 2:
            raise ValueError(f"{type(self).__name__} needs at least two rows; got n_samples = {len(rows.table)}")
        tables = [rows.table] if eval_set is None else [rows.table, self._evaluated(eval_set, rows)]
        facts = {"label": rows.label, "sample_weight": rows.weight, "task": self.task, "classes": rows.texts}
        facts |= self._declared_categories(rows)
        cache = prepare(tables, path, columns=self._columns(**facts), **options)
        self._set_classes(rows.classes)
        return cache

    @classmethod
    def _check_task(cls, task: str, place: object) -> None:
        if (task == "regression") != (cls.task == "regression"):
            raise ValueError(f"{place}: the label is one of {task}; {cls.__name__} is for {cls.task}")

    def _with_labels(self, X: Any, y: Any) -> tuple[Any, Any]:
        """Rows and their labels, to be scored: y may name a column of X."""
        from fastcross.estimators.rows import has_names, labels_of

        check_is_fitted(self, "run_")
        if not has_names(X) or not (y is None or isinstance(y, str)):
            return X, y
        return labels_of(self._table(X), y, "X", f"{type(self).__name__}.score")[:2]

    def _rows(self, table: pa.Table, y: Any, weight: Any, place: str, classes: Array | None = None) -> Rows:
        raise NotImplementedError

    def _set_classes(self, classes: Array | None) -> None:
        pass

    def _set_features(self, names: Sequence[str]) -> None:
        self.feature_names_in_, self.n_features_in_ = np.array(names, dtype=object), len(names)

    def _evaluated(self, eval_set: Any, rows: Rows) -> pa.Table:
        """The rows of eval_set under the names of the others."""
        if isinstance(eval_set, list) and len(eval_set) == 1:
            (eval_set,) = eval_set
        if not isinstance(eval_set, tuple) or not 2 <= len(eval_set) <= 3:
            raise ValueError(f"eval_set must be (X, y) or (X, y, sample_weight); got {type(eval_set).__name__}")
        X, y, weight = (*eval_set, None)[:3]
        if is_path(X):
            raise ValueError(f"X is a table, and eval_set the file {X}: give both as tables")
        if weight is None and rows.weight is not None:
            weight = rows.weight if rows.weight in getattr(X, "columns", ()) else 1.0
        return self._rows(self._table(X, place="eval_set"), y, weight, "eval_set", rows.classes).renamed(rows).table

    def _table(self, X: Any, *, fitting: bool = False, place: str = "X") -> pa.Table:
        """The columns under the names of the training; checked as scikit-learn does where they have none."""
        from fastcross.estimators.rows import has_names, to_table

        if has_names(X):
            table = to_table(X, place)
            if fitting or hasattr(self, "feature_names_in_"):
                return table
            if table.num_columns != self.n_features_in_:
                raise ValueError(
                    f"X has {table.num_columns} features, but {type(self).__name__} is expecting "
                    f"{self.n_features_in_} features as input"
                )
            return table.rename_columns([f"x{i}" for i in range(table.num_columns)])
        if fitting and hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        array = validate_data(self, X, dtype=None, ensure_all_finite=False, reset=fitting)
        return to_table(array, place, None if fitting else getattr(self, "feature_names_in_", None))

    def _predict(self, X: Any, *, labelled: bool = False) -> Predicted:
        from fastcross.data import read_for_prediction
        from fastcross.training.metrics import predict_rows

        check_is_fitted(self, "run_")
        trained = self.run_.trained
        source = X if is_path(X) else self._table(X)
        rows = read_for_prediction(source, trained.encoder, labelled=labelled)
        found = predict_rows(trained.model, rows)
        self._warn(rows.warnings)
        return found

    @staticmethod
    def _warn(messages: Iterable[str]) -> None:
        from fastcross.data.columns import DataWarning

        for message in messages:
            warnings.warn(message, DataWarning, stacklevel=4)

    @property
    def feature_importances_(self) -> Array:
        """(columns,): how far the output moves where a column's values are dealt to other rows, as shares of the sum.

        Measured when it is asked for, on 1,024 validation rows; a column that was left out has 0.
        """
        check_is_fitted(self, "run_")
        names = getattr(self, "feature_names_in_", [f"x{i}" for i in range(self.n_features_in_)])
        found = self.run_.importances
        return np.array([found.get(name, 0.0) for name in names])

    def explain(self, X: Any, *, output: int = 0) -> Explanation:
        """Main effects and crosses of the model's cross network over rows, as ``fastcross explain`` has them.

        Args:
            output: which logit, of a classifier with more than two classes.
        """
        from fastcross.data.prediction import read_for_prediction
        from fastcross.explain.explanation import explain
        from fastcross.models.dcn import DCN

        check_is_fitted(self, "run_")
        trained = self.run_.trained
        model = trained.model
        if not (isinstance(model, DCN) and model.parallel and model.config.cross_type == "vector"):
            raise ValueError(
                "explain takes apart the cross network of a DCN that stands beside the deep one (cross_type vector, "
                f"structure parallel); got {self.model}"
            )
        source = X if is_path(X) else self._table(X)
        rows = lambda: read_for_prediction(source, trained.encoder, batch_size=1024)  # noqa: E731
        return explain(model, rows, names=trained.schema.names, output=output)

    def save(self, path: str | PathLike[str], *, overwrite: bool = False) -> None:
        """Write the run folder, which :meth:`load` and every command of the command line read.

        Args:
            overwrite: replace a run folder that is there.
        """
        check_is_fitted(self, "run_")
        self.run_.copy_to(Path(path), FILE, self._facts(), overwrite=overwrite)

    @classmethod
    def load(cls, path: str | PathLike[str], device: str = "auto") -> Self:
        """The estimator in a run folder: one that :meth:`save` wrote, or that of a ``fastcross train``."""
        from fastcross.files import read_checked_json
        from fastcross.training.run_folder import Run

        run = Run(Path(path))
        saved = read_checked_json(run.path / FILE) if (run.path / FILE).exists() else {}
        kept = KeptRun.of(run.path, device)
        cls._check_task(kept.trained.schema.task, path)
        parameters = saved.get("parameters") or cls._parameters_of(run.config)
        estimator = cls(**{**parameters, "device": device})
        estimator.run_, estimator.result_, estimator.report_ = kept, run.result or {}, saved.get("report", "")
        estimator._set_history(kept)
        kept.known = saved.get("importances")
        classes = saved.get("classes")
        encoder = kept.trained.encoder
        estimator._set_classes(np.array(classes[1], classes[0]) if classes else _values(encoder.classes))
        if saved.get("features") is None:
            estimator._set_features([*encoder.columns.inputs])
        elif isinstance(saved["features"], int):
            estimator.n_features_in_ = saved["features"]
        else:
            estimator._set_features(saved["features"])
        return estimator

    @classmethod
    def _parameters_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Of a run that the command line trained."""
        known = cls._get_param_names()
        options = {name: value for name, value in {**config["options"], **config["training"]}.items() if name in known}
        return {"model": config["model"], **options, "random_state": config["training"]["seed"]}

    def _facts(self) -> dict[str, Any]:
        """What the run itself does not know, as JSON."""
        classes = getattr(self, "classes_", None)
        kind = None if classes is None else "object" if classes.dtype.kind in "OUS" else classes.dtype.str
        names = getattr(self, "feature_names_in_", None)
        return {
            "estimator": type(self).__name__,
            "parameters": {name: _plain(value) for name, value in self.get_params(deep=False).items()},
            "classes": None if classes is None else [kind, classes.tolist()],
            "features": self.n_features_in_ if names is None else names.tolist(),
            "report": self.report_,
            "importances": self.run_._known_importances(),
        }

    def export(self, path: str | PathLike[str], *, encoded: bool = False) -> Exported:
        """Write the model and its encoder for serving: *.onnx from raw values to probabilities, or *.pt2."""
        from fastcross.interop.serving import export_run
        from fastcross.training import load_model

        check_is_fitted(self, "run_")
        return export_run(
            load_model(self.run_.path, "cpu").model, self.run_.trained.encoder, Path(path), encoded=encoded
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = True
        return tags

    def _given(self, names: Iterable[str]) -> dict[str, Any]:
        """The parameters among these that the estimator has and that are not None."""
        return {name: value for name in names if (value := getattr(self, name, None)) is not None}

    def _least(self) -> int | None:
        """The least frequency; None: by the number of rows."""
        given = self.min_frequency
        return PAPER_FREQUENCY if given is None and self.preset == "paper" and self.hash_buckets is None else given

    def _given_training(self) -> dict[str, Any]:
        from fastcross.training import TrainingConfig

        given = self._given(entry.name for entry in fields(TrainingConfig))
        if self.learning_rate is not None:
            if self.lr not in (None, self.learning_rate):
                raise ValueError(f"lr and learning_rate are one parameter; got {self.lr} and {self.learning_rate}")
            given["lr"] = self.learning_rate
        return given

    def _training(self) -> dict[str, Any]:
        given = self._given_training()
        seed = self.random_state
        if not isinstance(seed, int):
            seed = int(check_random_state(seed).randint(LARGEST_SEED))
        return {**given, "seed": seed}

    def _names_of_a_file(self) -> tuple[str, ...]:
        names = self.categorical_features
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"X is a file, whose categorical_features must be names of columns; got {names!r}")
        return tuple(names)

    def _declared_categories(self, rows: Rows) -> dict[str, Any]:
        """What categorical_features says of the columns of a table: they are categories, other numbers quantities."""
        if self.categorical_features is None:
            return {}
        from fastcross.estimators.rows import chosen_names, numbers_of

        chosen = chosen_names(self.categorical_features, rows.features)
        dense = tuple(name for name in numbers_of(rows.table, rows.features) if name not in chosen)
        return {"categorical": chosen, "dense": dense, "infer_rest": True}

    def _columns(self, **facts: Any) -> Columns:
        """What is declared, and facts beside it."""
        from fastcross.data import Columns

        declared = dict(self.columns.to_dict() if isinstance(self.columns, Columns) else self.columns or {})
        if self.group is not None:
            facts["group"] = self.group
        clash = [name for name, fact in facts.items() if declared.get(name, fact) not in (None, (), False, fact)]
        if clash:
            raise ValueError(f"columns names {clash[0]} {declared[clash[0]]!r}, and the call {facts[clash[0]]!r}")
        return Columns.make({**declared, **{name: fact for name, fact in facts.items() if fact is not None}})


def is_path(X: object) -> bool:
    return isinstance(X, str | PathLike)


def _check_names(X: object, **given: Any) -> None:
    """Beside a file there are names of its columns, and nothing else."""
    for name, value in given.items():
        if value is not None and (name == "eval_set" or not isinstance(value, str)):
            instead = "the rows of a file are divided by split" if name == "eval_set" else "name a column of it"
            raise ValueError(f"X is the file {X}, and {name} a {type(value).__name__} beside it: {instead}")


def _values(texts: Sequence[str]) -> Array | None:
    """The classes that a file names, as numbers where all of them are numbers."""
    for kind in (int, float):
        try:
            return np.array([kind(text) for text in texts]) if texts else None
        except ValueError:
            continue
    return np.array(texts, dtype=object)


def _plain(value: Any) -> Any:
    """In JSON's types; a generator of random numbers, which has none, is left out."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, str | int | float | bool) else None
