"""Add the new ids of new data to a finished run's vocabularies, and continue its training on that data.

A new id was out of vocabulary until now. So its row, and the row's moments in the optimiser, start as copies of the
out-of-vocabulary id's. (Zero moments would make its first steps the largest of all, because Adam divides by √v.)
All other rows, ids and moments are unchanged bit for bit: predictions for old values change only by further training.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastcross.data.cache import Cache
from fastcross.files import building
from fastcross.layers.embedding import EmbeddingStack
from fastcross.training.checkpoint import CheckpointError
from fastcross.training.config import TrainingConfig
from fastcross.training.experiment import Dataset, Experiment, Progress, resume
from fastcross.training.loop import Trainer
from fastcross.training.run_folder import FILES, LEFTOVER, LOCK, Run, Trained, load_model, working_in
from fastcross.training.step import Show

OWN = (*FILES, "encoder", LOCK)


def extend(
    source: Path | str,
    files: Sequence[str | PathLike[str]],
    target: Path | str,
    *,
    preparation: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    cache: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    show: Show | None = None,
    progress: Progress | None = None,
    opened: Cache | None = None,
    signals: bool = True,
) -> dict[str, Any]:
    """Add the new files' frequent values to the vocabularies of a finished run, and continue training on these files.

    ``target`` holds the extended run before its training begins, so ``resume`` can continue an interrupted one. If
    ``target`` is the run itself, it is replaced at the end. An error leaves the run unchanged.

    Args:
        source: the run folder.
        files: labelled files like those it was trained on.
        target: a new folder, or the run folder itself.
        preparation: arguments of :func:`fastcross.data.prepare` for the new files: split, min_frequency …
        training: fields of :class:`TrainingConfig` that differ from the run's.
        cache: folder for the prepared data; None for one in the user's cache folder.
        device, threads: None for those of the run.
        opened: the new rows, where they are prepared already; no files then.
        signals: as of :meth:`Experiment.run`.

    Returns:
        The content of the extended run's result.json.
    """
    source, target = Path(source), Path(target)
    in_place = target.exists() and target.samefile(source)
    if not in_place and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there already and not empty; choose another folder")
    plan, trained, moments = _read(source, dict(training or {}))
    options = {"grow": str((source / "encoder").resolve()), **(preparation or {})}
    plan = replace(
        plan,
        data=Dataset(tuple(map(str, files)), cache, options),
        device=device or plan.device,
        threads=threads or plan.threads,
    )
    opened = opened or plan.data.open(show, progress=progress)[0]
    if show:
        show(_news(trained, opened))
    if not in_place:
        with building(target) as folder:
            _write(plan, opened, trained, moments, folder)
        return resume(target, show=show, signals=signals)
    with working_in(source), building(source) as folder:
        _write(plan, opened, trained, moments, folder)
        result = resume(folder, show=show, signals=signals)
        _keep_others(source, folder)
    return result


def _read(source: Path, training: dict[str, Any]) -> tuple[Experiment, Trained, Mapping[str, Any] | None]:
    """The run's experiment, model and optimiser state."""
    run = Run(source)
    plan = Experiment.load(source)
    if plan.sharding is not None:
        raise CheckpointError(f"{source} is a run of several processes; make it one: fastcross convert --to single")
    if plan.options.get("crosses"):
        raise CheckpointError(
            f"{source} has crosses, which number the combinations of all ids: it cannot be extended, only trained anew"
        )
    encoder = run.encoder
    if encoder.schema.task == "regression" and encoder.label_scale is None:
        raise CheckpointError(f"{source} was trained by an earlier fastcross, and cannot be extended; train it anew")
    if run.result is None:
        raise CheckpointError(f"{source} is not finished; go on with it first: fastcross train --resume {source}")
    config = TrainingConfig(**{**asdict(plan.config), **training})
    if config.optimizer != plan.config.optimizer:
        raise ValueError(
            f"the state of the optimiser is kept: it must stay {plan.config.optimizer}; got {config.optimizer}"
        )
    trained = load_model(source, "cpu")
    options = dict(plan.options)
    if isinstance(embedding := getattr(trained.model, "embedding", None), EmbeddingStack):
        options["embedding_dim"] = list(embedding.dims)  # a width that follows from the cardinality would grow with it
    return (
        replace(plan, options=options, training=config),
        trained,
        run.load("last", {})["optimizer"] if run.holds("last") else None,
    )


def _write(plan: Experiment, cache: Cache, trained: Trained, moments: Mapping[str, Any] | None, folder: Path) -> None:
    """Write the extended run as one that was interrupted before its first step."""
    config = plan.describe(cache, {}) | {"extends": str(trained.path.resolve())}
    run = Run.create(folder, config, cache.encoder)
    with plan.trainer(cache, run, {}) as trainer:
        _fill(trainer, trained.model.state_dict(), moments)
        trainer.keep_best({})
        trainer.save()


def _fill(trainer: Trainer, weights: Mapping[str, Tensor], moments: Mapping[str, Any] | None) -> None:
    """Copy weights and optimiser state into the new model and optimiser, with rows for the new ids."""
    wanted = trainer.model.state_dict()
    trainer.model.load_state_dict({name: _grown(old, wanted[name]) for name, old in weights.items()})
    if moments is None:
        return
    parts = []
    for part, old in zip(trainer.optimizer.parts, moments["parts"], strict=True):
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        state = {
            index: {name: _grown(value, parameters[index]) for name, value in values.items()}
            for index, values in old["state"].items()
        }
        parts.append({**old, "state": state})
    trainer.optimizer.load_state_dict({"parts": parts})


def _grown(old: Any, like: Tensor) -> Any:
    """``old`` with copies of its first row, that of id 0, appended until it has the rows of ``like``."""
    if not isinstance(old, Tensor) or not old.dim() or len(old) == len(like):
        return old
    return torch.cat([old, old[:1].expand(len(like) - len(old), *old.shape[1:])])


def _news(trained: Trained, cache: Cache) -> str:
    before, now = trained.schema, cache.schema
    names = (*now.categorical_names, *now.bag_names)
    old, grown = ((*schema.cardinalities, *schema.bag_cardinalities) for schema in (before, now))
    new = [f"{name} {b - a:,}" for name, a, b in zip(names, old, grown, strict=True) if b > a]
    return f"new ids: {', '.join(new) if new else 'none: no unknown value is frequent enough'}"


def _keep_others(source: Path, folder: Path) -> None:
    """Keep the user's own files in a run folder."""
    for item in source.iterdir():
        if item.name in OWN or LEFTOVER.fullmatch(item.name):
            continue
        shutil.copytree(item, folder / item.name) if item.is_dir() else shutil.copy2(item, folder / item.name)
