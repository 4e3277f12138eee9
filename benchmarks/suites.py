"""The benchmarks: which operators there are, and which suites are measured on them.

A new operator is one entry of OPERATORS, and its suite follows from it. A new suite is one entry of SUITES.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.contestants import (
    COMPILED,
    DEEPCTR,
    DNN,
    EAGER,
    EMPTY,
    EXPORTED,
    FAMILY_PEERS,
    FUXICTR,
    OURS,
    PEERS,
    PLAIN,
    PRODUCTS,
    TORCHFM,
    WHOLE_TABLE_ADAM,
    Contestant,
    deep,
    everyone,
    high,
    same_adam,
    swapped,
)
from benchmarks.harness import clock
from benchmarks.harness.measure import Workload
from benchmarks.workloads.models import Shape
from benchmarks.workloads.operators import Depths, Operator, Problem
from benchmarks.workloads.roof import LARGE_COPY, PRODUCT, Roof
from benchmarks.workloads.steps import Heights, Request, TrainingStep

# Name, what it is, operands and output (B rows, d features, L layers, C outputs); reads and writes of a (B, d) tensor
# that no implementation can do without, forward and backward; the packages that have it.
LAYER = Operator(
    "cross_layer", "One cross layer, its input x other than x0",
    (("x0", "Bd"), ("x", "Bd"), ("w", "d"), ("b", "d")), "Bd", (2, 1), (3, 2),
)  # fmt: skip
NETWORK = Operator(
    "cross_network", "The paper's network",
    (("x0", "Bd"), ("w", "Ld"), ("b", "Ld")), "Bd", (1, 1), (2, 1), PEERS,
)  # fmt: skip
LOGITS = Operator(
    "cross_logits", "The logits of the cross network, whose output is never written",
    (("x0", "Bd"), ("w", "Ld"), ("b", "Ld"), ("v", "Cd")), "BC", (1, 0), (1, 1), (FUXICTR,), tail="v",
)  # fmt: skip
OPERATORS = (LAYER, NETWORK, LOGITS)

# DCN-V2's layers and GDCN's: GEMMs rule, so the traffic of x0 and its result is a bound that nobody comes near.
MATRIX = Operator(
    "cross_matrix", "DCN-V2",
    (("x0", "Bd"), ("w", "Ldd"), ("b", "Ld")), "Bd", (1, 1), (2, 1), FAMILY_PEERS["cross_matrix"],
)  # fmt: skip
LOW_RANK = Operator(
    "cross_low_rank", "DCN-V2, low rank",
    (("x0", "Bd"), ("u", "Ldr"), ("v", "Lrd"), ("b", "Ld")), "Bd", (1, 1), (2, 1), FAMILY_PEERS["cross_low_rank"],
)  # fmt: skip
MIXTURE = Operator(
    "cross_mixture", "DCN-V2, a mixture of experts",
    (("x0", "Bd"), ("u", "LKdr"), ("c", "LKrr"), ("v", "LKrd"), ("b", "Ld"), ("gate", "Kd")), "Bd", (1, 1), (2, 1),
    FAMILY_PEERS["cross_mixture"],
)  # fmt: skip
GATED = Operator(
    "cross_gated", "GDCN",
    (("x0", "Bd"), ("w", "Ldd"), ("g", "Ldd"), ("b", "Ld")), "Bd", (1, 1), (2, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A workload and who competes in it."""

    workload: Workload
    contestants: tuple[Contestant, ...]
    seconds: float = 1.0  # of timing


@dataclass(frozen=True)
class Suite:
    """Cases that are measured in one process and reported under one heading."""

    name: str
    title: str
    default: tuple[Case, ...]
    full: tuple[Case, ...] = ()  # with --full, in place of the default's
    text: str = ""  # below the heading
    grid: bool = False  # reported as one table of gains, not as a table per case
    figures: tuple[str, ...] = ()  # of benchmarks.report.plots

    def cases(self, full: bool = False) -> list[Case]:
        """The cases with those who can take part here."""
        gpu = clock.device().type == "cuda"
        chosen = self.full if full and self.full else self.default
        return [replace(case, contestants=tuple(c for c in case.contestants if gpu or not c.graph)) for case in chosen]


def problems(
    operator: Operator,
    rows: Iterable[int],
    d: Iterable[int],
    layers: Iterable[int] = (1,),
    backward: Iterable[bool] = (True,),
    dtype: Iterable[str] = ("float32",),
) -> list[Problem]:
    """An operator on every combination of these."""
    shapes = itertools.product(rows, d, layers, dtype, backward)
    return [Problem(operator, *shape) for shape in shapes]


def cases(workloads: Iterable[Workload], contestants: tuple[Contestant, ...], seconds: float = 1.0) -> tuple[Case, ...]:
    return tuple(Case(workload, contestants, seconds) for workload in workloads)


BOTH = (False, True)  # forward; forward and backward
EVERYONE = everyone(*PEERS)
WITHOUT_COMPILE = everyone(*PEERS, compiled=False)
PAPER = Shape(512, 10_000, (39,) * 25 + (38,), 13, 6, (1024, 1024))  # 26 features and 13 integers, d = 1026
CRITEO = Shape(4096, 1_000_000, (8,) * 26, 13, 3, (256, 256))
WITHOUT_DENSE = Shape(4096, 100_000, (16,) * 26, 0, 3, (400, 400, 400))


def steps(shape: Shape, rows: Iterable[int], rival: Contestant, *others: Contestant) -> tuple[Case, ...]:
    """Training steps beside a package's own model: as it comes, and with our optimiser."""
    workloads = [TrainingStep(replace(shape, rows=count), rival) for count in rows]
    return cases(workloads, (OURS, rival, same_adam(rival), *others))


def operator_suite(operator: Operator) -> Suite:
    """The paper's shape, forward, and forward and backward."""
    competitors = everyone(*operator.peers)
    return Suite(
        operator.name,
        operator.title,
        cases(problems(operator, (4096,), (1026,), (6,), BOTH), competitors),
        cases(problems(operator, (64, 512, 4096, 65536), (54, 390, 1026), (6,), BOTH), competitors),
    )


DEPTHS = (*(deep(OURS, layers) for layers in (1, 12, 32)), *(deep(EAGER, layers) for layers in (1, 12)))
SUITES = (
    Suite(
        "cross_network",
        "The paper's network: d = 1026, 6 layers, a batch of 4096; its depths against each other; the machine's roof",
        (
            Case(Problem(NETWORK, 4096, 1026, 6), EVERYONE, seconds=20.0),
            Case(Problem(NETWORK, 4096, 1026, 6, backward=False), EVERYONE, seconds=5.0),
            Case(Depths(Problem(NETWORK, 4096, 1026)), DEPTHS, seconds=5.0),
            Case(Roof(), (LARGE_COPY, PRODUCT), seconds=3.0),
        ),
        figures=("roofline",),
    ),
    *(operator_suite(operator) for operator in OPERATORS if operator != NETWORK),
    Suite(
        "cross_family",
        "DCN-V2's layers: a batch of 4096, d = 429, as in Criteo's models; MLPerf's interaction; forward and backward",
        (
            *(
                Case(Problem(each, 4096, 429, 3), (OURS, PLAIN, EAGER, COMPILED, *each.peers, PRODUCTS), 2.0)
                for each in (MATRIX, LOW_RANK, MIXTURE)
            ),
            # The compiled gated layers' db is beyond the rule, by a twentieth.
            Case(Problem(GATED, 4096, 429, 3), (OURS, PLAIN, EAGER, PRODUCTS), 2.0),
            Case(Problem(MIXTURE, 4096, 429, 3, "bfloat16"), (OURS, EAGER, *MIXTURE.peers, PRODUCTS), 2.0),
            Case(Problem(LOW_RANK, 1024, 3456, 3, rank=512), (OURS, PLAIN, EAGER, *LOW_RANK.peers, PRODUCTS), 2.0),
        ),
        text=(
            "The packages' modules run as shipped. The eager loop is the papers' equation, a product with each weight"
            " as it stands, and FuxiCTR's code of GDCN. `plain PyTorch` is the"
            ' same in the fewest GEMMs (`backend="torch"`): what a rewrite of the packages\' code gains. `GEMMs alone`'
            " are those of `fastcross` with nothing between them. MLPerf's DLRM has a batch of 65,536; its GEMMs take"
            " the same share of any large batch."
        ),
    ),
    Suite(
        "cross_network_batch",
        "The network against the batch size, forward and backward; d = 390 and 3 layers, the usual ones for Criteo",
        (
            *cases(problems(NETWORK, (1,), (390,), (3,)), (*WITHOUT_COMPILE, EMPTY)),
            *cases(problems(NETWORK, (512,), (390,), (3,)), EVERYONE),
            *cases(problems(NETWORK, (64, 4096, 16384), (390,), (3,)), WITHOUT_COMPILE),
        ),
        cases(problems(NETWORK, (1, 8, 64, 512, 4096, 32768, 65536), (390,), (3,), BOTH), EVERYONE),
    ),
    Suite(
        "cross_network_depth",
        "The network against its depth, forward and backward",
        cases(problems(NETWORK, (512,), (1026,), (1, 2, 4, 8, 16, 32)), EVERYONE),
        cases(problems(NETWORK, (4096,), (1026,), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), BOTH), EVERYONE),
        figures=("time-against-depth", "memory-against-depth"),
    ),
    Suite(
        "cross_network_width",
        "The network against its width, forward and backward",
        cases(problems(NETWORK, (512,), (16, 64, 256, 1026, 8192), (3,)), WITHOUT_COMPILE),
        cases(problems(NETWORK, (4096,), (16, 32, 54, 128, 390, 624, 1026, 2048, 4096, 8192), (3,), BOTH), EVERYONE),
        figures=("time-against-width",),
    ),
    Suite(
        "cross_network_dtype",
        "The network in other dtypes, forward and backward",
        cases(problems(NETWORK, (256,), (1026,), (3,), dtype=("bfloat16", "float64")), WITHOUT_COMPILE),
        cases(problems(NETWORK, (4096,), (1026,), (3,), BOTH, ("float16", "bfloat16", "float32", "float64")), EVERYONE),
    ),
    Suite(
        "cross_network_grid",
        "Grid of batches, widths and depths: how many times as fast as the eager loop, forward and backward",
        cases(problems(NETWORK, (1, 64), (16, 54, 390, 1026, 4096), (1, 3, 6, 16)), (OURS, EAGER), 0.2),
        cases(
            problems(NETWORK, (1, 64, 512, 4096, 65536), (16, 54, 390, 1026, 4096), (1, 3, 6, 16)), (OURS, EAGER), 0.2
        ),
        grid=True,
    ),
    Suite(
        "latency",
        "Inference latency: the cross network, and whole models, at batches of 1, 32 and 512",
        (
            *cases([Problem(NETWORK, n, 1026, 6, backward=False, latency=True) for n in (1, 32, 512)], EVERYONE, 2.0),
            *cases([Request(replace(PAPER, rows=n)) for n in (1, 32, 512)], (OURS, EAGER, DEEPCTR, swapped(DEEPCTR))),
        ),
        (
            *cases([Problem(NETWORK, n, 1026, 6, backward=False, latency=True) for n in (1, 32, 512)], EVERYONE, 4.0),
            *cases(
                [Request(replace(PAPER, rows=n)) for n in (1, 32, 512)],
                (OURS, EAGER, COMPILED, EXPORTED, DEEPCTR, swapped(DEEPCTR)),
                4.0,
            ),
        ),
    ),
    Suite(
        "model_step",
        "A whole training step of DCN: beside its DNN alone, DeepCTR-Torch's DCN and torchfm's",
        (
            *cases([TrainingStep(replace(PAPER, rows=n)) for n in (512, 4096)], (OURS, EAGER, DNN), 4.0),
            *steps(CRITEO, (4096,), DEEPCTR),
            *steps(WITHOUT_DENSE, (4096,), TORCHFM),
        ),
        (
            *cases([TrainingStep(replace(PAPER, rows=n)) for n in (512, 4096)], (OURS, EAGER, DNN), 4.0),
            *steps(CRITEO, (512, 4096), DEEPCTR, swapped(DEEPCTR), WHOLE_TABLE_ADAM),
            *steps(WITHOUT_DENSE, (512, 4096), TORCHFM, WHOLE_TABLE_ADAM),
            Case(Heights(replace(CRITEO, rows=512, cardinality=1000)), (high(OURS, 1000), high(OURS, 1_000_000))),
        ),
        text=(
            "fastcross's Adam updates the embedding rows of the batch and leaves the others (a lazy Adam); the"
            " packages' own updates whole tables. `same Adam`: the package's model with fastcross's optimiser, its"
            " tables' gradients sparse."
        ),
    ),
    Suite(
        "swap",
        "What fastcross.swap gains: the peers' own modules and DeepCTR-Torch's own DCN, before and after",
        (
            Case(Problem(NETWORK, 1024, 1026, 6), tuple(c for peer in PEERS for c in (peer, swapped(peer)))),
            Case(TrainingStep(replace(PAPER, deep_layers=(256, 128)), DEEPCTR), (DEEPCTR, swapped(DEEPCTR))),
        ),
    ),
)

# What `make bench-check` measures beside its baseline, in a minute.
QUICK = (
    Problem(NETWORK, 1024, 1026, 6),
    Problem(NETWORK, 1024, 1026, 1),
    Problem(NETWORK, 1024, 1026, 6, backward=False),
    Problem(NETWORK, 64, 54, 3),
    Problem(NETWORK, 1024, 1026, 3, "float64"),
    Problem(LAYER, 1024, 1026),
    Problem(LOGITS, 1024, 1026, 6),
)
