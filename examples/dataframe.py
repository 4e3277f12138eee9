"""A DataFrame: fit, predict, save, and export an ONNX file that takes raw values."""

import numpy as np
import pandas as pd

from fastcross import DCNClassifier, DCNRegressor

rng = np.random.default_rng(0)
table = pd.DataFrame(
    {
        "age": rng.normal(40, 12, size=5000).round(),
        "city": rng.choice(["Rome", "Oslo"], size=5000),
        "tags": rng.choice(["new", "new|sale", "sale|gift", ""], size=5000),
    }
)
table["clicked"] = (table.age > 40) ^ (table.city == "Rome")  # neither column alone says anything
train, test = table[:4000], table[4000:]

model = DCNClassifier(cross_layers=2, deep_layers=[32], lr=0.01, random_state=0, verbose=True)
model.fit(train, "clicked")  # prints how it reads each column, and why
print(f"accuracy {model.score(test, 'clicked'):.3f}")
print(model.predict_proba(test[:3]).round(3))

model.save("clicks")  # a run folder; `fastcross evaluate`, `predict` and `explain` read it
same = DCNClassifier.load("clicks")
print(f"loaded: accuracy {same.score(test, 'clicked'):.3f}")
print(model.export("clicks.onnx").path)  # served by onnxruntime alone: see serve_onnx.py

price = table.age * np.where(table.city == "Oslo", 3.0, 1.0)
regression = DCNRegressor(cross_layers=2, deep_layers=[32], lr=0.01, random_state=0)
regression.fit(train[["age", "city"]], price[:4000])
print(f"R² {regression.score(test[['age', 'city']], price[4000:]):.3f}")
