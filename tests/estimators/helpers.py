"""What the tests of estimators share."""

import numpy as np
import pandas as pd

SMALL = {
    "preset": "paper",
    "cross_layers": 1,
    "deep_layers": [8],
    "embedding_dim": 2,
    "epochs": 2,
    "batch_size": 64,
    "min_frequency": 2,
    "threads": 1,
    "random_state": 0,
}


def clicks(rows=400, seed=0):
    """A table with a number, a category with gaps, several values per row, and a label that follows them."""
    generator = np.random.default_rng(seed)
    age, city = generator.normal(size=rows), generator.choice(["Bonn", "Rome", "Oslo"], rows)
    tags = ["|".join(generator.choice(["a", "b", "c"], 2)) for _ in range(rows)]
    logit = 2 * age + np.where(city == "Rome", 2.0, -1.0)
    label = generator.random(rows) < 1 / (1 + np.exp(-logit))
    table = pd.DataFrame({"age": age, "city": city, "tags": tags, "clicked": label.astype(int)})
    table.loc[::17, "city"] = None
    table.loc[::23, "age"] = np.nan
    return table
