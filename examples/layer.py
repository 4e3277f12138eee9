"""A layer: the cross network in a model of your own, and a file that serves it without fastcross."""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import fastcross


class ClickModel(nn.Module):
    def __init__(self, cardinalities: list[int], embedding_dim: int = 16) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(cardinality, embedding_dim) for cardinality in cardinalities)
        d = embedding_dim * len(cardinalities)
        self.cross = fastcross.CrossNetwork(d, num_layers=3)
        self.deep = nn.Sequential(nn.Linear(d, 64), nn.ReLU())
        self.logits = nn.Linear(d + 64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x0 = torch.cat([table(ids[:, i]) for i, table in enumerate(self.embeddings)], dim=1)
        return self.logits(torch.cat((self.cross(x0), self.deep(x0)), dim=1)).squeeze(1)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--export", type=Path, help="write the trained model to this file, .onnx or .pt2")
arguments = parser.parse_args()

torch.manual_seed(0)
ids = torch.randint(0, 100, (4096, 6))
label = (ids[:, 0] % 2 == ids[:, 1] % 2).float()  # a cross of two features

model = ClickModel([100] * 6)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(5):
    for rows in torch.randperm(len(ids)).split(256):
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids[rows]), label[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")

if arguments.export:
    path = fastcross.export(model, arguments.export, ids[:2], to=arguments.export.suffix[1:])
    print(f"wrote {path}, {path.stat().st_size} bytes")
