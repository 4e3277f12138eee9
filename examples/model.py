"""A whole DCN in a training loop of your own: embeddings, cross network, deep network, loss."""

import torch

from fastcross import DCN, optim

CARDINALITIES = [1000, 20, 500]  # how many ids each categorical feature has
torch.manual_seed(0)

# A batch: dense (B, num_dense), float, and categorical (B, len(CARDINALITIES)), integer.
dense = torch.randn(20_000, 4)
categorical = torch.stack([torch.randint(0, n, (20_000,)) for n in CARDINALITIES], dim=1)
clicked = ((categorical[:, 1] < 10) ^ (dense[:, 0] > 0)).float()  # neither feature alone says anything
train, test = slice(0, 16_000), slice(16_000, None)

model = DCN(CARDINALITIES, num_dense=4, embedding_dim=8, cross_layers=2, deep_layers=(64, 32))
optimizer = optim.configure(model, lr=0.003)  # updates only the embedding rows of the batch

for epoch in range(5):
    model.train()
    for rows in torch.randperm(16_000).split(256):
        loss = model.loss(model(dense[train][rows], categorical[train][rows]), clicked[train][rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        logits = model(dense[test], categorical[test])
    accuracy = ((logits > 0) == clicked[test].bool()).float().mean()
    print(f"epoch {epoch}: test loss {model.loss(logits, clicked[test]):.4f}, accuracy {accuracy:.3f}")
