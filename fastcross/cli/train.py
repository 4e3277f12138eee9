"""fastcross train: an experiment in this process, in each of torchrun's, or in processes that are launched for it."""

from argparse import Namespace
from pathlib import Path

from fastcross.cli.conflicts import check_resume
from fastcross.cli.experiment import experiment
from fastcross.cli.printing import bars, print_metrics, show
from fastcross.distributed.torchrun import launch, max_restarts, restarts, several, under_torchrun
from fastcross.extras import require
from fastcross.training.experiment import Experiment, resume, run_name
from fastcross.training.loop import Interrupted, Logger
from fastcross.training.processes import ALONE, Processes


def train(args: Namespace) -> int:
    require("training", "train")
    if args.resume:
        check_resume(args)
    plan = Experiment.load(args.resume) if args.resume else experiment(args, args.model, args.seed)
    processes = args.processes or 1
    if args.resume and several(processes) and plan.sharding is None:
        raise ValueError(f"{args.resume} is a run of one process; see fastcross convert --help")
    folder = Path(args.resume or args.run or run_name(args.model))
    if plan.sharding is None:
        return _train(args, plan, folder, ALONE)
    if not under_torchrun() and (processes > 1 or args.max_restarts > 0):
        named = [] if args.resume or args.run else ["--run", str(folder)]  # one for all, and for those started again
        return launch([*args.argv, *named], processes, args.max_restarts)
    if max_restarts() and not args.run and not args.resume:
        raise ValueError("torchrun --max-restarts needs --run FOLDER, for a restarted process to find its checkpoint")
    from fastcross.distributed.sharding import join

    with join(plan.device) as joined:
        if joined.rank == 0:
            show(f"{joined.size} process{'es' if joined.size > 1 else ''} on {joined.device.type}")
        return _train(args, plan, folder, joined)


def _train(args: Namespace, plan: Experiment, folder: Path, processes: Processes) -> int:
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
                    go_on=restarts() > 0,
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
    return 0
