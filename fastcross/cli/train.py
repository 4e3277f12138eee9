"""fastcross train: a model from a cache, a file or the generated log; or a run that goes on where it stopped."""

import time
from argparse import Namespace

from fastcross.cli.printing import print_metrics, show
from fastcross.data import Cache
from fastcross.distributed.launch import is_sharded, launch, needs_launch
from fastcross.training.experiment import make_plan, run_plan
from fastcross.training.loop import Interrupted
from fastcross.training.run_folder import Run
from fastcross.training.sources import open_source


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
