"""python -m benchmarks.swaps: what fastcross.swap gains for each package's layer, in processor time of one thread.

Processor time repeats where a machine is shared; each pair is verified first and takes turns. Prints a table.
"""

import argparse
import statistics
import time

import torch

from benchmarks.contestants import swapped
from benchmarks.harness import measure, memory
from benchmarks.report import tables
from benchmarks.suites import LOW_RANK, MATRIX, MIXTURE, NETWORK
from benchmarks.workloads.operators import Problem


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.swaps", description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--features", type=int, default=429)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for operator in (NETWORK, MATRIX, LOW_RANK, MIXTURE):
        problem = Problem(operator, args.rows, args.features, 3)
        expected = problem.expected()
        for peer in operator.peers:
            assert peer.peer is not None
            pair = peer, swapped(peer)
            entries = [measure.verify(one.name, problem.enter(one), expected).entry for one in pair]
            ratios = sorted(_seconds(entries[0]) / _seconds(entries[1]) for _ in range(args.rounds))
            kept = [tables.size(memory.kept_bytes(entry.forward, entry.leaves)) for entry in entries if entry.forward]
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            rows.append([peer.name, peer.peer.path.rpartition(".")[2], operator.name, spread, *kept])
            print(rows[-1], flush=True)
    head = ["package", "class", "operator", "times as fast", "kept before", "kept after"]
    print(tables.markdown(head, rows))


def _seconds(entry: measure.Entry) -> float:
    start = time.process_time()
    entry.step()
    return time.process_time() - start


if __name__ == "__main__":
    main()
