"""Crosses for models that have to be given some: those that a DCN finds by itself.

The paper's logistic regression had 42 crosses from a selection tool that it does not describe, and Wide & Deep was left
out for want of one. Here a DCN without a deep network is trained on the same data, so that all it learns of two fields
together is in its cross network, and its pairs are measured over the training part (fastcross.explain).
"""

from dataclasses import replace
from itertools import combinations, islice
from pathlib import Path

import torch

from fastcross.data.cache import Cache
from fastcross.explain.decomposition import pairs_of
from fastcross.explain.explanation import CrossStrength, explain
from fastcross.models.dcn import DCN
from fastcross.training.experiment import Experiment, Opened
from fastcross.training.run_folder import load_model
from fastcross.training.step import Show

ROWS_PER_BATCH, BATCHES = 1024, 1000  # about a million rows, drawn at random, tell a strength to a thousandth


def cross_finder(experiment: Experiment) -> Experiment:
    """The same experiment for a DCN's cross network alone."""
    options = {name: value for name, value in experiment.options.items() if name != "structure"}
    if options.get("cross_layers") == 0:
        raise ValueError("a DCN finds crosses with cross layers; got cross_layers = 0")
    return replace(experiment, options={**options, "deep_layers": []})


def find_crosses(finder: Experiment, folder: Path | str, opened: Opened, top: int, show: Show) -> list[CrossStrength]:
    """The strongest pairs of categorical fields, strongest first, by a run of ``finder`` in ``folder``."""
    names = opened[0].schema.categorical_names
    if len(names) < 2:
        raise ValueError(f"a cross needs two categorical columns; {opened[0].path} has {len(names)}")
    finder.run(folder, show=show, go_on=True, opened=opened)
    model = load_model(folder, "cpu").model
    assert isinstance(model, DCN)
    strengths, deviation, fields = _strengths(model, opened[0])
    rank = {(fields[f], fields[g]): float(strengths[f, g]) for f, g in pairs_of(len(fields)).tolist()}
    ordered = sorted(combinations(names, 2), key=lambda pair: -rank[pair])[:top]
    return [CrossStrength(pair, rank[pair], (rank[pair] / max(deviation, 1e-12)) ** 2) for pair in ordered]


def _strengths(model: DCN, cache: Cache) -> tuple[torch.Tensor, float, list[str]]:
    """(k, k) over the training part, the logits' deviation, and the fields; several classes are taken together."""
    found = [
        explain(
            model,
            lambda: islice(cache.batches("train", ROWS_PER_BATCH, shuffle=True), BATCHES),
            names=cache.schema.names,
            output=output,
        )
        for output in range(model.config.num_outputs)
    ]
    together = torch.stack([explanation.pairs for explanation in found]).square().sum(0).sqrt()
    return together, sum(explanation.deviation**2 for explanation in found) ** 0.5, found[0].names
