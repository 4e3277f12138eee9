"""fastcross.fold: the same logits from L + C numbers per id, over every kind of feature, exported too."""

import pytest
import torch
from torch import nn

import fastcross
from fastcross import DCN
from fastcross.batch import Bag
from fastcross.interop.export import export

SINGLE, BAGS, NUM_DENSE = (50, 1, 300), (9, 20), 4
RELATIVE = {torch.float32: 1e-6, torch.float64: 1e-12}
MODELS = {
    "cross only": {"deep_layers": ()},
    "one layer": {"deep_layers": (), "cross_layers": 1, "logits_bias": False},
    "deep": {"deep_layers": (16, 8)},
    "three classes": {"deep_layers": (8,), "num_outputs": 3, "dropout": 0.5},
    "forty layers, twenty classes": {"deep_layers": (), "cross_layers": 40, "num_outputs": 20},
    "quantity": {"deep_layers": (), "regression": True, "label_mean": 50.0, "label_deviation": 3.0},
}


def make(options=None, dtype=torch.float32, single=SINGLE, dense=NUM_DENSE, bags=BAGS, pooling="mean"):
    torch.manual_seed(0)
    options = {"cross_layers": 3, **(options or {}), "bag_cardinalities": bags, "bag_pooling": pooling}
    model = DCN(single, dense, 5, **options)
    for parameter in model.parameters():  # biases start at 0 and would hide a mistake
        nn.init.normal_(parameter, std=0.2)
    return model.to(dtype).eval()


def batch(rows=33, dtype=torch.float32, single=SINGLE, dense=NUM_DENSE, bags=BAGS, weighted=True):
    generator = torch.Generator().manual_seed(rows)
    ids = [torch.randint(0, n, (rows,), generator=generator) for n in single]
    categorical = torch.stack(ids, 1) if ids else torch.empty((rows, 0), dtype=torch.int64)
    made = []
    for i, n in enumerate(bags):
        counts = torch.randint(0, 4, (rows,), generator=generator)
        values = torch.randint(0, n, (int(counts.sum()),), generator=generator)
        weights = torch.rand(len(values), generator=generator).to(dtype) + 0.1 if weighted and i == 0 else None
        made.append(Bag(values, counts.cumsum(0) - counts, weights))
    return torch.randn(rows, dense, generator=generator).to(dtype), categorical, tuple(made)


def exactly(model, given):
    dense, categorical, bags = given
    exact = DCN.from_config(model.config).double().eval()
    exact.load_state_dict(model.state_dict())
    return exact(
        dense.double(), categorical, [b.map(lambda t: t.double() if t.is_floating_point() else t) for b in bags]
    )


def assert_close(found, exact, dtype):
    assert found.shape == exact.shape
    if exact.numel():
        assert float((found - exact).abs().max()) <= RELATIVE[dtype] * float(exact.abs().max())


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_exact(name, dtype, pooling, backend):
    model = make({**MODELS[name], "backend": backend}, dtype, pooling=pooling)
    folded = fastcross.fold(model)
    for rows in (0, 1, 33, 512):
        given = batch(rows, dtype)
        assert_close(folded(*given), exactly(model, given), dtype)


@pytest.mark.parametrize("features", [{"single": ()}, {"dense": 0}, {"bags": ()}, {"single": (), "bags": ()}], ids=str)
def test_kinds_of_features_alone(features):
    model, given = make(**features), batch(**features)
    assert_close(fastcross.fold(model)(*given), model(*given), torch.float32)


def test_it_is_a_snapshot_without_embeddings():
    model = make(MODELS["cross only"])
    folded, given = fastcross.fold(model), batch()
    before = folded(*given)
    assert sum(t.numel() for t in folded.state_dict().values()) < sum(p.numel() for p in model.parameters())
    assert max(t.shape[-1] for t in folded.state_dict().values() if t.dim() == 2) == 4  # L + 1
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(folded(*given), before)
    assert not any(parameter.requires_grad for parameter in folded.parameters())
    assert not folded.training
    deep = make(MODELS["deep"])
    assert torch.equal(fastcross.fold(deep.train())(*given), fastcross.fold(deep.eval())(*given))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_an_id_that_is_none(backend):
    """Not the next feature's first id: feature 1 has one id, and the table goes on behind it."""
    folded = fastcross.fold(make({"deep_layers": (), "backend": backend}))
    for wrong in (-1, 1, 2**40):
        dense, categorical, bags = batch(20)
        categorical[17, 1] = wrong
        with pytest.raises(ValueError, match=f"feature 1 has 1 ids, 0 to 0; got id {wrong} in row 17"):
            folded(dense, categorical, bags)


def test_bad_batches():
    folded, (dense, categorical, bags) = fastcross.fold(make({"deep_layers": ()})), batch()
    with pytest.raises(ValueError, match=r"dense must be \(B, 4\); got \(33, 3\)"):
        folded(dense[:, 1:], categorical, bags)
    with pytest.raises(ValueError, match=r"categorical must be \(B, 3\); got \(33, 2\)"):
        folded(dense, categorical[:, 1:], bags)
    with pytest.raises(ValueError, match="there must be 2 bags; got 1"):
        folded(dense, categorical, bags[1:])
    folded = fastcross.fold(make({"deep_layers": ()}, bags=()))
    with pytest.raises(ValueError, match=r"base must be \(5, 4\) or \(1, 4\).*; got \(33, 4\)"):
        folded(dense, categorical[:5])


@pytest.mark.parametrize(
    ("options", "what"),
    [({"structure": "stacked"}, "structure stacked"), ({"cross_type": "matrix"}, "cross_type matrix")],
)
def test_what_cannot_be_folded(options, what):
    with pytest.raises(ValueError, match=f'a fold needs a parallel DCN with cross_type="vector"; got .*{what}'):
        fastcross.fold(make({"deep_layers": (8,), **options}))
    with pytest.raises(ValueError, match=r"got a DCN.*cross_layers 0"):
        fastcross.fold(make({"deep_layers": (8,), "cross_layers": 0}))
    with pytest.raises(ValueError, match="got Linear"):
        fastcross.fold(nn.Linear(1, 1))


@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_exported(to, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime") if to == "onnx" else None
    model = make({"deep_layers": (8,)}, bags=BAGS[:1])
    given = batch(7, bags=BAGS[:1])

    def inputs(dense, categorical, bags):
        return dense, categorical, tuple((bag.values, bag.offsets, bag.weights) for bag in bags)

    path = export(fastcross.fold(model), tmp_path / f"folded.{to}", inputs(*given), to)
    if onnxruntime:
        session = onnxruntime.InferenceSession(path)
        names = [entry.name for entry in session.get_inputs()]

        def run(dense, categorical, bags):
            tensors = [dense, categorical, *(t for bag in bags for t in (bag.values, bag.offsets, bag.weights))]
            return torch.as_tensor(session.run(None, {n: t.numpy() for n, t in zip(names, tensors, strict=True)})[0])
    else:
        package = torch._inductor.aoti_load_package(str(path))

        def run(dense, categorical, bags):
            return package(*inputs(dense, categorical, bags))

    for rows in (1, 7, 40):
        given = batch(rows, bags=BAGS[:1])
        assert_close(run(*given), exactly(model, given), torch.float32)
    dense, categorical, bags = batch(5, bags=BAGS[:1])
    categorical[2, 1] = 1
    if onnxruntime:  # a compiled file does not check ids, folded or not
        with pytest.raises(Exception, match=r"indices element out of data bounds|out of bounds"):
            run(dense, categorical, bags)
