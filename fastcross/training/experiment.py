"""An experiment: data, model and training. It trains, resumes, and saves itself as JSON.
experiment = Experiment(Dataset("train.txt"), "dcn", {"cross_layers": 4}, {"epochs": 3})   # all else follows the data
result = experiment.run("runs/first", show=print)
resume("runs/first")                            # after a crash, bit for bit
model = load_model("runs/first").model
"""

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from fastcross._version import __version__
from fastcross.batch import Schema
from fastcross.data.cache import Cache
from fastcross.defaults import PAPER_FREQUENCY, PRESETS, defaults, spelled
from fastcross.files import user_folder
from fastcross.models.base import Model, model_class
from fastcross.training.checkpoint import CheckpointError
from fastcross.training.config import (
    EMBEDDINGS,
    GENERATED_LOG_OPTIONS,
    GENERATED_LOG_TRAINING,
    GENERATED_ROWS,
    SHARDINGS,
    TrainingConfig,
    choose_device,
)
from fastcross.training.loop import Callback, Trainer
from fastcross.training.run_folder import Run, read_json, working_in, write_json
from fastcross.training.step import ALONE, Processes, Show

Progress = Callable[[str, int, int], None]  # stage, done, total
Opened = tuple[Cache, Mapping[str, float]]  # with the best possible logloss of each part, if known
SHARDED_MODELS = ("dcn", "dnn")  # those whose tables TorchRec can divide
SHARDED_OPTIMIZERS = ("adam", "sgd")
OF_DATA = (
    "cardinalities",
    "num_dense",
    "bag_cardinalities",
    "num_outputs",
    "regression",
    "label_mean",
    "label_deviation",
)


@dataclass(frozen=True)
class Dataset:
    """Rows, and how they are prepared.

    Args:
        files: a cache, or files to prepare; none for a generated click log, whose best possible logloss is known.
        cache: folder for the prepared data; None for one in the user's cache folder.
        preparation: arguments of :func:`fastcross.data.prepare`; others have its defaults, and min_frequency None.
        rows: number of rows of the generated log.
    """

    files: tuple[str, ...] = ()
    cache: str | None = None
    preparation: Mapping[str, Any] = field(default_factory=dict)
    rows: int = GENERATED_ROWS

    def __post_init__(self) -> None:
        files = (self.files,) if isinstance(self.files, str | os.PathLike) else self.files
        object.__setattr__(self, "files", tuple(os.fspath(file) for file in files))

    def open(self, show: Show | None = None, *, progress: Progress | None = None) -> Opened:
        """The cache, prepared if necessary, and the best possible logloss of each part, if known."""
        show = show or (lambda line: None)
        if not self.files:
            return self._generate(show, progress)
        if len(self.files) == 1 and Path(self.files[0]).is_dir():
            return _shown(Cache.open(self.files[0]), show), {}
        return self._prepare(show, progress), {}

    def _generate(self, show: Show, progress: Progress | None) -> Opened:
        from fastcross.data.generate import read_info, write_click_log  # needs pyarrow, which a cache does not

        home = Path(self.cache) if self.cache else user_folder() / f"clicks-{self.rows}-{__version__}"
        home.mkdir(parents=True, exist_ok=True)
        log = home / "clicks.txt"
        if not log.exists() or not read_info(log):
            show(f"generating a click log of {self.rows:,} rows with planted crosses: {log}")
            write_click_log(log, self.rows)
        info = read_info(log)
        assert info is not None
        options = {"format": "criteo", "split": info.split, "min_frequency": PAPER_FREQUENCY}
        cache = Dataset((str(log),), str(home / "cache"), options)._prepare(show, progress)
        known = info.bayes_logloss_parts.items()
        return cache, {part: value for part, value in known if math.isfinite(value)}  # a part may have no rows

    def _prepare(self, show: Show, progress: Progress | None) -> Cache:
        """`prepare` checks whether the cache exists and is up to date."""
        from fastcross.data.preparation import prepare

        folder = self.cache or self._folder()
        cache = prepare(self.files, folder, progress=progress or False, **{"min_frequency": None, **self.preparation})
        return _shown(cache, show)

    def _folder(self) -> str:
        """One for these files under these options."""
        paths = [str(Path(file).resolve()) for file in self.files]
        key = json.dumps([paths, dict(self.preparation)], sort_keys=True, default=str)
        name = f"{Path(self.files[0]).name.split('.')[0]}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        return str(user_folder() / name)


def _shown(cache: Cache, show: Show) -> Cache:
    """Print how the columns were read, at every training: a column of the wrong type costs accuracy."""
    show(f"data: {cache.path}\n{cache.report}")
    skipped = cache.manifest["skipped"]
    if skipped["rows"]:
        show(f"skipped {skipped['rows']:,} bad rows, such as: {skipped['examples'][0]}")
    return cache


@dataclass(frozen=True)
class Experiment:
    """What to train, on what, and how.

    Args:
        data: the rows.
        model: a name among :data:`fastcross.models.MODELS`.
        options: the model's options, see :func:`model_options`. ``crosses`` may name columns.
        training: the configuration of the training loop, or only some fields of it.
        preset: where all other options and fields come from: "data" (see fastcross/defaults.py) or "paper", the
            defaults of the model and of TrainingConfig.
        device: "auto", "cpu", "cuda", "cuda:1" …
        threads: number of CPU threads; None for PyTorch's present number.
        embedding: the implementation of the tables, one of EMBEDDINGS.
        sharding: how tables are divided between processes, one of SHARDINGS; None for one process without TorchRec.
    """

    data: Dataset = field(default_factory=Dataset)
    model: str = "dcn"
    options: Mapping[str, Any] = field(default_factory=dict)
    training: TrainingConfig | Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    threads: int | None = None
    embedding: str = "auto"
    sharding: str | None = None
    preset: str = "data"

    def __post_init__(self) -> None:
        known = model_options(self.model)
        if unknown := [name for name in self.options if name not in known]:
            raise ValueError(f"the model {self.model} has no option {', '.join(unknown)}")
        if self.preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {self.preset!r}")
        config = self.config  # raises for what the training refuses
        if self.threads is not None and (not isinstance(self.threads, int) or self.threads < 1):
            raise ValueError(f"threads must be at least 1; got {self.threads!r}")
        if self.embedding not in EMBEDDINGS:
            raise ValueError(f"embedding must be one of {', '.join(EMBEDDINGS)}; got {self.embedding!r}")
        if self.sharding is not None:
            if self.sharding not in SHARDINGS:
                raise ValueError(f"sharding must be one of {', '.join(SHARDINGS)}; got {self.sharding!r}")
            if self.model not in SHARDED_MODELS:
                raise ValueError(f"sharding trains the models {' and '.join(SHARDED_MODELS)}; got {self.model}")
            if (name := config.optimizer) not in SHARDED_OPTIMIZERS:
                raise ValueError(f"sharded tables have the optimizers {' and '.join(SHARDED_OPTIMIZERS)}; got {name}")

    @property
    def config(self) -> TrainingConfig:
        """The training, with the paper's values for what is not given."""
        return self.training if isinstance(self.training, TrainingConfig) else TrainingConfig(**self.training)

    def filled(self, cache: Cache) -> tuple["Experiment", dict[str, Any]]:
        """The experiment with every option and field that was not given, and what was chosen by the data."""
        options, given = resolve_options(self.options, cache.schema), self.training
        chosen: dict[str, Any] = {}
        if self.preset == "data":
            schema = cache.schema
            found = defaults(self.model, cache.sizes["train"], (*schema.cardinalities, *schema.bag_cardinalities))
            named = {**options, **(asdict(given) if isinstance(given, TrainingConfig) else given)}
            known = (*model_options(self.model), *(entry.name for entry in fields(TrainingConfig)))
            chosen = {name: value for name, value in found.items() if name in known and name not in named}
        of_model = model_options(self.model)
        options |= {name: value for name, value in chosen.items() if name in of_model}
        training = self.config
        return replace(
            self,
            options=options,
            training=replace(training, **{name: value for name, value in chosen.items() if name not in of_model}),
            threads=self.threads or torch.get_num_threads(),
        ), chosen

    def check(self) -> None:
        """Raise if the model refuses an option or the device is missing, before data is prepared for minutes."""
        options = {name: value for name, value in self.options.items() if name != "crosses"}  # they name columns
        with torch.device("meta"):
            build(self.model, options, Schema(("x",), ("y",), (3,)))
        if self.sharding is None:  # the processes of a sharded run have a device each
            choose_device(self.device)

    @classmethod
    def on_generated_log(
        cls, data: Dataset, model: str, options: Mapping[str, Any], training: Mapping[str, Any], **others: Any
    ) -> "Experiment":
        """An experiment on the generated log, with the log's own defaults: no others are chosen by the data."""
        usual = {name: value for name, value in GENERATED_LOG_OPTIONS.items() if name in model_options(model)}
        config = TrainingConfig(**{**GENERATED_LOG_TRAINING, **training})
        return cls(data, model, {**usual, **options}, config, preset="paper", **others)

    def to_dict(self) -> dict[str, Any]:
        """As JSON; :meth:`from_dict` takes it back."""
        training = asdict(self.training) if isinstance(self.training, TrainingConfig) else self.training
        return _plain({**asdict(replace(self, training={})), "training": training})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Experiment":
        """From :meth:`to_dict`, or from the config.json of a run, which has further entries."""
        known: dict[str, Any] = {entry.name: values[entry.name] for entry in fields(cls) if entry.name in values}
        given = values["training"]
        # A run has trained with all fields, even if a newer one is not among them.
        complete = "fastcross" in values or given.keys() >= {entry.name for entry in fields(TrainingConfig)}
        training = TrainingConfig(**given) if complete else given
        return cls(**{**known, "data": Dataset(**values["data"]), "training": training})

    def save(self, path: Path | str) -> None:
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: Path | str) -> "Experiment":
        """The experiment of a run folder, or of a JSON file that :meth:`save` wrote."""
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        values = Run(path).config if path.is_dir() else read_json(path)
        try:
            return cls.from_dict(values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"{file} does not describe an experiment: {reason}") from error

    def run(
        self,
        folder: Path | str,
        *,
        show: Show | None = None,
        progress: Progress | None = None,
        processes: Processes = ALONE,
        go_on: bool = False,
        opened: Opened | None = None,
        on_evaluation: Callable[[Mapping[str, float]], None] | None = None,
        curves: bool = True,
        signals: bool = True,
        callbacks: Sequence[Callback] = (),
    ) -> dict[str, Any]:
        """Train in a new run folder; returns the content of its result.json.
        Args:
            show: called with each line of progress.
            progress: called with (stage, done, total) while the data is prepared.
            processes: the processes that train together.
            go_on: continue a folder that already holds this experiment, or read its result if it has finished.
            opened: the experiment's data, if already open.
            on_evaluation: called with the metrics of each evaluation; an exception in it ends the training.
            curves: draw curves.png, which takes longer than a small training.
            signals: end at SIGINT or SIGTERM with the state saved; False leaves signals to the caller.
            callbacks: called at evaluations, at checkpoints and at the end.
        """
        self.check()
        path, leads = Path(folder), processes.rank == 0
        with working_in(path) if leads else contextlib.nullcontext():
            # One process prepares the data; the others then find it.
            exists, cache, optimum = processes.share(self._open(path, go_on, opened, show, progress) if leads else None)
            data = Cache.open(cache)
            plan, chosen = self.filled(data)
            config = plan.describe(data, optimum) | {"by_the_data": chosen}
            if show and chosen and not exists:
                show(f"by the {data.sizes['train']:,} training rows: {spelled(chosen)}")
            # A newer option has its default in a folder that does not contain it.
            if exists and Run(path).config | Experiment.load(path).to_dict() != config:
                raise CheckpointError(f"{path} holds a run with another configuration; choose another folder")
            if exists and (result := Run(path).result):
                return result

            def open_run() -> Run:
                if leads and not exists:
                    Run.create(path, config, data.encoder)
                processes.any(False)  # the folder is there
                return processes.open_run(path)

            with plan.trainer(
                data,
                open_run,
                optimum,
                processes=processes,
                show=show,
                on_evaluation=on_evaluation,
                callbacks=callbacks,
                curves=curves,
                signals=signals,
            ) as trainer:
                if exists:
                    trainer.resume()
                return trainer.fit()

    def _open(
        self, path: Path, go_on: bool, opened: Opened | None, show: Show | None, progress: Progress | None
    ) -> tuple[bool, str, Mapping[str, float]]:
        """Whether the run folder exists; the cache, and the best possible logloss of its parts."""
        exists = (path / "config.json").exists()
        if exists and not go_on:
            raise CheckpointError(f"{path} already holds a run; resume it or choose another folder")
        caches = (folder for folder in (path.resolve(), *path.resolve().parents) if (folder / "manifest.json").exists())
        if (folder := next(caches, None)) is not None:
            raise ValueError(f"{path} is in {folder}, a cache, which `prepare` may replace; choose another folder")
        cache, optimum = opened or self.data.open(show, progress=progress)
        return exists, str(cache.path.resolve()), optimum

    def describe(self, cache: Cache, optimum: Mapping[str, float]) -> dict[str, Any]:
        """The content of config.json: the experiment and its data."""
        return {
            "fastcross": __version__,
            **self.to_dict(),
            "cache": str(cache.path.resolve()),
            "fingerprint": cache.fingerprint,
            "encoder": cache.encoder_fingerprint,
            "optimum": dict(optimum),
        }

    @contextlib.contextmanager
    def trainer(
        self,
        cache: Cache,
        run: Run | Callable[[], Run],
        optimum: Mapping[str, float],
        *,
        processes: Processes = ALONE,
        **options: Any,
    ) -> Iterator[Trainer]:
        """The trainer of a new model, with these further options. PyTorch uses the experiment's number of threads."""
        threads, config = torch.get_num_threads(), self.config
        torch.set_num_threads(self.threads or threads)
        try:
            torch.manual_seed(config.seed)
            with torch.device("meta" if self.sharding else "cpu"):
                model = build(self.model, self.options, cache.schema, cache.label_scale)
            header = {
                "fastcross": __version__,
                "kind": self.model,
                "config": model.config.to_dict(),
                "schema": cache.schema.to_dict(),
                "cache": str(cache.path.resolve()),
                "fingerprint": cache.fingerprint,
                "encoder": cache.encoder_fingerprint,
                "training": asdict(config),
            }
            facts: dict[str, Any] = {"parameters": count(model), "dense_parameters": count(model, embeddings=False)}
            if optimum:
                facts["optimum"] = optimum
            placed, optimizer = processes.place(
                model, config, device=self.device, sharding=self.sharding, embedding=self.embedding
            )
            made: dict[str, Any] = {"header": header, "facts": facts, "processes": processes, "optimizer": optimizer}
            yield Trainer(placed, cache, config, run, **made, **options)
        finally:
            torch.set_num_threads(threads)


def resume(
    folder: Path | str,
    *,
    show: Show | None = None,
    processes: Processes = ALONE,
    cache: Path | str | None = None,
    callbacks: Sequence[Callback] = (),
    signals: bool = True,
) -> dict[str, Any]:
    """Continue a run from its last checkpoint, with the experiment in its folder; returns the result.

    Args:
        cache: the cache that it was trained on, if it has moved.
    """
    run = processes.open_run(folder)
    with working_in(run.path) if processes.rank == 0 else contextlib.nullcontext():
        if run.result:
            raise CheckpointError(f"the run {run.path} is finished; see fastcross info {run.path}")
        experiment, config = Experiment.load(run.path), run.config
        data = Cache.open(cache or config["cache"], fingerprint=config["fingerprint"])
        data.check_encoder(run.encoder.fingerprint)
        optimum = config["optimum"]
        told: dict[str, Any] = {"show": show, "callbacks": callbacks, "signals": signals}
        with experiment.trainer(data, run, optimum, processes=processes, **told) as trainer:
            trainer.resume()
            return trainer.fit()


def model_options(name: str) -> tuple[str, ...]:
    """A model's options, without those that follow from the data."""
    return tuple(entry.name for entry in fields(model_class(name).Config) if entry.name not in OF_DATA)


def build(
    name: str, options: Mapping[str, Any], schema: Schema, label_scale: tuple[float, float] = (0.0, 1.0)
) -> Model:
    """The model for data with these columns; label_scale: mean and standard deviation of a regression's label."""
    features: dict[str, Any] = {
        "cardinalities": schema.cardinalities,
        "num_dense": len(schema.dense_names),
        "bag_cardinalities": schema.bag_cardinalities,
        "num_outputs": schema.num_outputs,
    }
    if schema.task == "regression":
        features |= {"regression": True, "label_mean": label_scale[0], "label_deviation": label_scale[1]}
    return model_class(name).from_config({**features, **resolve_options(options, schema)})


def resolve_options(options: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """The options, with crosses as positions among the categorical columns."""
    resolved = dict(options)
    if "crosses" in resolved:
        resolved["crosses"] = [[_position(schema, feature) for feature in cross] for cross in resolved["crosses"]]
    return resolved


def count(model: Model, *, embeddings: bool = True) -> int:
    """Parameters; without the embedding layer as the paper counts them in section 4.4."""
    named = model.named_parameters()
    return sum(p.numel() for name, p in named if embeddings or not name.startswith("embedding."))


def run_name(name: str) -> Path:
    """The default folder of a run."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _position(schema: Schema, feature: str | int) -> int:
    if isinstance(feature, int):
        return feature
    if feature not in schema.categorical_names:
        raise ValueError(f"{feature!r} is not a categorical column; there are {', '.join(schema.categorical_names)}")
    return schema.categorical_names.index(feature)


def _plain(value: Any) -> Any:
    """In JSON's types."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
