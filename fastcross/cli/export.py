"""fastcross export and convert: a trained model, or a run's checkpoints, in another form."""

import warnings
from argparse import Namespace
from pathlib import Path

from fastcross.cli.conflicts import refuse
from fastcross.cli.outputs import check_output
from fastcross.cli.printing import show
from fastcross.training.run_folder import Run, load_model


def export(args: Namespace) -> int:
    from fastcross.interop.serving import export_run

    output = check_output(args.output, (".pt2", ".onnx"), args.run)
    if output.suffix == ".pt2":
        refuse(args, "a .pt2 file, which takes encoded values always", ("encoded",))
    trained = load_model(args.run, "cpu")
    with warnings.catch_warnings():
        if not args.debug:  # what PyTorch's exporter says of its own code
            warnings.simplefilter("ignore")
        exported = export_run(trained.model, trained.encoder, output, encoded=args.encoded)
    beside = f", its encoder: {exported.encoder}" if exported.encoder else ""
    show(f"exported: {output}{beside}; its inputs, for any batch size:")
    ports = (*exported.inputs, exported.output)
    widths = [
        max(len(text) for text in texts) for texts in zip(*((p.name, p.type, p.shape) for p in ports), strict=True)
    ]
    for port in ports:
        if port is exported.output:
            show("its output:")
        columns = (text.ljust(width) for text, width in zip((port.name, port.type, port.shape), widths, strict=True))
        show(f"  {'  '.join(columns)}  {port.meaning}")
    return 0


def convert(args: Namespace) -> int:
    from fastcross.distributed.convert import convert_run

    names = convert_run(Run(args.run), args.to, Path(args.output))
    show(f"checkpoints {' and '.join(names)}, {args.to}: {args.output}")
    return 0
