"""Several processes: TorchRec shards the embedding tables, DDP replicates the rest, torchrun restarts processes.
Here is what asks for several processes, and starting those of one machine, as `torchrun -m fastcross train` would do.

process_group rank, device, collectives; who prints when something fails
sharding      an experiment's processes, and the run folder that all of them write
model         a DCN from meta tensors to a sharded model, batch normalisation over all ranks, and the optimiser
tables        the embedding and stacking layer on TorchRec's tables, how they are divided, who looks their rows up
internals     private interfaces of TorchRec and PyTorch
"""

import logging
import os
from collections.abc import Sequence


def under_torchrun() -> bool:
    return "RANK" in os.environ


def restarts() -> int:
    """How often torchrun has restarted these workers."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def max_restarts() -> int:
    """How often torchrun may restart the workers."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def launch(argv: Sequence[str], processes: int, max_restarts: int) -> int:
    """Run a fastcross command in several processes, which torchrun's agent watches and restarts."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # The processes of a machine share its cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    elastic = logging.getLogger("torch.distributed.elastic")
    level = elastic.level
    elastic.setLevel(logging.CRITICAL)  # the processes speak for themselves
    options = ["--standalone", f"--nproc-per-node={processes}", f"--max-restarts={max_restarts}", "-m"]
    try:
        torchrun([*options, "--", "fastcross", *argv])
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return 2 if 2 in codes else max(codes) or 1  # the error of one, not the signals by which it ended the others
    except SignalException:
        return 130
    finally:
        elastic.setLevel(level)
    return 0
