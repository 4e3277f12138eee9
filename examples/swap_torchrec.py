"""TorchRec: a model with an EmbeddingBagCollection and a VectorCrossNet; swap it, then compile."""

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.crossnet import VectorCrossNet

import fastcross

FEATURES, CARDINALITY, DIM, ROWS = ["user", "item", "shop"], 1000, 16, 512


class ClickModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=CARDINALITY, embedding_dim=DIM)
            for name in FEATURES
        ]
        self.embeddings = EmbeddingBagCollection(tables=tables)
        self.cross = VectorCrossNet(DIM * len(FEATURES), num_layers=3)
        self.logits = nn.Linear(DIM * len(FEATURES), 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.logits(self.cross(self.embeddings(features).values())).squeeze(1)


torch.manual_seed(0)
lengths = torch.randint(0, 4, (ROWS * len(FEATURES),))
values = torch.randint(0, CARDINALITY, (int(lengths.sum()),))
features = KeyedJaggedTensor(keys=FEATURES, values=values, lengths=lengths)
label = torch.randint(0, 2, (ROWS,)).float()

model = ClickModel()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train(steps: int) -> None:
    for _ in range(steps):
        loss = nn.functional.binary_cross_entropy_with_logits(model(features), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}")


train(10)
with torch.no_grad():
    before = model(features)
    print(fastcross.swap(model))
    print(f"largest change of a logit: {(model(features) - before).abs().max():.1e}")
train(10)

model.cross.compile(fullgraph=True)
train(10)
