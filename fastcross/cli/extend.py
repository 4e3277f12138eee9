"""fastcross extend: a trained model learns the new ids of new data."""

from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastcross.cli.experiment import split
from fastcross.cli.printing import bars, print_metrics, show
from fastcross.extras import require
from fastcross.training.config import TrainingConfig
from fastcross.training.experiment import Experiment, run_name
from fastcross.training.extension import extend as extend_run
from fastcross.training.loop import Interrupted


def extend(args: Namespace) -> int:
    require("training", "train")
    run = Path(args.run)
    source = run if run.is_dir() else run.parent
    plan = Experiment.load(source)
    target = Path(args.target or run_name(plan.model))
    names = [entry.name for entry in fields(TrainingConfig)]
    training = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    known = plan.data.preparation.get("min_frequency")
    preparation: dict[str, Any] = {"seed": args.split_seed, "on_error": args.on_error}
    for name, value in (("split", args.split and split(args.split)), ("min_frequency", args.min_frequency)):
        if value is not None:
            preparation[name] = value
    if args.min_frequency is None and known is not None:
        preparation["min_frequency"] = known
    try:
        with bars() as progress:
            result = extend_run(
                source,
                args.data,
                target,
                preparation=preparation,
                training=training,
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
    return 0
