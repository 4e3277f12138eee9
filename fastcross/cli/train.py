"""fastcross prepare, train and extend: from parsed arguments to a cache, an experiment and its run."""

import json
import os
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastcross.cli.parser import flag, refuse
from fastcross.cli.printing import bars, print_cache, print_metrics, show
from fastcross.data.cache import Cache
from fastcross.data.columns import Columns
from fastcross.data.preparation import prepare as prepare_cache
from fastcross.defaults import PAPER_FREQUENCY
from fastcross.distributed import launch, max_restarts, restarts, under_torchrun
from fastcross.extras import require
from fastcross.models import MODELS
from fastcross.training.config import GENERATED_ROWS, TrainingConfig
from fastcross.training.experiment import Dataset, Experiment, model_options, resume, run_name
from fastcross.training.extension import extend as extend_run
from fastcross.training.loop import Interrupted, Logger
from fastcross.training.run_folder import Run
from fastcross.training.step import ALONE, Processes

KINDS = ("categorical", "dense", "multi", "datetime", "drop")
PREPARATION = (
    *("format", "label", "task", "weight", "group", *KINDS, "columns", "time_column", "split", "split_seed"),
    *("min_frequency", "hash_buckets", "on_error"),
)
WITH_RESUME = ("command", "debug", "argv", "parser", "resume", "cache", "processes", "max_restarts", "log")
TRAINING = tuple(entry.name for entry in fields(TrainingConfig) if entry.name != "seed")


def prepare(args: Namespace) -> int:
    with bars() as progress:
        cache = prepare_cache(args.data, args.cache, progress=progress, **{"min_frequency": None, **preparation(args)})
    print_cache(cache)
    skipped = cache.manifest["skipped"]
    if skipped["rows"]:
        show(f"skipped {skipped['rows']:,} bad rows, such as: {skipped['examples'][0]}")
    return 1 if skipped["truncated"] else 0


def train(args: Namespace) -> int:
    """Train in this process, in each of torchrun's, or in newly launched ones."""
    require("training", "train")
    if args.resume:
        check_resume(args)
    plan = Experiment.load(args.resume) if args.resume else experiment(args, args.model, args.seed)
    processes = args.processes or 1
    if args.resume and _several(processes) and plan.sharding is None:
        raise ValueError(f"{args.resume} is a run of one process; see fastcross convert --help")
    folder = Path(args.resume or args.run or run_name(args.model))
    if plan.sharding is None:
        return _train(args, plan, folder, ALONE)
    if not under_torchrun() and (processes > 1 or args.max_restarts > 0):
        named = [] if args.resume or args.run else ["--run", str(folder)]  # one folder for all processes and restarts
        return launch([*args.argv, *named], processes, args.max_restarts)
    if max_restarts() and not args.run and not args.resume:
        raise ValueError("torchrun --max-restarts needs --run FOLDER, for a restarted process to find its checkpoint")
    from fastcross.distributed.sharding import join  # with TorchRec, which takes seconds to import

    with join(plan.device) as joined:
        if joined.rank == 0:
            show(f"{joined.size} process{'es' if joined.size > 1 else ''} on {joined.device.type}")
        return _train(args, plan, folder, joined, go_on=restarts() > 0)


def _train(args: Namespace, plan: Experiment, folder: Path, processes: Processes, go_on: bool = False) -> int:
    leads = processes.rank == 0
    told = show if leads else None
    try:
        callbacks = [Logger(args.log, folder)] if leads and args.log else []
        if args.resume:
            result = resume(folder, show=told, processes=processes, cache=args.cache, callbacks=callbacks)
        else:
            with bars() as progress:
                result = plan.run(
                    folder,
                    show=told,
                    processes=processes,
                    go_on=go_on,
                    progress=progress if leads else None,
                    callbacks=callbacks,
                )
    except Interrupted as interruption:
        if leads:
            several_processes = f" --processes {processes.size}" if processes.size > 1 else ""
            show(f"{interruption}; continue with: fastcross train --resume {folder}{several_processes}")
        return 130
    if leads:
        print_metrics(result)
        print(f"run folder: {folder}")
    return _lost(folder)


def _lost(folder: Path) -> int:
    """1 if a part of a run's input was lost, with an unknown number of rows."""
    return 1 if Cache.open(Run(folder).config["cache"]).manifest["skipped"]["truncated"] else 0


def extend(args: Namespace) -> int:
    require("training", "train")
    run = Path(args.run)
    source = run if run.is_dir() else run.parent
    plan = Experiment.load(source)
    target = Path(args.target or run_name(plan.model))
    known = plan.data.preparation.get("min_frequency")
    division = ({} if known is None else {"min_frequency": known}) | _division(args)
    try:
        with bars() as progress:
            result = extend_run(
                source,
                args.data,
                target,
                preparation=division,
                training=given(args, TRAINING),
                cache=args.cache,
                device=None if args.device == "auto" else args.device,
                threads=args.threads,
                show=show,
                progress=progress,
            )
    except Interrupted as interruption:
        resumed = f"; continue with: fastcross train --resume {target}" if target.resolve() != source.resolve() else ""
        show(f"{interruption}{resumed}")
        return 130
    print_metrics(result)
    print(f"run folder: {target}")
    return _lost(target)


def experiment(args: Namespace, model: str, seed: int, *, strict: bool = True) -> Experiment:
    """The experiment of the arguments. An option that the model does not have is an error if ``strict``."""
    known = model_options(model)
    options = given_options(args)
    foreign = [flag(name) for name in options if name not in known]
    if foreign and strict:
        raise ValueError(f"the model {model} has no {', '.join(foreign)}")
    options = {name: value for name, value in options.items() if name in known}
    training = given(args, TRAINING) | {"seed": seed}
    data = dataset(args)
    others: dict[str, Any] = {"device": args.device, "threads": args.threads}
    if hasattr(args, "sharding"):  # of train alone
        others |= {"embedding": args.embedding, "sharding": _sharding(args)}
    if not data.files and args.preset is None:
        return Experiment.on_generated_log(data, model, options, training, **others)
    return Experiment(data, model, options, training, **others, preset=args.preset or "data")


def _sharding(args: Namespace) -> str | None:
    """The sharding of the tables; None if training does not use TorchRec.

    It uses TorchRec with --distributed, with several processes, and for fbgemm's tables.
    """
    if args.distributed or _several(args.processes or 1):
        return args.sharding
    return "table" if args.embedding == "fbgemm" else None


def _several(processes: int) -> bool:
    """Whether several processes train, by option or by torchrun."""
    return processes > 1 or "TORCHELASTIC_RUN_ID" in os.environ


def given(args: Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The options among these that the command has and the user gave."""
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def given_options(args: Namespace) -> dict[str, Any]:
    """The options of any model that the user gave."""
    return given(args, dict.fromkeys(name for model in MODELS for name in model_options(model)))


def dataset(args: Namespace) -> Dataset:
    """The data set of the arguments. Options without effect on a cache or on the generated log are refused."""
    if not args.data:
        refuse(args, "the generated log", PREPARATION)
    elif len(args.data) == 1 and Path(args.data[0]).is_dir():
        refuse(args, f"the cache {args.data[0]}, which is prepared already", ("rows", "cache", *PREPARATION))
    else:
        refuse(args, "--data, but on the log that is generated without it", ("rows",))
    return Dataset(tuple(args.data or ()), args.cache, preparation(args), args.rows or GENERATED_ROWS)


def check_resume(args: Namespace, what: str = "a run", others: Iterable[str] = ()) -> None:
    """With --resume, refuse all options that belong to what is resumed."""
    said = f"{what} that is resumed: its options are those it was started with"
    refuse(args, said, set(vars(args)) - {*WITH_RESUME, *others})


def preparation(args: Namespace) -> dict[str, Any]:
    """The arguments of `prepare` that were given."""
    columns = _columns(args)
    if args.hash_buckets is not None and args.min_frequency is not None:
        raise ValueError("--min-frequency has no effect on --hash-buckets, which keep no vocabulary of frequent values")
    options = _division(args) | given(args, ("format", "hash_buckets", "time_column"))
    if getattr(args, "preset", None) == "paper" and args.hash_buckets is None:
        options = {"min_frequency": PAPER_FREQUENCY, **options}
    return options | {"columns": columns} if columns else options


def _division(args: Namespace) -> dict[str, Any]:
    """The options of reading and splitting. With one fraction, --split trains on it and tests on the rest."""
    options = {"seed": args.split_seed, "on_error": args.on_error} | given(args, ("split", "min_frequency"))
    try:
        train = float(options["split"])
    except (KeyError, ValueError):
        return options
    if not 0 < train < 1:
        raise ValueError(f"a --split of one number is the fraction that trains, between 0 and 1; got {args.split}")
    return options | {"split": f"random:{train:g},0,{1 - train:g}"}


def _columns(args: Namespace) -> dict[str, Any] | None:
    """The columns declared in a file or by options. Columns that options do not name are inferred."""
    kinds = {name: value for name in KINDS if (value := getattr(args, name))}
    of_rows = {"label": args.label, "sample_weight": args.weight, "group": args.group}
    of_rows["task"] = args.task if args.task != "auto" else None
    of_rows = {name: value for name, value in of_rows.items() if value}
    if args.columns:
        if kinds:
            raise ValueError(f"declare columns in the file of --columns or by {', '.join(map(flag, kinds))}, not both")
        return {**_read_columns(Path(args.columns)), **of_rows}
    if not kinds and not of_rows:
        return None
    kinds["multi"] = dict(kinds.get("multi", ()))
    kinds["datetimes"] = kinds.pop("datetime", ())
    return Columns.declare(**of_rows, **kinds).to_dict()


def _read_columns(path: Path) -> dict[str, Any]:
    try:
        declared = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(declared, dict):
        raise ValueError(f'{path} must hold an object as in {{"label": "clicked", "dense": ["age"]}}; got {declared!r}')
    return declared
