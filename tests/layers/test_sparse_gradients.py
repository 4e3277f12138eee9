"""Tables with PyTorch's own optimisers and DDP: dense gradients by default, sparse ones where they are asked for."""

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from fastcross import DCN, optim
from fastcross.layers.embedding import EmbeddingStack

RANKS, ROWS = 2, 6


def make_model(**options):
    torch.manual_seed(0)
    return DCN([50, 7], 2, 4, cross_layers=2, deep_layers=(8,), batch_norm=False, **options)


def make_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 2, generator=generator), torch.randint(0, 7, (ROWS, 2), generator=generator)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam])
def test_plain_optimizers_train_the_tables(kind):
    model = make_model()
    before = model.embedding.tables[0].detach().clone()
    optimizer = kind(model.parameters())
    model(*make_batch(0)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.embedding.tables[0], before)


def test_configure_makes_gradients_sparse():
    model = make_model()
    for sparse in (True, False):
        optimizer = optim.configure(model, sparse_gradients=sparse)
        model(*make_batch(0)).sum().backward()
        assert all(table.grad.is_sparse == sparse for table in model.embedding.tables)
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_optimizers_that_take_them(kind):
    stack = EmbeddingStack([50], 0, 4, sparse_gradients=True)
    before = stack.tables[0].detach().clone()
    optimizer = kind(list(stack.parameters()), lr=0.1)
    stack(torch.zeros(2, 0), torch.tensor([[3], [7]])).sum().backward()
    optimizer.step()
    assert (stack.tables[0] != before).any(1).nonzero().flatten().tolist() == [3, 7]


def train_with_ddp(rank, address, sparse, ignore, results):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    model = make_model(sparse_gradients=sparse)
    if ignore:
        names = [f"embedding.tables.{k}" for k in range(2)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    parallel, optimizer = (
        DistributedDataParallel(model),
        optim.configure(model, lr=0.1, name="sgd", sparse_gradients=sparse),
    )
    try:
        for step in range(3):
            optimizer.zero_grad()
            parallel(*make_batch(RANKS * step + rank)).square().sum().backward()
            optimizer.step()
        results[rank] = {name: value.numpy() for name, value in model.state_dict().items()}
    finally:
        torch.distributed.destroy_process_group()


def run(tmp_path, sparse, ignore=False):
    results = torch.multiprocessing.get_context("spawn").Manager().dict()
    arguments = (f"file://{tmp_path}/rendezvous", sparse, ignore, results)
    torch.multiprocessing.spawn(train_with_ddp, arguments, nprocs=RANKS)
    return dict(results)


def test_ddp_with_dense_gradients_trains_as_one_process(tmp_path):
    found = run(tmp_path, sparse=False)
    model = make_model(sparse_gradients=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        # DDP's gradient is the mean of the ranks'.
        (sum(model(*make_batch(RANKS * step + rank)).square().sum() for rank in range(RANKS)) / RANKS).backward()
        optimizer.step()
    for rank in range(RANKS):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(torch.from_numpy(found[rank][name]), value, rtol=1e-4, atol=1e-5)


def test_tables_that_ddp_leaves_alone_keep_sparse_gradients(tmp_path):
    """As fastcross.distributed does, whose tables are TorchRec's."""
    found = run(tmp_path, sparse=True, ignore=True)
    assert all(isinstance(found[rank], dict) for rank in range(RANKS))
    assert (found[0]["deep.0.weight"] == found[1]["deep.0.weight"]).all()
    assert (found[0]["embedding.tables.0"] != found[1]["embedding.tables.0"]).any()
