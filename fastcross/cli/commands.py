"""What the commands do: prepare, train, evaluate, predict, info. Each takes the parsed arguments and returns 0."""

import importlib.metadata
import importlib.util
import os
import platform
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastcross import __version__
from fastcross.data import Cache, read_for_prediction
from fastcross.distributed.launch import is_sharded, launch, needs_launch
from fastcross.files import atomic
from fastcross.interop.export import export as export_model
from fastcross.models.dcn import DCN
from fastcross.training.evaluate import evaluate as evaluate_part
from fastcross.training.evaluate import predict as predict_logits
from fastcross.training.experiment import Trained, load_model, make_plan, run_plan
from fastcross.training.loop import Interrupted
from fastcross.training.metrics import probabilities, summarise
from fastcross.training.run_folder import Run, write_json
from fastcross.training.sources import open_source, preparation, prepare_files


def show(line: str) -> None:
    """Progress goes to standard error, results to standard output."""
    print(line, file=sys.stderr, flush=True)


def prepare(args: Namespace) -> int:
    print_cache(prepare_files(args.data, args.cache, preparation(args), show, progress=sys.stderr.isatty()))
    return 0


def train(args: Namespace) -> int:
    if is_sharded(args):
        if needs_launch(args):
            return launch(args)
        from fastcross.distributed.command import train as train_sharded  # TorchRec takes seconds to import

        return train_sharded(args)
    if args.resume:
        run = Run(args.resume)
        if run.result:
            raise ValueError(f"the run {run.path} is finished; see fastcross info {run.path}")
        cache = Cache.open(run.config["cache"], fingerprint=run.config["fingerprint"])
    else:
        cache, optimum = open_source(args, show)
        plan = make_plan(args, args.model, cache, optimum, seed=args.seed)
        run = Run.create(args.run or f"runs/{args.model}-{time.strftime('%Y%m%d-%H%M%S')}", plan)
    try:
        result = run_plan(cache, run, show, resume=bool(args.resume))
    except Interrupted as interruption:
        show(f"{interruption}; continue with: fastcross train --resume {run.path}")
        return 130
    print_metrics(result)
    print(f"run folder: {run.path}")
    return 0


def evaluate(args: Namespace) -> int:
    trained = load_model(args.run)
    if args.data and not Path(args.data).is_dir():
        rows = read_for_prediction(args.data, trained.open_cache(args.cache), on_error=args.on_error, labelled=True)
        logits, label = predict_logits(trained.model, rows)
        assert label is not None
        found = {args.data: summarise(logits, label)}
        report_reading(rows)
    else:
        cache = trained.open_cache(args.data or args.cache)
        found = {args.part: evaluate_part(trained.model, cache, args.part)}
    print_metrics(found)
    if args.output:
        write_json(Path(args.output), found)
    return 0


def predict(args: Namespace) -> int:
    output = Path(args.output)
    if output.suffix not in (".csv", ".npy"):
        raise ValueError(f"the output must end in .csv or .npy; got {output.name}")
    trained = load_model(args.run)
    rows = read_for_prediction(args.data, trained.open_cache(args.cache), on_error=args.on_error)
    logits, _ = predict_logits(trained.model, rows)
    write_probabilities(output, probabilities(logits))
    report_reading(rows)
    show(f"{len(logits):,} predictions: {output}")
    return 0


def write_probabilities(output: Path, probability: Tensor) -> None:
    """One line per row: the probability of a click, or of each class."""
    with atomic(output) as temporary:
        if output.suffix == ".npy":
            with open(temporary, "wb") as file:
                np.save(file, probability.numpy())
            return
        columns = ["probability"] if probability.dim() == 1 else [f"class_{i}" for i in range(probability.shape[1])]
        table = probability.reshape(len(probability), -1).numpy()
        np.savetxt(temporary, table, fmt="%.9g", delimiter=",", header=",".join(columns), comments="")


def report_reading(rows: Any) -> None:
    """What was met in a file that the model had not seen: bad rows that were skipped, values it does not know."""
    if rows.problems:
        show(f"skipped {len(rows.problems):,} bad rows, such as: {rows.problems.examples[0]}")
    unknown = {name: count for name, count in rows.unknown.items() if count}
    if unknown:
        worst = sorted(unknown, key=unknown.__getitem__, reverse=True)[:3]
        most = ", ".join(f"{name} {unknown[name] / rows.rows:.1%}" for name in worst)
        show(f"values unknown to the model, treated as rare: {most} of the rows")


def export(args: Namespace) -> int:
    output = Path(args.output)
    if output.suffix not in (".pt2", ".onnx"):
        raise ValueError(f"the output must end in .pt2 or .onnx; got {output.name}")
    trained = load_model(args.run, "cpu")
    schema = trained.schema
    dense = torch.zeros(2, len(schema.dense_names))
    categorical = torch.zeros(2, len(schema.cardinalities), dtype=torch.int64)
    bags = tuple((torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1])) for _ in schema.bag_names)
    inputs = (dense, categorical, bags) if bags else (dense, categorical)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        export_model(trained.model, Path(folder) / output.name, inputs, to=output.suffix[1:])
        os.replace(Path(folder) / output.name, output)
    show(
        f"exported, inputs dense {tuple(dense.shape[1:])}, categorical {tuple(categorical.shape[1:])} per row: {output}"
    )
    return 0


def convert(args: Namespace) -> int:
    from fastcross.distributed.convert import convert as convert_run

    names = convert_run(Run(args.run), args.to, Path(args.output))
    show(f"checkpoints {' and '.join(names)}, {args.to}: {args.output}")
    return 0


def info(args: Namespace) -> int:
    if args.path is None:
        print_environment()
    elif (Path(args.path) / "config.json").exists():
        print_run(Run(args.path))
    else:
        print_cache(Cache.open(args.path))
    return 0


def print_environment() -> None:
    def version(name: str) -> str:
        return importlib.metadata.version(name) if importlib.util.find_spec(name) else "not installed"

    print(f"fastcross {__version__}, Python {platform.python_version()}, PyTorch {torch.__version__}")
    print(f"CPU: {torch.get_num_threads()} threads; backend numba: {version('numba')}")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"GPU: {', '.join(gpus) or 'none'}; backend triton: {version('triton')}")
    for name in ("pyarrow", "safetensors", "tqdm", "matplotlib", "onnx", "torchrec"):
        print(f"{name}: {version(name)}")


def print_run(run: Run) -> None:
    plan = run.config
    print(f"run {run.path}: {plan['model']}, {'finished' if run.result else 'unfinished'}")
    for name in ("options", "training", "cache", "device", "threads"):
        print(f"{name}: {_plain(plan[name])}")
    if run.result:
        print_metrics(run.result)
        print_crosses(load_model(run.path, "cpu"))
    else:
        print(f"continue with: fastcross train --resume {run.path}")


def print_crosses(trained: Trained) -> None:
    """What the cross network found: the pairs of features that it crosses most strongly."""
    schema = trained.schema
    if isinstance(trained.model, DCN) and trained.model.parallel:
        names = (*schema.categorical_names, *schema.bag_names, *schema.dense_names)
        strongest = trained.model.strongest_crosses(5, names)
        print("strongest crosses: " + ", ".join(f"{' × '.join(pair)} {strength:.3g}" for pair, strength in strongest))


def print_cache(cache: Cache) -> None:
    schema = cache.schema
    print(f"cache {cache.path}, made from {', '.join(item['name'] for item in cache.manifest['inputs'])}")
    print(f"made with: {_plain(cache.manifest['configuration'])}")
    print(f"rows: {_plain(cache.sizes)}")
    print(f"label: {schema.task}, {schema.num_outputs} output{'s' if schema.num_outputs > 1 else ''}")
    print(f"dense columns ({len(schema.dense_names)}): {', '.join(schema.dense_names)}")
    for kind, names, cardinalities in (
        ("categorical", schema.categorical_names, schema.cardinalities),
        ("multi-valued", schema.bag_names, schema.bag_cardinalities),
    ):
        sizes = ", ".join(f"{name} {size:,}" for name, size in zip(names, cardinalities, strict=True))
        print(f"{kind} columns ({len(names)}) with their cardinalities: {sizes}")


def print_metrics(result: Mapping[str, Any]) -> None:
    """The metrics of each part, one line each, and what a training cost."""
    for part, found in result.items():
        if isinstance(found, Mapping) and "logloss" in found:
            print(f"{part}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items() if value is not None))
    if "optimum" in result:
        print("best possible logloss: " + ", ".join(f"{part} {value:.4f}" for part, value in result["optimum"].items()))
    if "seconds" in result:
        print(
            f"{result['steps']:,} steps in {result['seconds']:.1f} s, {result['rows_per_second']:,.0f} rows/s; "
            f"{result['parameters']:,} parameters, {result['dense_parameters']:,} without embeddings"
        )


def _plain(values: Any) -> str:
    if not isinstance(values, Mapping):
        return str(values)
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
