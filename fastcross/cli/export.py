"""fastcross export and convert: a trained model, or a run's checkpoints, in another form."""

import os
import tempfile
from argparse import Namespace
from pathlib import Path

import torch

from fastcross.cli.outputs import check_output
from fastcross.cli.printing import show
from fastcross.interop.export import export as export_model
from fastcross.training.run_folder import Run
from fastcross.training.trained import load_model


def export(args: Namespace) -> int:
    output = check_output(args.output, (".pt2", ".onnx"), args.run)
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
