"""A DCN trained on the Triton path: as on the CPU; sparse gradients stay outside of compiled graphs.

On a GPU, or in Triton's interpreter, where ``test_triton_interpreter.py`` runs this file.
"""

import torch
from triton_place import MARKS

from fastcross import DCN, optim
from fastcross.batch import Bag
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


def test_a_compiler_that_takes_no_sparse_gradients_leaves_the_stack_alone(device):
    """Graphs have no sparse tensors: a stack with sparse gradients stays outside of them."""
    torch.compiler.reset()
    stack = EmbeddingStack([7], 1, 3, sparse_gradients=True, backend="triton").to(device)
    ids = torch.tensor([[2], [2], [5]], device=device)
    loss = torch.compile(lambda dense: stack(dense, ids).sum(), backend="aot_eager_decomp_partition")
    loss(torch.zeros(3, 1, device=device)).backward()
    assert stack.tables[0].grad.is_sparse
    assert stack.tables[0].grad.to_dense()[:, 0].tolist() == [0, 0, 2, 0, 0, 1, 0]
