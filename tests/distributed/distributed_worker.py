"""What torchrun's processes do in test_distributed.py: several trainings, and checks that need ranks, in one launch."""

import json
import sys
from pathlib import Path

import torch

from fastcross.data import Bag
from fastcross.distributed.model import GlobalBatchNorm, shard
from fastcross.distributed.sharding import join
from fastcross.models.dcn import DCN
from fastcross.training.config import TrainingConfig
from fastcross.training.experiment import resume


def train_all(folder, processes):
    """Every run folder that the test has left here with a plan in it."""
    for path in sorted(path for path in folder.iterdir() if (path / "config.json").exists()):
        resume(path, processes=processes)


def check_batch_norm(processes):
    """Output, gradients and running statistics of rows that two ranks share, 5 and 2 of them, are those of one."""
    torch.manual_seed(3)
    x, dy = 100 + torch.randn(7, 6), torch.randn(7, 6)
    whole, shared = torch.nn.BatchNorm1d(6), GlobalBatchNorm(6)
    for norm in (whole, shared):
        norm.load_state_dict({**norm.state_dict(), "weight": torch.arange(6.0) + 1, "bias": torch.arange(6.0)})
    rows = slice(0, 5) if processes.rank == 0 else slice(5, 7)
    x_whole, x_shared = x.clone().requires_grad_(), x[rows].clone().requires_grad_()
    y_whole, y_shared = whole(x_whole), shared(x_shared)
    y_whole.backward(dy)
    y_shared.backward(dy[rows])
    near = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(y_shared, y_whole[rows], **near)
    torch.testing.assert_close(x_shared.grad, x_whole.grad[rows], **near)
    torch.testing.assert_close(processes.sum(shared.weight.grad), whole.weight.grad, **near)
    torch.testing.assert_close(shared.running_mean, whole.running_mean, **near)
    torch.testing.assert_close(shared.running_var, whole.running_var, **near)
    shared.eval()
    torch.testing.assert_close(shared(x[rows]), whole.eval()(x[rows]), **near)


def check_model(processes, sharding, embedding):
    """The same seed draws the same DCN on any number of ranks; bags, weighted and empty ones; no rows on one rank."""
    options = {
        "bag_cardinalities": (40,),
        "embedding_dim": (5, 4, 7, 9),
        "cross_layers": 2,
        "deep_layers": (8,),
        "cardinalities": (1, 3, 70_001),
        "num_dense": 2,
    }
    torch.manual_seed(11)
    whole = DCN(**options).eval()
    with torch.device("meta"):
        model = DCN(**options)
    sharded, _ = shard(model, processes, TrainingConfig(optimizer="sgd", seed=11), sharding, embedding)
    sharded.eval()
    categorical = torch.tensor([[0, 2, 70_000], [0, 0, 0], [0, 1, 65_536]])
    values, offsets, weights = torch.tensor([3, 39, 3, 7]), torch.tensor([0, 2, 2]), torch.tensor([1.0, 2.0, 0.5, 0.5])
    dense = torch.randn(3, 2)
    bag = Bag(values, offsets, weights)
    expected = whole(dense, categorical, (bag,))
    with torch.no_grad():
        for rows in (slice(0, 3), slice(0, 0) if processes.rank else slice(0, 3)):
            part = bag if rows.stop == 3 else Bag(values[:0], offsets[:0], weights[:0])
            found = sharded(dense[rows], categorical[rows], (part,))
            torch.testing.assert_close(found, expected[rows], rtol=1e-5, atol=1e-6)


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    with join("cpu") as processes:
        check_batch_norm(processes)
        for sharding in ("table", "row", "column"):
            for embedding in ("fbgemm", "fastcross"):
                check_model(processes, sharding, embedding)
        train_all(folder, processes)
        gathered = processes.gather(torch.full((2 * processes.rank, 3), float(processes.rank)))
        if processes.rank == 0:
            done = {"size": processes.size, "gathered": gathered.tolist()}
            (folder / "done.json").write_text(json.dumps(done))


def check_no_thread_is_left():
    """A thread of Gloo that outlives the group may abort the process when the interpreter shuts down."""
    names = [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert not [name for name in names if "gloo" in name], names


main()
check_no_thread_is_left()
