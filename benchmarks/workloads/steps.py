"""Whole models: a training step, the step against the height of the tables, and a request.

All start from one set of weights, ours, and see the same batches. A step is everything from a batch in memory to
updated parameters: zero_grad, forward, loss, backward, Adam. The expected results are those of our model with the
paper's equations layer by layer and PyTorch's own embedding lookups.
"""

import functools
import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcross
from benchmarks.contestants import Contestant
from benchmarks.harness.measure import Entry, Expected
from benchmarks.workloads.calls import compiled
from benchmarks.workloads.models import Shape
from benchmarks.workloads.rivals import RIVALS, Places, TheirModel, embeddings, their_model
from fastcross import DCN, optim

# Two float32 computations of one gradient, with batch normalisation between, differ in the last of six digits.
RELATIVE_TOLERANCE = 1e-4
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class TrainingStep:
    """A step of Adam, on the embedding rows of the batch or on whole tables, as the contestant says."""

    shape: Shape
    rival: Contestant | None = None  # whose parameters are compared
    latency: bool = False

    def __str__(self) -> str:
        return f"training step, {self.shape}"

    def describe(self) -> dict[str, Any]:
        return {"title": str(self), "kind": "training step", **self.shape.describe()}

    def expected(self) -> dict[str, Expected]:
        model = self.shape.model(backend="reference")
        return expectations(self._ours(model, self._places(model)))

    def enter(self, contestant: Contestant) -> Entry:
        if contestant.peer is not None:
            theirs = their_model(contestant, self.shape)
            step = their_step(theirs, self.shape, contestant.lazy_adam)
            return Entry(step, functools.partial(self._theirs, contestant, theirs))
        options: dict[str, Any] = {} if contestant.cross else {"cross_layers": 0}
        model = self.shape.model(**options, sparse_gradients=contestant.lazy_adam)
        if contestant.cross:
            model.cross.backend = contestant.backend  # lookups stay as they are: the loop is what is compared
        entry = Entry(our_step(model, self.shape), functools.partial(self._ours, model, self._places(model)))
        if contestant.cross:
            return entry
        alone = self.shape.model(cross_layers=0, backend="reference")
        return replace(entry, expected=expectations(self._ours(alone, self._places(alone))))

    def _places(self, model: DCN) -> Places:
        """The parameters whose gradients are compared: all of them, together where the rival's lie together."""
        if self.rival is not None:
            return RIVALS[self.rival.peer].places(self.shape)
        return {name: ([name], []) for name, _ in model.named_parameters()}

    def _ours(self, model: DCN, places: Places) -> dict[str, Tensor]:
        """The probabilities of the batch and the gradients of the loss."""
        dense, categorical, label = self.shape.batches[0]
        logits = model(dense, categorical)
        model.loss(logits, label).backward()
        gradients = {what: _gradient(model, names) for what, (names, _) in places.items()}
        model.zero_grad()
        return {"probability": torch.sigmoid(logits.detach()), **gradients}

    def _theirs(self, contestant: Contestant, theirs: TheirModel) -> dict[str, Tensor]:
        places = RIVALS[contestant.peer].places(self.shape)
        theirs.module.train()
        batch = self.shape.batches[0]
        probability = theirs.module(theirs.prepare(batch)).flatten()
        F.binary_cross_entropy(probability, batch[2]).backward()
        gradients = {what: _gradient(theirs.module, names) for what, (_, names) in places.items()}
        theirs.module.zero_grad()
        return {"probability": probability.detach(), **gradients}


def our_step(model: DCN, shape: Shape) -> Callable[[], None]:
    if model.config.sparse_gradients:
        optimizer: torch.optim.Optimizer = optim.configure(model, lr=LEARNING_RATE)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    batches = itertools.cycle(shape.batches)

    def step() -> None:
        dense, categorical, label = next(batches)
        optimizer.zero_grad()
        model.loss(model(dense, categorical), label).backward()
        optimizer.step()

    return step


def their_step(theirs: TheirModel, shape: Shape, lazy_adam: bool) -> Callable[[], None]:
    """With PyTorch's Adam on all parameters, as they come, or with the optimiser that our own step has."""
    optimizer: torch.optim.Optimizer = torch.optim.Adam(theirs.module.parameters(), lr=LEARNING_RATE)
    if lazy_adam:
        tables = {embedding.weight: None for embedding in embeddings(theirs.module)}
        layers = [parameter for parameter in theirs.module.parameters() if parameter not in tables]
        fused = torch.optim.Adam(layers, lr=LEARNING_RATE, fused=True)
        optimizer = optim.Optimizer([fused, optim.RowAdam(list(tables), lr=LEARNING_RATE)])
    batches = itertools.cycle([(theirs.prepare(batch), batch[2]) for batch in shape.batches])

    def step() -> None:
        x, label = next(batches)
        optimizer.zero_grad()
        F.binary_cross_entropy(theirs.module(x).flatten(), label).backward()
        optimizer.step()

    return step


@dataclass(frozen=True)
class Heights:
    """One step on tables of several heights in turns, the same ids in all."""

    shape: Shape
    latency: bool = False

    def __str__(self) -> str:
        return f"training step against the height of the tables, {self.shape}"

    def describe(self) -> dict[str, Any]:
        return {"title": str(self), "kind": "heights", **self.shape.describe()}

    def expected(self) -> dict[str, Expected]:
        return {}

    def enter(self, contestant: Contestant) -> Entry:
        assert contestant.cardinality is not None
        step = TrainingStep(replace(self.shape, cardinality=contestant.cardinality, ids=self.shape.cardinality))
        return replace(step.enter(contestant), expected=step.expected())


@dataclass(frozen=True)
class Request:
    """Probabilities for a few rows: what a caller waits."""

    shape: Shape
    latency: bool = True

    def __str__(self) -> str:
        return f"request, {self.shape}"

    def describe(self) -> dict[str, Any]:
        return {"title": str(self), "kind": "request", **self.shape.describe()}

    def expected(self) -> dict[str, Expected]:
        return expectations({"probability": self._ask(self.shape.model(backend="reference").eval())()})

    def enter(self, contestant: Contestant) -> Entry:
        if contestant.peer is not None:
            theirs = their_model(contestant, self.shape)
            theirs.module.eval()
            x = theirs.prepare(self.shape.batches[0])
            step = torch.no_grad()(lambda: theirs.module(x).flatten())
        else:
            model = self.shape.model().eval()
            model.cross.backend = contestant.backend
            call: Callable[[Tensor, Tensor], Tensor] = self._exported(model) if contestant.exported else model
            step = self._ask(compiled(call) if contestant.compiled else call)
        return Entry(step, lambda: {"probability": step()})

    def _exported(self, model: DCN) -> Callable[[Tensor, Tensor], Tensor]:
        """A file that runs without fastcross, loaded again."""
        with tempfile.TemporaryDirectory() as folder:
            file = fastcross.export(model, Path(folder) / "dcn.pt2", replace(self.shape, rows=2).batches[0][:2])
            return torch._inductor.aoti_load_package(str(file))

    def _ask(self, model: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
        dense, categorical, _ = self.shape.batches[0]

        @torch.no_grad()
        def ask() -> Tensor:
            return torch.sigmoid(model(dense, categorical))

        return ask


def expectations(results: Mapping[str, Tensor]) -> dict[str, Expected]:
    return {
        key: Expected(value, RELATIVE_TOLERANCE * float(value.abs().max()) + 1e-7) for key, value in results.items()
    }


def _gradient(module: nn.Module, names: list[str]) -> Tensor:
    """The gradients of the named parameters, flattened and joined."""
    gradients = [module.get_parameter(name).grad for name in names]
    return torch.cat([(g.to_dense() if g.is_sparse else g).flatten() for g in gradients if g is not None])
