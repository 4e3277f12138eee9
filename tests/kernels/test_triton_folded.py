"""The Triton kernel of folded logits against PyTorch's operators, on a GPU or in Triton's interpreter."""

import pytest
import torch
from triton_place import MARKS

from fastcross.kernels import closed_form
from fastcross.ops.cross_network import folded_logits

pytestmark = MARKS


def operands(device, rows, k, layers, outputs, heights=(50, 1, 300)):
    generator = torch.Generator().manual_seed(rows + k)
    starts = torch.tensor([0, *heights[:k]]).cumsum(0)
    ids = torch.stack([torch.randint(0, n, (rows,), generator=generator) for n in heights[:k]], 1) if k else None
    table = torch.randn(int(starts[-1]) if k else rows, layers + outputs, generator=generator) * 0.3
    base = torch.randn(rows, layers + outputs, generator=generator) * 0.3
    constants = torch.randn(layers + outputs, generator=generator)
    made = table, base, constants, layers, ids, starts if k else None
    return [t.to(device) if isinstance(t, torch.Tensor) else t for t in made]


@pytest.mark.parametrize(("rows", "k"), [(1, 3), (130, 3), (130, 1), (200, 0), (0, 3)])
@pytest.mark.parametrize(("layers", "outputs"), [(1, 1), (6, 1), (3, 4)])
def test_logits(device, rows, k, layers, outputs):
    table, base, constants, layers, ids, starts = operands(device, rows, k, layers, outputs)
    for each in (base, base[:1]) if rows else (base,):
        found = folded_logits(table, each, constants, layers, ids, starts, backend="triton")
        wide = (t.double() for t in (each, constants))
        exact = closed_form.folded_logits(table.double(), ids, starts, *wide, layers)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_ids_in_columns_and_an_id_that_is_none(device):
    table, base, constants, layers, ids, starts = operands(device, 70, 3, 2, 1)
    across = ids.T.contiguous().T
    right = folded_logits(table, base, constants, layers, ids, starts, backend="triton")
    assert torch.equal(folded_logits(table, base, constants, layers, across, starts, backend="triton"), right)
    ids[5, 1], ids[69, 0], ids[7, 2] = 1, -1, 2**40
    found = folded_logits(table, base, constants, layers, ids, starts, backend="triton")
    wrong = torch.tensor([5, 7, 69], device=device)
    assert found[wrong].isnan().all()
    found[wrong] = right[wrong]
    assert torch.equal(found, right)
