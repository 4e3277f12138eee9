"""From parsed arguments to an experiment and its data."""

import json
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastcross.cli.conflicts import check_data, flag
from fastcross.distributed.torchrun import choose_sharding
from fastcross.training.config import GENERATED_ROWS, TrainingConfig
from fastcross.training.experiment import Experiment, model_options
from fastcross.training.input import Dataset

MODEL_OPTIONS = (
    "cross_layers",
    "deep_layers",
    "embedding_dim",
    "structure",
    "dropout",
    "batch_norm",
    "l2",
    "backend",
    "crosses",
    "residual_units",
    "input_dim",
    "cross_dim",
)


def experiment(args: Namespace, model: str, seed: int, *, strict: bool = True) -> Experiment:
    """What the arguments ask for. An option that the model has not is an error, or, not ``strict``, left out."""
    known = model_options(model)
    given = {name: getattr(args, name) for name in MODEL_OPTIONS if getattr(args, name) is not None}
    foreign = [flag(name) for name in given if name not in known]
    if foreign and strict:
        raise ValueError(f"the model {model} has no {', '.join(foreign)}")
    options = {name: value for name, value in given.items() if name in known}
    names = [entry.name for entry in fields(TrainingConfig) if entry.name != "seed"]
    training = {name: getattr(args, name) for name in names if getattr(args, name) is not None} | {"seed": seed}
    data = dataset(args)
    others: dict[str, Any] = {"device": args.device, "threads": args.threads}
    if hasattr(args, "sharding"):  # of train alone
        asked = {"distributed": args.distributed, "processes": args.processes or 1}
        others |= {"embedding": args.embedding, "sharding": choose_sharding(args.sharding, args.embedding, **asked)}
    if not data.files:
        return Experiment.on_generated_log(data, model, options, training, **others)
    return Experiment(data, model, options, TrainingConfig(**training), **others)


def dataset(args: Namespace) -> Dataset:
    check_data(args)
    return Dataset(tuple(args.data or ()), args.cache, preparation(args), args.rows or GENERATED_ROWS)


def preparation(args: Namespace) -> dict[str, Any]:
    """The arguments of `prepare`; what was not given is left to it."""
    options: dict[str, Any] = {"seed": args.split_seed, "on_error": args.on_error}
    if columns := _columns(args):
        options["columns"] = columns
    if args.hash_buckets is not None and args.min_frequency is not None:
        raise ValueError("--min-frequency has no effect on --hash-buckets, which keep no vocabulary of frequent values")
    if args.split is not None:
        options["split"] = split(args.split)
    for name in ("format", "min_frequency", "hash_buckets", "time_column"):
        if (value := getattr(args, name)) is not None:
            options[name] = value
    return options


def _columns(args: Namespace) -> dict[str, Any] | None:
    """What is declared, in a file or by options; columns that options do not name are inferred."""
    kinds = ("categorical", "dense", "multi", "datetime", "drop")
    given = [flag(name) for name in kinds if getattr(args, name)]
    of_rows = {"label": args.label, "sample_weight": args.weight, "group": args.group}
    of_rows = {name: column for name, column in of_rows.items() if column}
    if args.task != "auto":
        of_rows["task"] = args.task
    if args.columns:
        if given:
            raise ValueError(f"declare columns in the file of --columns or by {', '.join(given)}, not both")
        declared = _read_columns(Path(args.columns))
        return {**declared, **of_rows}
    if not given and not of_rows:
        return None
    from fastcross.data import Columns

    return Columns.declare(
        **of_rows,
        dense=args.dense or (),
        categorical=args.categorical or (),
        multi=dict(args.multi or ()),
        datetimes=args.datetime or (),
        drop=args.drop or (),
    ).to_dict()


def _read_columns(path: Path) -> dict[str, Any]:
    try:
        declared = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(declared, dict):
        raise ValueError(f'{path} must hold an object as in {{"label": "clicked", "dense": ["age"]}}; got {declared!r}')
    return declared


def split(text: str) -> str:
    """A single fraction trains, the rest tests; everything else goes to `prepare` as it is."""
    try:
        train = float(text)
    except ValueError:
        return text
    if not 0 < train < 1:
        raise ValueError(f"a --split of one number is the fraction that trains, between 0 and 1; got {text}")
    return f"random:{train:g},0,{1 - train:g}"
