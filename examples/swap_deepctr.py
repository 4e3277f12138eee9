"""DeepCTR-Torch: train its DCN, make the cross network fast with one line, go on training."""

import numpy as np
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import DCN

import fastcross

ROWS, FIELDS, CARDINALITY = 4096, 8, 100

random = np.random.default_rng(0)
data = {f"c{i}": random.integers(0, CARDINALITY, ROWS) for i in range(FIELDS)}
data["price"] = random.normal(size=ROWS).astype(np.float32)
label = ((data["c0"] % 2) == (data["c1"] % 2)).astype(np.float32)  # a cross of two features

columns = [SparseFeat(f"c{i}", CARDINALITY, embedding_dim=8) for i in range(FIELDS)] + [DenseFeat("price", 1)]
model = DCN(columns, columns, cross_num=3, dnn_hidden_units=(64, 32), init_std=0.05)
model.compile("adam", "binary_crossentropy", metrics=["auc"])
model.fit(data, label, batch_size=256, epochs=1, verbose=2)

before = model.predict(data, 1024)
print(fastcross.swap(model))  # the one line: same parameters, same state_dict, same optimiser state
print(f"largest change of a prediction: {np.abs(model.predict(data, 1024) - before).max():.1e}")

model.fit(data, label, batch_size=256, epochs=2, verbose=2)
fastcross.swap(model, undo=True)
