"""Strengths over a data set, one example's logit, the values behind a cross, the page; what was planted is found."""

import csv
import re

import numpy as np
import pyarrow as pa
import pytest
import torch

from fastcross import DCN, polynomial, reference
from fastcross.batch import Bag, Batch
from fastcross.data import prepare
from fastcross.data.generate import FIELDS_U, FIELDS_V, write_click_log
from fastcross.explain.decomposition import CrossLogit, pairs_of, set_effects
from fastcross.explain.explanation import Driver, dense_edges, drivers, explain, explain_example
from fastcross.explain.importance import permutation_importances
from fastcross.explain.page import driver_text, write_page
from fastcross.training.config import TrainingConfig
from fastcross.training.loop import Trainer

NAMES = ["colour", "size", "tags", "price"]


def make_model(deep=(4,), outputs=1):
    torch.manual_seed(0)
    model = DCN([4, 3], 1, 3, bag_cardinalities=[5], cross_layers=2, deep_layers=deep, num_outputs=outputs)
    with torch.no_grad():
        model.cross.bias.normal_(std=0.3)
        model.cross.weight.mul_(2)
    return model.double()


def make_batches(rows=700, size=100):
    generator = torch.Generator().manual_seed(1)

    def batches():
        generator.manual_seed(1)
        for _ in range(0, rows, size):
            ids = torch.stack([torch.randint(0, n, (size,), generator=generator) for n in (4, 3)], 1)
            counts = torch.randint(0, 3, (size,), generator=generator)
            values = torch.randint(0, 5, (int(counts.sum()),), generator=generator)
            dense = torch.randn(size, 1, generator=generator, dtype=torch.float64)
            yield Batch(dense, ids, (Bag(values, counts.cumsum(0) - counts),))

    return batches


def test_strengths_are_the_standard_deviations_of_the_effects():
    model, batches = make_model(), make_batches()
    found = explain(model, batches, names=NAMES)
    logit = CrossLogit(model)
    t = torch.cat([logit.projections(batch) for batch in batches()])
    effects = set_effects(logit, t, t.mean(0), pairs_of(4))
    for i, (f, g) in enumerate(pairs_of(4).tolist()):
        expected = float(effects[:, i].std(correction=0))
        assert float(found.pairs[f, g]) == pytest.approx(expected, rel=1e-9)
        assert float(found.pairs[g, f]) == float(found.pairs[f, g])
    assert found.rows == 700
    strongest = found.strongest(3)
    assert [cross.strength for cross in strongest] == sorted(found.pairs.triu().flatten().tolist(), reverse=True)[:3]
    assert sum(found.degrees) + found.unexplained == pytest.approx(1, abs=1e-9)
    logits = torch.cat([model.eval()(b.dense, b.categorical, b.bags) for b in batches()])
    assert found.deviation == pytest.approx(float(logits.detach().std(correction=0)), rel=1e-9)


def test_a_strong_main_effect_is_no_cross():
    """A field that is large and always the same multiplies another's main effect: at the baseline 0 that is a cross."""
    model, batches = make_model(deep=()), make_batches()
    with torch.no_grad():
        model.cross.weight.zero_()
        model.cross.weight[0, model.embedding.columns()[1]] = 1
        model.embedding.tables[1].fill_(5)
    found, logit = explain(model, batches), CrossLogit(model)
    t = torch.cat([logit.projections(batch) for batch in batches()])
    at_zero = set_effects(logit, t, torch.zeros_like(t[0]), torch.tensor([[0, 1]])).std()
    assert float(at_zero) > 0.5
    assert float(found.pairs.max()) < 1e-9
    assert float(found.main[0]) > 0.5


@pytest.mark.parametrize("outputs", [1, 3])
def test_an_examples_parts_add_up_to_its_logit(outputs):
    model, batches = make_model(outputs=outputs), make_batches(size=1, rows=3)
    model.eval()
    for output in range(outputs):
        explanation = explain(model, make_batches(), names=NAMES, output=output)
        for batch in batches():
            parts = explain_example(model, batch, explanation, output=output)
            logit = model(batch.dense, batch.categorical, batch.bags).reshape(1, -1)[0, output]
            assert sum(part.effect for part in parts) == pytest.approx(float(logit), abs=1e-6)
            assert parts[0].fields == ()
            assert [len(part.fields) for part in parts[1:-2]] == [1] * 4 + [2] * 6 + [3] * 4
            assert parts[-1].fields == ("deep",)


def test_drivers_are_the_values_with_the_most_variance():
    model, batches = make_model(deep=()), make_batches()
    explanation, logit = explain(model, batches, names=NAMES), CrossLogit(model)
    edges = dense_edges(batches())
    assert edges.shape == (1, 9)
    (found,) = drivers(logit, batches(), explanation, [(0, 1)], edges, lambda field, key: f"{field}:{key}", top=12)
    assert len(found) == 12  # 4 colours x 3 sizes
    assert sum(driver.share for driver in found) == pytest.approx(1)
    # A cross of two single-valued fields is a function of their ids alone: its variance is that of its drivers.
    mean = sum(driver.effect * driver.share for driver in found)
    variance = sum(driver.effect**2 * driver.share for driver in found) - mean**2
    assert variance == pytest.approx(float(explanation.pairs[0, 1]) ** 2, rel=1e-9)
    assert driver_text(("C14", "hour"), Driver(("3f2a", "18"), 0.3141, 0.004)) == (
        "C14 = 3f2a × hour = 18: +0.314, 0.4 % of rows"
    )
    pairs = [(0, 2), (2, 3), (0, 3)]
    told = drivers(logit, batches(), explanation, pairs, edges, lambda field, key: str(key), top=10_000)
    assert [sum(driver.share for driver in some) for some in told] == pytest.approx([1, 1, 1])
    assert {driver.values[1] for driver in told[0]} > {"()", "(0,)", "(3, 4)"}  # a bag's ids
    # One pass for all pairs finds what a pass for each does.
    for pair, some in zip(pairs, told, strict=True):
        alone = drivers(logit, batches(), explanation, [pair], edges, lambda field, key: str(key), top=10_000)
        assert alone == [some]


def test_the_page_is_one_file_with_its_figures_and_tables(tmp_path):
    model, batches = make_model(), make_batches()
    explanation = explain(model, batches, names=["<colour>", *NAMES[1:]])
    example = explain_example(model.eval(), next(iter(make_batches(size=1)())), explanation)
    told = {explanation.strongest(1)[0].fields: [Driver(("<a>", "b"), 0.5, 0.25)]}
    page = write_page(
        tmp_path / "page",
        explanation,
        title="A & B",
        drivers=told,
        importances={"size": 1.0},
        example=example,
        values={"size": "1"},
    )
    text = page.read_text()
    assert len(re.findall(r'src="data:image/png;base64,', text)) == 4
    assert not re.search(r'(src|href)="(?!data:)', text)  # it needs nothing else
    assert "<colour>" not in text
    assert "&lt;a&gt;" in text
    assert {path.name for path in page.parent.iterdir()} == {
        *("index.html", "pairs.csv", "example.csv", "fields.csv", "importances.csv"),
        *("fields.png", "pairs.png", "degrees.png", "example.png"),
    }
    with open(page.parent / "pairs.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert float(rows[0]["strength"]) == explanation.strongest(1)[0].strength
    with open(page.parent / "example.csv") as file:
        total = sum(float(row["effect"]) for row in csv.DictReader(file))
    assert total == pytest.approx(sum(part.effect for part in example))


def test_a_regression_is_explained_in_the_labels_unit():
    model, batches = make_model(), make_batches()
    plain, (row,) = explain(model, batches, names=NAMES), make_batches(rows=1, size=1)()
    config = model.config.to_dict() | {"regression": True, "label_mean": 50.0, "label_deviation": 20.0}
    priced = DCN.from_config(config).double().eval()
    priced.load_state_dict(model.state_dict())
    found = explain(priced, batches, names=NAMES)
    assert (plain.of, found.of) == ("logit", "prediction")
    torch.testing.assert_close(found.main, 20 * plain.main)
    torch.testing.assert_close(found.pairs, 20 * plain.pairs)
    predictions = torch.cat([priced(b.dense, b.categorical, b.bags) for b in batches()]).detach()
    assert found.deviation == pytest.approx(float(predictions.std(correction=0)), rel=1e-6)
    parts = explain_example(priced, row, found)
    assert sum(part.effect for part in parts) == pytest.approx(
        priced(row.dense, row.categorical, row.bags).item(), rel=1e-6
    )
    told = [
        drivers(CrossLogit(each), batches(), each_found, [(0, 1)], dense_edges(batches()), lambda f, key: str(key))
        for each, each_found in ((model, plain), (priced, found))
    ]
    assert told[1][0][0].effect == pytest.approx(20 * told[0][0][0].effect)


def test_shares_are_never_negative_and_lines_of_nothing_are_left_out(tmp_path):
    """A deep network that takes back what the cross network says: each covaries negatively with one of the parts."""
    model, batches = make_model(), make_batches()
    with torch.no_grad():
        model.logits.weight[:, model.cross.in_features :].mul_(-50)
        model.logits.weight[:, : model.cross.in_features].mul_(1e-6)
    found = explain(model, batches, names=NAMES)
    assert min(*found.degrees, found.unexplained) >= 0
    assert found.unexplained == pytest.approx(1)
    assert [text.get_text() for text in found.plot_degrees().axes[0].get_yticklabels()] == [
        "deep network\n(unexplained)"
    ]
    text = write_page(tmp_path / "page", found, title="t", drivers={}).read_text()
    assert "None has as much as 0.1 % of the logit's variance." in text
    assert not re.search(r"<td[^>]*>-?0\.0%", text)


def test_columns_matter_as_far_as_the_output_moves(tmp_path):
    columns = {"label": "y", "dense": ["x", "noise"], "levels": ["x"], "categorical": ["city"]}
    rng = np.random.default_rng(0)
    x = [None if i % 7 == 0 else i % 5 for i in range(400)]
    cities = [f"c{i}" for i in rng.integers(0, 4, 400)]
    table = pa.table({"y": np.arange(400) % 2, "x": x, "noise": rng.normal(size=400), "city": cities})
    cache = prepare([table], tmp_path / "cache", columns=columns, min_frequency=1, split="time:1,0,0")
    assert cache.schema.names == ["city", "x.level", "x", "noise", "x.missing"]
    batch = next(cache.batches("train", 400))

    def shares(predict):
        return permutation_importances(predict, [batch, batch], cache.encoder)

    assert shares(lambda rows: rows.dense[:, 1]) == {"x": 0, "noise": 1, "city": 0}
    for of_x in (lambda rows: rows.dense[:, 0], lambda rows: rows.dense[:, 2], lambda rows: rows.categorical[:, 1]):
        assert shares(of_x) == {"x": 1, "noise": 0, "city": 0}
    assert shares(lambda rows: rows.dense[:, 0] * 0) == {"x": 0, "noise": 0, "city": 0}
    # What moves together moves together: the flag and the category of a row stay those of one value.
    assert shares(lambda rows: (rows.dense[:, 2] > 0) != (rows.categorical[:, 1] == missing_id(cache)))["x"] == 0


def missing_id(cache):
    return cache.encoder.categorical[1].values.to_pylist().index(None) + 1


@pytest.mark.parametrize("seed", range(2))
def test_the_strongest_pairs_are_the_planted_ones(seed, tmp_path):
    """The logit has u v with u, v sums over four fields each: sixteen pairs of 741."""
    log = tmp_path / "clicks.txt"
    write_click_log(log, 100_000, seed, degree_2=2.0, degree_3=0.5, largest_vocabulary=20)
    cache = prepare(log, tmp_path / "cache")
    names = [*cache.schema.categorical_names, *cache.schema.dense_names]
    torch.manual_seed(seed)
    model = DCN(cache.schema.cardinalities, len(cache.schema.dense_names), 8, cross_layers=2, deep_layers=())
    Trainer(model, cache, TrainingConfig(epochs=4, lr=0.02, schedule="cosine", patience=0)).fit()
    found = explain(
        model,
        lambda: cache.batches("validation", 1024),
        training=lambda: cache.batches("train", 1024),
        names=names,
    )
    planted = {(names[u], names[v]) for u in FIELDS_U for v in FIELDS_V}
    assert {cross.fields for cross in found.strongest(len(planted))} == planted


def test_a_planted_coefficient_is_recovered_within_its_standard_error():
    """Clicks drawn from z = b + (1 + w·x)(v·x); the standard error is that of maximum likelihood (delta method)."""
    torch.manual_seed(0)
    w, v, rows = torch.tensor([1.2, 0.0, -0.5]).double(), torch.tensor([0.2, 0.8, 0.0]).double(), 40_000
    x = torch.randn(rows, 3).double()
    label = (torch.rand(rows).double() < torch.sigmoid(-0.3 + (1 + x @ w) * (x @ v))).double()
    weight, head, bias = (torch.full(shape, 0.1).double().requires_grad_() for shape in ((1, 3), (1, 3), (1,)))
    optimizer = torch.optim.LBFGS([weight, head, bias], max_iter=500, line_search_fn="strong_wolfe")

    def logits(weight, head, bias):
        return reference.cross_logits(x, weight, None, head)[:, 0] + bias

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits(weight, head, bias), label)
        loss.backward()
        return loss

    optimizer.step(closure)

    def cross(weight, head, bias):
        return weight[0, 0] * head[0, 1] + weight[0, 1] * head[0, 0]

    values = tuple(p.detach() for p in (weight, head, bias))
    jacobian = torch.cat([j.flatten(1) for j in torch.func.jacfwd(logits, argnums=(0, 1, 2))(*values)], dim=1)
    probability = torch.sigmoid(logits(*values))
    information = jacobian.T @ (jacobian * (probability * (1 - probability))[:, None])
    slope = torch.cat([g.flatten() for g in torch.func.grad(cross, argnums=(0, 1, 2))(*values)])
    error = float((slope @ torch.linalg.solve(information, slope)).sqrt())
    found = polynomial.coefficient(weight, None, head[0], {0: 1, 1: 1})
    planted = float(w[0] * v[1] + w[1] * v[0])
    assert 0 < error < 0.03
    assert abs(found - planted) < 2 * error, (found, planted, error)
