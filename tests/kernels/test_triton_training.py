"""A DCN trained on the Triton path: as on the CPU, and compiled as one graph with sparse gradients.

On a GPU, or in Triton's interpreter, where ``test_triton_interpreter.py`` runs this file.
"""

import pytest
import torch
from triton_place import MARKS

from fastcross import DCN, optim
from fastcross.batch import Bag
from fastcross.gradients import has_heads
from fastcross.layers.embedding import EmbeddingStack

pytestmark = MARKS
ROWS = 12


def make_model(device, backend):
    torch.manual_seed(0)
    options = {"bag_cardinalities": [6], "cross_layers": 2, "deep_layers": (8,), "batch_norm": False}
    return DCN([50, 7], 2, 4, **options, backend=backend).to(device)


def make_batch(seed, device):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 7, (ROWS, 2), generator=generator).to(device)
    values = torch.randint(0, 6, (2 * ROWS,), generator=generator).to(device)
    return (
        torch.randn(ROWS, 2, generator=generator).to(device),
        ids,
        [Bag(values, torch.arange(0, 2 * ROWS, 2).to(device))],
    )


def test_trains_as_on_the_cpu(device):
    found = []
    for place, backend in (("cpu", "torch"), (device, "triton")):
        model = make_model(place, backend)
        optimizer = optim.configure(model, lr=0.1, backend=backend)
        for step in range(2):
            optimizer.zero_grad()
            model(*make_batch(step, place)).square().sum().backward()
            norm = optimizer.clip_grad_norm(1.0)
            optimizer.step()
        model.embedding.raise_faults()
        found.append([norm, *model.state_dict().values()])
    for wanted, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), wanted.detach(), rtol=1e-4, atol=1e-5)


def test_compiles_as_one_graph_with_sparse_gradients(device):
    torch.compiler.reset()
    dense, ids, (bag,) = make_batch(0, device)
    bags = [(bag.values, bag.offsets)]
    eager, model = make_model(device, "triton"), make_model(device, "triton")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    wanted, found = eager(dense, ids, bags), compiled(dense, ids, bags)
    torch.testing.assert_close(found, wanted)
    wanted.square().sum().backward()
    found.square().sum().backward()
    for table, expected in zip(model.embedding.tables, eager.embedding.tables, strict=True):
        assert table.grad.is_sparse
        torch.testing.assert_close(table.grad.to_dense(), expected.grad.to_dense())
    ids[2, 1] = 99
    assert compiled(dense, ids, bags)[2].isnan()
    with pytest.raises(ValueError, match="feature 1 has 7 ids, 0 to 6; got id 99 in row 2"):
        model.embedding.raise_faults()


def test_inductor_takes_sparse_gradients(device):
    """In one graph; they are added to in ``.grad``, and hooks may keep them."""
    torch.compiler.reset()
    dense, ids, (bag,) = make_batch(0, device)
    eager, model, kept = make_model(device, "triton"), make_model(device, "triton"), []
    model.embedding.tables[0].register_hook(kept.append)
    compiled = torch.compile(model, fullgraph=True)
    for step in range(2):
        for each in (eager, compiled):
            each(dense, ids, [(bag.values, bag.offsets)]).square().sum().backward()
        for table, expected in zip(model.embedding.tables, eager.embedding.tables, strict=True):
            assert type(table.grad) is torch.Tensor
            assert table.grad.is_sparse
            torch.testing.assert_close(table.grad.to_dense(), expected.grad.to_dense())
        assert has_heads(model.embedding.tables[1].grad) == (step == 0)
    torch.testing.assert_close(2 * kept[0].to_dense(), eager.embedding.tables[0].grad.to_dense())


def test_inductor_adds_gradients_of_a_table(device):
    """Within the graph: of a table that is looked up twice, and of one that has a dense gradient, too."""
    torch.compiler.reset()
    stack = EmbeddingStack([7, 5], 0, 3, backend="triton").to(device)
    ids = torch.tensor([[2, 1], [2, 4], [5, 1]], device=device)

    def loss(ids):
        dense = torch.zeros(3, 0, device=device)
        return (stack(dense, ids) * stack(dense, ids).cos()).sum() + stack.tables[1].sum().square()

    found = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        stack.zero_grad()
        function(ids).backward()
        found.append([table.grad for table in stack.tables])
    for ours, wanted in zip(found[1], found[0], strict=True):
        assert ours.is_sparse == wanted.is_sparse
        torch.testing.assert_close(ours.to_dense(), wanted.to_dense())
    assert not has_heads(found[1][0])


def test_a_compiler_that_takes_no_sparse_gradients_leaves_the_stack_alone(device):
    """Without fullgraph the stack stays outside of Inductor's graphs, and of others that are not known to take them."""
    torch.compiler.reset()
    stack = EmbeddingStack([7], 1, 3, backend="triton").to(device)
    ids = torch.tensor([[2], [2], [5]], device=device)
    loss = torch.compile(lambda dense: stack(dense, ids).sum(), backend="aot_eager_decomp_partition")
    loss(torch.zeros(3, 1, device=device)).backward()
    assert stack.tables[0].grad.is_sparse
    assert stack.tables[0].grad.to_dense()[:, 0].tolist() == [0, 0, 2, 0, 0, 1, 0]
