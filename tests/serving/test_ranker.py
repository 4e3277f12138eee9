"""fastcross.Ranker: the scores of full rows, over every kind of feature and model; items that come, change and go."""

import copy

import pytest
import torch
from torch import nn

from fastcross import DCN, Ranker
from fastcross.batch import Bag, Batch

SINGLE, BAGS, NUM_DENSE = (50, 7, 300), (9, 20), 4  # features 0 to 2, 3 and 4, 5 to 8
FEATURES = {
    "mixed": [1, 2, 4, 6, 7],
    "single": [0, 2],
    "bags": [3, 4],
    "dense": [5, 8],
    "all but one": [0, 1, 2, 3, 4, 5, 6, 7],
    "all": list(range(9)),
}
MODELS = {
    "cross only": {"deep_layers": ()},
    "parallel": {"deep_layers": (16, 8)},
    "parallel without normalisation": {"deep_layers": (16,), "batch_norm": False, "dropout": 0.5, "logits_bias": False},
    "stacked": {"deep_layers": (16, 8), "structure": "stacked"},
    "deep only": {"deep_layers": (16, 8), "cross_layers": 0},
    "three classes": {"deep_layers": (16,), "num_outputs": 3},
    "stacked, three classes": {"deep_layers": (16,), "num_outputs": 3, "structure": "stacked"},
    "quantity": {"deep_layers": (16,), "regression": True, "label_mean": 50.0, "label_deviation": 3.0},
    "sums": {"deep_layers": (16,), "bag_pooling": "sum"},
}


def make(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = DCN(SINGLE, NUM_DENSE, 5, bag_cardinalities=BAGS, **{"cross_layers": 3, **options})
    for parameter in model.parameters():  # biases start at 0 and would hide a mistake
        nn.init.normal_(parameter, std=0.2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.to(dtype).eval()


def batch(rows, features=range(9), seed=0, dtype=torch.float32):
    """Rows of some of the features, and functions that cut and join them."""
    generator = torch.Generator().manual_seed(seed)
    single = [torch.randint(0, SINGLE[f], (rows,), generator=generator) for f in features if f < 3]
    bags = []
    for f in features:
        if 3 <= f < 5:
            counts = torch.randint(0, 4, (rows,), generator=generator)
            values = torch.randint(0, BAGS[f - 3], (int(counts.sum()),), generator=generator)
            weights = torch.rand(len(values), generator=generator).to(dtype) + 0.1 if f == 4 else None
            bags.append(Bag(values, counts.cumsum(0) - counts, weights))
    categorical = torch.stack(single, 1) if single else torch.empty((rows, 0), dtype=torch.int64)
    dense = torch.randn(rows, sum(f > 4 for f in features), generator=generator).to(dtype)
    return Batch(dense, categorical, tuple(bags))


def full_rows(items, context, features):
    """The items' features and the context's, side by side in the order of the model's."""
    rows, others = len(items), [f for f in range(9) if f not in features]
    single, dense, bags = {}, {}, {}
    for part, of in ((items, features), (context, others)):
        for i, f in enumerate(f for f in of if f < 3):
            single[f] = part.categorical[:, i].expand(rows)
        for i, f in enumerate(f for f in of if f > 4):
            dense[f] = part.dense[:, i].expand(rows)
        for i, f in enumerate(f for f in of if 3 <= f < 5):
            bag = part.bags[i]
            if len(part) != rows:
                n, weights = len(bag.values), None if bag.weights is None else bag.weights.repeat(rows)
                bag = Bag(bag.values.repeat(rows), torch.arange(rows) * n, weights)
            bags[f] = bag
    return (
        torch.stack([dense[f] for f in range(5, 9)], 1),
        torch.stack([single[f] for f in range(3)], 1),
        [bags[3], bags[4]],
    )


def expected(model, items, context, features):
    exact = copy.deepcopy(model).double().eval()
    dense, categorical, bags = full_rows(items, context, features)
    wide = [bag.map(lambda t: t.double() if t.is_floating_point() else t) for bag in bags]
    with torch.no_grad():
        return exact(dense.double(), categorical, wide)


def assert_close(found, exact, relative=1e-5):
    assert found.shape == exact.shape
    assert float((found - exact).abs().max()) <= relative * float(exact.abs().max())


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_full_rows(name, features):
    model, items = make(**MODELS[name]), batch(37, features)
    context = batch(1, [f for f in range(9) if f not in features], seed=1)
    ranker = Ranker(model, items, features=features)
    exact = expected(model, items, context, features)
    assert ranker.split
    assert_close(ranker.score(context), exact)
    some = [5, 36, 0, 5]
    assert_close(ranker.score(context, some), exact[some])
    assert ranker.score(context, []).shape == exact[:0].shape
    output = exact.shape[1] - 1 if exact.dim() == 2 else 0
    column = exact[:, output] if exact.dim() == 2 else exact
    best = ranker.top(context, 37, output=output)
    assert sorted(key for key, _ in best) == list(range(37))
    assert_close(torch.tensor([score for _, score in best]), column[torch.tensor([key for key, _ in best])])
    assert [score for _, score in best] == sorted((score for _, score in best), reverse=True)
    assert ranker.top(context, 1, items=[3, 4], output=output)[0][0] == [3, 4][int(column[3:5].argmax())]


def test_float64_and_many_items():
    features = FEATURES["mixed"]
    model, items, context = make(torch.float64, deep_layers=(16, 8)), batch(3000, features), batch(1, [0, 3, 5, 8], 1)
    assert_close(
        Ranker(model, items, features=features).score(context), expected(model, items, context, features), 1e-12
    )


@pytest.mark.parametrize("cross_type", ["matrix", "low_rank", "mixture", "gated", "fcn"])
@pytest.mark.parametrize("structure", ["parallel", "stacked"])
def test_what_does_not_split_scores_full_rows_and_says_so(cross_type, structure):
    features = FEATURES["mixed"]
    model, items = make(cross_type=cross_type, structure=structure, deep_layers=(8,)), batch(37, features)
    context = batch(1, [0, 3, 5, 8], seed=1)
    with pytest.warns(UserWarning, match=f"full rows are scored, .*structure {structure}, cross_type {cross_type}"):
        ranker = Ranker(model, items, features=features)
    assert "full rows" in repr(ranker)
    assert_close(ranker.score(context), expected(model, items, context, features))
    assert_close(ranker.score(context, [9, 2]), expected(model, items, context, features)[[9, 2]])


@pytest.mark.parametrize("name", ["cross only", "stacked"])
def test_items_come_change_and_go(name, tmp_path):
    """The same as a ranker that is made of the items that are left, and the same after a file."""
    features, model = FEATURES["mixed"], make(**MODELS[name])
    context = batch(1, [0, 3, 5, 8], seed=9)
    ranker = Ranker(model, batch(20, features), key=[f"i{i}" for i in range(20)], features=features)
    whole = Ranker(model, batch(60, features, seed=3), key=list(range(60)), features=features)
    scores = dict(zip(ranker.keys, ranker.score(context).tolist(), strict=True))
    for i in range(60):  # one at a time: the store grows
        ranker.add(batch(60, features, seed=3).row(i), [i])
    scores |= dict(zip(whole.keys, whole.score(context).tolist(), strict=True))
    ranker.remove(["i19", "i0", 59, 30])
    ranker.update(batch(60, features, seed=3).row(7), ["i4"])
    scores["i4"] = scores[7]
    for key in ("i19", "i0", 59, 30):
        del scores[key]
        assert key not in ranker
    assert len(ranker) == 76
    for each in (ranker, reloaded(ranker, model, tmp_path)):
        found = dict(zip(each.keys, each.score(context).tolist(), strict=True))
        assert found.keys() == scores.keys()
        assert all(abs(found[key] - scores[key]) < 1e-5 for key in scores)
        each.add(batch(1, features), ["new"])
        assert each.score(context, ["new"]).shape == (1,)
    ranker.remove(list(ranker.keys))
    assert ranker.score(context).shape == (0,)
    with pytest.raises(ValueError, match="k must be from 1 to the number of items, 0; got 1"):
        ranker.top(context, 1)


def reloaded(ranker, model, folder):
    ranker.save(folder / "items.safetensors")
    return Ranker.load(folder / "items.safetensors", model)


def test_damaged_and_foreign_files(tmp_path):
    features, model = [0, 5], make(deep_layers=())
    path = tmp_path / "items.safetensors"
    Ranker(model, batch(20, features), features=features).save(path)
    other = make(deep_layers=())
    with torch.no_grad():
        other.cross.weight[0, 0] += 1
    with pytest.raises(ValueError, match=r"items.safetensors is of another model: \w{12}; this one is \w{12}"):
        Ranker.load(path, other)
    loaded, context = Ranker.load(path, model), batch(1, [f for f in range(9) if f not in features])
    scores, content = loaded.score(context), path.read_bytes()
    with open(path, "r+b") as file:  # in place, and not as a new file
        file.write(bytes(len(content)))
    assert torch.equal(loaded.score(context), scores)
    path.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    with pytest.raises(ValueError, match=r"items.safetensors is damaged: its checksum is"):
        Ranker.load(path, model)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Ranker.load(tmp_path / "none", model)


def test_bad_input():
    features, model = FEATURES["mixed"], make(deep_layers=(4,))
    items, context = batch(20, features), batch(1, [0, 3, 5, 8], 1)
    ranker = Ranker(model, items, features=features)
    for k in (0, -1, 21):
        with pytest.raises(ValueError, match=f"k must be from 1 to the number of items, 20; got {k}"):
            ranker.top(context, k)
    for key in (20, "0", -1, [0]):
        with pytest.raises(KeyError, match=r"no item .* among 20"):
            ranker.score(context, [1, key])
    with pytest.raises(KeyError, match="no item 99 among 20"):
        ranker.remove([1, 99])
    assert len(ranker) == 20  # none of them is gone
    with pytest.raises(KeyError, match="no item 99 among 20"):
        ranker.update(batch(1, features), [99])
    with pytest.raises(ValueError, match="the item 3 is there already"):
        ranker.add(batch(1, features), [3])
    with pytest.raises(ValueError, match="row 2 of the items: the name 'x' is there twice"):
        ranker.add(batch(2, features), ["x", "x"])
    with pytest.raises(ValueError, match="each item needs a name; got 2 items and 1 names"):
        ranker.add(batch(2, features), ["x"])
    with pytest.raises(ValueError, match="a context is one row; got 2"):
        ranker.score(batch(2, [0, 3, 5, 8]))
    with pytest.raises(
        ValueError, match="there must be 1 single-valued features, 1 bags and 2 dense ones; got 3, 2 and 4"
    ):
        ranker.score(batch(1))
    with pytest.raises(ValueError, match="dense features must be finite"):
        ranker.score(Batch(context.dense * torch.nan, context.categorical, context.bags))
    with pytest.raises(ValueError, match=r"feature 0 has .* got id 99"):
        ranker.score(Batch(context.dense, context.categorical + 99 - int(context.categorical), context.bags))
    with pytest.raises(ValueError, match="output must be one of 1, from 0; got 1"):
        ranker.top(context, 1, output=1)
    with pytest.raises(TypeError, match="the context of encoded items must be a Batch; got dict"):
        ranker.score({})
    with pytest.raises(ValueError, match=r"features must be some of the model's 9, from 0; got \[9\]"):
        Ranker(model, items, features=[9])
    with pytest.raises(TypeError, match="items must be a table for a trained run, or a Batch with features= for a DCN"):
        Ranker(model, items)
    with pytest.raises(ValueError, match="a ranker needs a DCN; got Linear"):
        Ranker(nn.Linear(1, 1), items, features=[0])
    with torch.no_grad():
        model.logits.weight.mul_(2)
    with pytest.raises(RuntimeError, match="the model has changed since its items were tabulated"):
        ranker.score(context)
