"""Memory, traffic and time per step of a sharded DCN, from its shape alone: the model behind docs/scale.md.

python -m benchmarks.scale_model    its figures for Criteo 1TB on 8 GPUs: a prediction, nothing is measured
"""

import itertools
from dataclasses import dataclass

NUM_DENSE = 13
# The categorical columns of Criteo's 1 TB of logs, ids above 40 million folded, as MLPerf's DLRM trains on them.
CRITEO_1TB = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976, 14,
    39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What is trained, and by how many."""

    cardinalities: tuple[int, ...]
    dim: int  # n_e, for all tables
    deep: tuple[int, ...]
    cross: int
    batch: int  # of all ranks together
    ranks: int
    sharding: str = "table"
    optimizer: str = "sgd"
    gloo: bool = True  # between CPUs; NCCL between GPUs

    @property
    def columns(self) -> int:
        """Of the embeddings in x0."""
        return self.dim * len(self.cardinalities)

    @property
    def layers(self) -> int:
        """Parameters of the layers: cross, deep with batch normalisation, logits."""
        d = self.columns + NUM_DENSE
        sizes = (d, *self.deep)
        deep = sum(a * b + 2 * b for a, b in itertools.pairwise(sizes))
        return 2 * self.cross * d + deep + d + sizes[-1] + 1


def memory(setting: Setting) -> float:
    """Bytes of the fullest rank: its tables and their moments; the layers, their gradients and moments on each."""
    states = 3 if setting.optimizer == "adam" else 1
    return rows_per_rank(setting) * setting.dim * 4 * states + 4 * setting.layers * (states + 1)


def rows_per_rank(setting: Setting) -> float:
    """Rows and columns divide evenly; whole tables do not: each goes, largest first, to the emptiest rank."""
    if setting.sharding != "table":
        return sum(setting.cardinalities) / setting.ranks
    held = [0] * setting.ranks
    for cardinality in sorted(setting.cardinalities, reverse=True):
        held[held.index(min(held))] += cardinality
    return max(held)


def traffic(setting: Setting) -> float:
    """Bytes that a rank sends in a step.

    Table- and column-wise: ids (8 bytes, and as much for lengths) to the rank that has the table, rows back, and
    gradients the same way: 4 · columns for each of a rank's rows, less those that stay. Row-wise: lengths go to every
    rank, and every rank adds up every row of the batch, so that rows and gradients are as many times more as there are
    ranks; gloo sends the rows twice (inferred from the bytes that it sent). The layers' gradients are summed in a
    ring: twice their size, less a part. Batch normalisation: 3 and 2 numbers per column.
    """
    W, rows = setting.ranks, setting.batch / setting.ranks
    others = (W - 1) / W
    by_row = setting.sharding == "row"
    ids = rows * len(setting.cardinalities) * 8 * (others + (W - 1 if by_row else others))
    sums = rows * setting.columns * 4 * others * (W * (3 if setting.gloo else 2) if by_row else 2)
    norms = sum(setting.deep) * 4 * (3 * (W - 1) + 2 * 2 * others)
    return ids + sums + 2 * others * 4 * setting.layers + norms


def collectives(setting: Setting) -> int:
    """How many times per step the ranks wait for each other: ids (4), rows, gradients, batch norms, layers, numbers."""
    return 0 if setting.ranks == 1 else 4 + 2 + 2 * len(setting.deep) + 1 + 4


@dataclass(frozen=True)
class Device:
    """A kind of GPU: what it reaches, not what its data sheet says."""

    name: str
    memory: float  # bytes
    bandwidth: float  # of its memory, bytes per second
    link: float  # bytes per second that it sends
    arithmetic: float  # floating-point operations per second
    latency: float  # seconds that a collective takes at least


A100 = Device("A100 80 GB, NVLink", 80e9, 0.6 * 2.0e12, 0.7 * 300e9, 0.4 * 156e12, 40e-6)


def predict(setting: Setting, device: Device) -> dict[str, float]:
    """Seconds per step on GPUs, part by part, one after the other: overlap would only shorten it."""
    rows, d = setting.batch / setting.ranks, setting.columns + NUM_DENSE
    sizes = (d, *setting.deep)
    multiplications = sum(a * b for a, b in itertools.pairwise(sizes))
    # A looked-up row is read and written; in the backward pass its gradient, its weight and the moments are.
    touched = setting.batch * setting.columns / setting.ranks * 4 * (2 + (7 if setting.optimizer == "adam" else 3))
    return {
        "tables": touched / device.bandwidth,
        "traffic": traffic(setting) / device.link,
        "layers": 6 * rows * multiplications / device.arithmetic + 12 * 4 * rows * d / device.bandwidth,
        "waiting": collectives(setting) * device.latency,
    }


def main() -> None:
    print("| n_e | optimiser | sharding | GB per GPU | fits | MB sent per step | ms per step | million rows/s |")
    print("|" + "---|" * 8)
    for dim, optimizer, sharding in (
        (16, "adam", "column"),
        (64, "adam", "column"),
        (128, "sgd", "column"),
        (128, "adam", "table"),
        (128, "adam", "column"),
        (128, "adam", "row"),
        (256, "adam", "column"),
    ):
        setting = Setting(CRITEO_1TB, dim, (1024, 1024), 6, 65536, 8, sharding, optimizer, gloo=False)
        seconds = sum(predict(setting, A100).values())
        held = memory(setting)
        print(
            f"| {dim} | {optimizer} | {sharding} | {held / 1e9:.1f} | {'yes' if held < 0.85 * A100.memory else 'no'} "
            f"| {traffic(setting) / 1e6:.0f} | {1e3 * seconds:.1f} | {setting.batch / seconds / 1e6:.1f} |"
        )


if __name__ == "__main__":
    main()
