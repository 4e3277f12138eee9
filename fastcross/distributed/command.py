"""fastcross train --distributed: what each of torchrun's processes does."""

import os
import time
from argparse import Namespace
from pathlib import Path

from fastcross.cli.printing import print_metrics, show
from fastcross.data import Cache
from fastcross.distributed.processes import local_device, restarts, start
from fastcross.distributed.storage import ShardedRun
from fastcross.training.experiment import make_plan, run_plan
from fastcross.training.loop import Interrupted
from fastcross.training.run_folder import Run
from fastcross.training.sources import open_source


def train(args: Namespace) -> int:
    device = Run(args.resume).config["device"] if args.resume else args.device
    with start(local_device(device)) as processes:
        leads = processes.rank == 0
        # One process prepares the data and makes the run folder; the others then find them.
        path, resume = processes.share(_open(args) if leads else None)
        run = ShardedRun(path, processes)
        cache = Cache.open(run.config["cache"], fingerprint=run.config["fingerprint"])
        if leads:
            show(f"{processes.size} process{'es' if processes.size > 1 else ''} on {processes.device.type}")
        try:
            result = run.result or run_plan(cache, run, show if leads else None, resume=resume, ranks=processes)
        except Interrupted as interruption:
            if leads:
                show(f"{interruption}; continue with: fastcross train --resume {run.path}{_processes(processes.size)}")
            return 130
        if leads:
            print_metrics(result)
            print(f"run folder: {run.path}")
    return 0


def _processes(size: int) -> str:
    return f" --processes {size}" if size > 1 else ""


def _open(args: Namespace) -> tuple[Path, bool]:
    """The run folder, and whether to go on where it stopped: as asked for, or because torchrun restarted us."""
    if args.resume:
        run = Run(args.resume)
        if run.result:
            raise ValueError(f"the run {run.path} is finished; see fastcross info {run.path}")
        return run.path, True
    if not args.run and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        raise ValueError("torchrun --max-restarts needs --run FOLDER, for a restarted process to find its checkpoint")
    if args.model not in ("dcn", "dnn"):
        raise ValueError(f"--distributed trains the models dcn and dnn; got {args.model}")
    cache, optimum = open_source(args, show)
    plan = make_plan(args, args.model, cache, optimum, seed=args.seed)
    path = Path(args.run or f"runs/{args.model}-{time.strftime('%Y%m%d-%H%M%S')}")
    if restarts() and (path / "config.json").exists():
        if Run(path).config != plan:
            raise ValueError(f"{path} holds a run with another configuration; choose another --run")
        return path, True
    return Run.create(path, plan).path, False
