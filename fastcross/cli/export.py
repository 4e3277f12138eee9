"""fastcross export and convert: a trained model, or a run's checkpoints, in another form."""

import warnings
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
    weighted = trained.encoder.columns.weights if schema.bag_names else {}
    ids, offsets = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1])
    bags = tuple((ids, offsets, torch.ones(3)) if name in weighted else (ids, offsets) for name in schema.bag_names)
    inputs = (dense, categorical, bags) if bags else (dense, categorical)
    with warnings.catch_warnings():
        if not args.debug:  # what PyTorch's exporter says of its own code
            warnings.simplefilter("ignore")
        export_model(trained.model, output, inputs, to=output.suffix[1:])
    show(f"exported: {output}; its inputs, for any batch size:")
    show(f"  dense        float32 (batch, {dense.shape[1]})  {_listed(schema.dense_names)}")
    show(f"  categorical  int64   (batch, {categorical.shape[1]})  {_listed(schema.categorical_names)}")
    for i, name in enumerate(schema.bag_names):  # as torch.export names them; a .pt2 takes ((values, offsets), …)
        show(f"  bags_{i}_0     int64   (values,)   the ids of {name}, row after row")
        show(f"  bags_{i}_1     int64   (batch,)    where the ids of {name} begin in each row")
        if name in weighted:
            show(f"  bags_{i}_2     float32 (values,)   the weights of {name}'s ids")
    return 0


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:6]) + (f" … {names[-1]}" if len(names) > 6 else "")


def convert(args: Namespace) -> int:
    from fastcross.distributed.convert import convert_run

    names = convert_run(Run(args.run), args.to, Path(args.output))
    show(f"checkpoints {' and '.join(names)}, {args.to}: {args.output}")
    return 0
