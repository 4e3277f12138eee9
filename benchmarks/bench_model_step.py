"""A whole training step of DCN: beside its DNN alone, DeepCTR-Torch's DCN and torchfm's.

Ours updates the embedding rows of the batch (a lazy Adam); the peers' Adam updates whole tables, as they come.
"""

from dataclasses import replace
from typing import Any

from benchmarks.contestants import EAGER, OURS, SWAPPED
from benchmarks.models import DEEPCTR, DNN, PAPER_DIMS, TORCHFM, Heights, Shape, TrainingStep

PAPER = Shape(512, 10_000, PAPER_DIMS, 13, 6, (1024, 1024))
CRITEO = Shape(4096, 1_000_000, (8,) * 26, 13, 3, (256, 256))
WITHOUT_DENSE = Shape(4096, 100_000, (16,) * 26, 0, 3, (400, 400, 400))


def cases(full: bool) -> list[tuple[Any, tuple[str, ...]]]:
    alone = [(TrainingStep(replace(PAPER, rows=rows)), (OURS, EAGER, DNN)) for rows in (512, 4096)]
    batches = (512, 4096) if full else (4096,)
    against_deepctr = [
        (TrainingStep(replace(CRITEO, rows=rows), DEEPCTR), (OURS, DEEPCTR, DEEPCTR + SWAPPED)[: 3 if full else 2])
        for rows in batches
    ]
    against_torchfm = [(TrainingStep(replace(WITHOUT_DENSE, rows=rows), TORCHFM), (OURS, TORCHFM)) for rows in batches]
    heights = Heights(replace(CRITEO, rows=512, cardinality=1000)), (f"{OURS}, 1000 ids", f"{OURS}, 1000000 ids")
    return [*alone, *against_deepctr, *against_torchfm, *([heights] if full else [])]


def bench_model_step(workload, contestants, contestant, compete):
    compete(workload, contestants, contestant)
