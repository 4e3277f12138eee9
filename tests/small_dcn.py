"""A small DCN and batches for it, which several tests share."""

import torch
from torch import nn

from fastcross import DCN

CARDINALITIES, NUM_DENSE = [50, 7, 300], 4


def make_batch(rows=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, NUM_DENSE, generator=generator)
    categorical = torch.stack([torch.randint(0, n, (rows,), generator=generator) for n in CARDINALITIES], 1)
    return dense, categorical


def make_dcn(**options):
    torch.manual_seed(0)
    options = {"cross_layers": 3, "deep_layers": (16, 8), **options}
    model = DCN(CARDINALITIES, NUM_DENSE, 5, **options)
    for parameter in model.parameters():  # biases start at 0 and would hide a mistake
        nn.init.normal_(parameter, std=0.3)
    return model
