"""Starting the processes of one machine: what `torchrun -m fastcross train` would do, as `--processes N`."""

import logging
import os
import time
from argparse import Namespace

from fastcross.training.run_folder import Run


def is_sharded(args: Namespace) -> bool:
    """Whether a training goes through TorchRec: asked for, or the run that it resumes did, or for fbgemm's tables."""
    several = (args.processes or 1) > 1 or "TORCHELASTIC_RUN_ID" in os.environ  # which torchrun sets
    if args.resume:
        sharded = bool(Run(args.resume).config.get("sharding"))
        if several and not sharded:
            raise ValueError(f"{args.resume} is a run of one process; see fastcross convert --help")
        return sharded
    args.distributed = args.distributed or several
    if args.embedding == "fbgemm" and not args.distributed:  # one process, which holds every table whole
        args.distributed, args.sharding = True, "table"
    return args.distributed


def needs_launch(args: Namespace) -> bool:
    return "RANK" not in os.environ and ((args.processes or 1) > 1 or args.max_restarts > 0)


def launch(args: Namespace) -> int:
    """Run this very command in several processes, which torchrun's agent watches and restarts."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # Processes that share a machine share its cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (args.processes or 1))))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the processes speak for themselves
    argv = list(args.argv)
    if not args.run and not args.resume:  # one name for all, also for those that are started again
        argv += ["--run", f"runs/{args.model}-{time.strftime('%Y%m%d-%H%M%S')}"]
    options = ["--standalone", f"--nproc-per-node={args.processes or 1}", f"--max-restarts={args.max_restarts}", "-m"]
    try:
        torchrun([*options, "--", "fastcross", *argv])
    except ChildFailedError as error:
        return max(failure.exitcode for failure in error.failures.values()) or 1
    except SignalException:
        return 130
    return 0
