"""Whole models: a training step, and a request. DCN beside its own DNN, DeepCTR-Torch's DCN and torchfm's.

All start from one set of weights, ours, and see the same batches. A step is everything from a batch in memory to
updated parameters: zero_grad, forward, loss, backward, Adam. The expected results are those of our model with the
paper's equations layer by layer and PyTorch's own embedding lookups.
"""

import functools
import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcross
from benchmarks import clock
from benchmarks.contestants import COMPILED, EAGER, OURS, SWAPPED, compiled, import_peer, swap_or_refuse
from benchmarks.harness import Contestant, Expected
from fastcross import DCN, optim

DNN, DEEPCTR, TORCHFM, EXPORTED = "DNN alone", "DeepCTR-Torch", "torchfm", f"{OURS}, exported"
# Two float32 computations of one gradient, with batch normalisation between, differ in the last of six digits.
RELATIVE_TOLERANCE = 1e-4

Batch = tuple[Tensor, Tensor, Tensor]  # dense, categorical, label


@dataclass(frozen=True)
class Shape:
    """Features and layers of a model."""

    rows: int
    cardinality: int
    dims: tuple[int, ...]  # of each categorical feature's embedding
    num_dense: int
    cross_layers: int
    deep_layers: tuple[int, ...]
    ids: int | None = None  # that occur in the batch; None: all of them

    def __str__(self) -> str:
        width = sum(self.dims) + self.num_dense
        return (
            f"B = {self.rows}, {len(self.dims)} features of {self.cardinality:,} ids, d = {width}, "
            f"L = {self.cross_layers}, deep {' × '.join(map(str, self.deep_layers))}"
        )

    def model(self, **options: Any) -> DCN:
        torch.manual_seed(0)
        sizes = {"cross_layers": self.cross_layers, "deep_layers": self.deep_layers} | options
        model = DCN([self.cardinality] * len(self.dims), self.num_dense, self.dims, **sizes)
        with torch.no_grad():  # a bias of zero would hide where it is added
            if self.cross_layers and model.config.cross_layers:
                model.cross.bias.normal_(std=0.1)
        return model.to(clock.device())

    @functools.cached_property
    def batches(self) -> list[Batch]:
        """Steps cycle through them, so that the rows of one are not still in a cache at its next turn."""
        return [self._batch(torch.Generator().manual_seed(seed)) for seed in range(8)]

    def _batch(self, generator: torch.Generator) -> Batch:
        """Ids as in click logs: a few frequent ones and a long tail."""
        uniform = torch.rand(self.rows, len(self.dims), generator=generator, dtype=torch.float64)
        ids = self.ids or self.cardinality
        categorical = (ids**uniform).long().clamp(max=ids) - 1
        dense = torch.randn(self.rows, self.num_dense, generator=generator)
        label = torch.randint(0, 2, (self.rows,), generator=generator).float()
        return tuple(t.to(clock.device()) for t in (dense, categorical, label))  # type: ignore[return-value]


# The paper's: 26 features and 13 integers, d = 1026.
PAPER_DIMS = (39,) * 25 + (38,)


# What -> names of our parameters, names of theirs: flattened and joined, the same numbers.
Places = Mapping[str, tuple[list[str], list[str]]]


@dataclass(frozen=True)
class TheirModel:
    """Another package's DCN with our weights in it."""

    module: nn.Module
    prepare: Callable[[Batch], Tensor]  # a batch as it wants it, outside of what is timed


def deepctr(shape: Shape) -> TheirModel:
    """DeepCTR-Torch's, without the linear part it adds to the paper's model and without its penalty on whole tables."""
    sparse, number = import_peer("deepctr_torch.inputs.SparseFeat"), import_peer("deepctr_torch.inputs.DenseFeat")
    columns = [sparse(f"C{i}", shape.cardinality, dim) for i, dim in enumerate(shape.dims)]
    columns += [number(f"I{i}") for i in range(shape.num_dense)]
    penalties = dict.fromkeys(("l2_reg_linear", "l2_reg_embedding", "l2_reg_cross", "l2_reg_dnn"), 0)
    build = import_peer("deepctr_torch.models.DCN")
    sizes = {"cross_num": shape.cross_layers, "dnn_hidden_units": shape.deep_layers, "device": str(clock.device())}
    module = build([], columns, **sizes, **penalties, dnn_use_bn=True)
    return TheirModel(module, lambda batch: torch.cat((batch[1].float(), batch[0]), dim=1))


def deepctr_places(shape: Shape) -> Places:
    places = {
        f"table {i}": ([f"embedding.tables.{i}"], [f"embedding_dict.C{i}.weight"]) for i in range(len(shape.dims))
    }
    for i in range(len(shape.deep_layers)):
        places[f"deep {i}"] = ([f"deep.{3 * i}.weight"], [f"dnn.linears.{i}.weight"])
        places[f"norm {i}"] = _weight_and_bias(f"deep.{3 * i + 1}"), _weight_and_bias(f"dnn.bn.{i}")
    places["cross weight"] = (["cross.weight"], ["crossnet.kernels"])
    places["cross bias"] = (["cross.bias"], ["crossnet.bias"])
    places["logits"] = (_weight_and_bias("logits"), ["dnn_linear.weight", "out.bias"])
    return places


def torchfm(shape: Shape) -> TheirModel:
    """torchfm's: categorical features of one width only."""
    build = import_peer("torchfm.model.dcn.DeepCrossNetworkModel")
    fields, (dim,) = [shape.cardinality] * len(shape.dims), set(shape.dims)
    module = build(fields, dim, shape.cross_layers, shape.deep_layers, dropout=0.0).to(clock.device())
    return TheirModel(module, lambda batch: batch[1])


def torchfm_places(shape: Shape) -> Places:
    tables = [f"embedding.tables.{i}" for i in range(len(shape.dims))]
    places = {"tables": (tables, ["embedding.embedding.weight"])}
    for i in range(len(shape.deep_layers)):
        places[f"deep {i}"] = ([f"deep.{3 * i}.weight"], [f"mlp.mlp.{4 * i}.weight"])
        places[f"norm {i}"] = _weight_and_bias(f"deep.{3 * i + 1}"), _weight_and_bias(f"mlp.mlp.{4 * i + 1}")
    layers = range(shape.cross_layers)
    places["cross weight"] = (["cross.weight"], [f"cn.w.{layer}.weight" for layer in layers])
    places["cross bias"] = (["cross.bias"], [f"cn.b.{layer}" for layer in layers])
    places["logits"] = (_weight_and_bias("logits"), _weight_and_bias("linear"))
    return places


THEIR_MODELS = {DEEPCTR: (deepctr, deepctr_places), TORCHFM: (torchfm, torchfm_places)}


def their_model(name: str, shape: Shape) -> TheirModel:
    """Built, loaded with the weights that our model of this shape has, and swapped if the name says so."""
    build, find_places = THEIR_MODELS[name.removesuffix(SWAPPED)]
    theirs, ours, places = build(shape), shape.model(), find_places(shape)
    with torch.no_grad():
        # Batch normalisation's shift is the only bias of our deep layers.
        for parameter_name, parameter in theirs.module.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.zero_()
        for our_names, their_names in places.values():
            values = torch.cat([ours.get_parameter(place).flatten() for place in our_names])
            parameters = [theirs.module.get_parameter(place) for place in their_names]
            for parameter, part in zip(parameters, values.split([p.numel() for p in parameters]), strict=True):
                parameter.copy_(part.view_as(parameter))
    if name.endswith(SWAPPED):
        swap_or_refuse(name, theirs.module)
    return theirs


def _weight_and_bias(of: str) -> list[str]:
    return [f"{of}.weight", f"{of}.bias"]


@dataclass(frozen=True)
class TrainingStep:
    """A step of Adam: ours updates the embedding rows of the batch, theirs whole tables, as each does by default."""

    shape: Shape
    rival: str | None = None  # whose parameters are compared
    latency: bool = False

    def __str__(self) -> str:
        return f"training step, {self.shape}"

    def describe(self) -> dict[str, Any]:
        return {"title": str(self), **asdict(self.shape)}

    def expected(self) -> dict[str, Expected]:
        model = self.shape.model(backend="reference")
        return expectations(self._ours(model, self._places(model)))

    def enter(self, name: str) -> Contestant:
        if name.removesuffix(SWAPPED) in THEIR_MODELS:
            theirs = their_model(name, self.shape)
            return Contestant(self._their_step(theirs), functools.partial(self._theirs, name, theirs))
        model = self.shape.model(**({"cross_layers": 0} if name == DNN else {}))
        if name == EAGER:
            model.cross.backend = "reference"
        results = functools.partial(self._ours, model, self._places(model))
        if name != DNN:
            return Contestant(self._our_step(model), results)
        alone = self.shape.model(cross_layers=0, backend="reference")
        return Contestant(self._our_step(model), results, expectations(self._ours(alone, self._places(alone))))

    def _places(self, model: DCN) -> Places:
        """The parameters whose gradients are compared: all of them, together where the rival's lie together."""
        if self.rival is not None:
            return THEIR_MODELS[self.rival][1](self.shape)
        return {name: ([name], []) for name, _ in model.named_parameters()}

    def _our_step(self, model: DCN) -> Callable[[], object]:
        optimizer = optim.configure(model, lr=1e-3)
        batches = itertools.cycle(self.shape.batches)

        def step() -> None:
            dense, categorical, label = next(batches)
            optimizer.zero_grad()
            model.loss(model(dense, categorical), label).backward()
            optimizer.step()

        return step

    def _their_step(self, theirs: TheirModel) -> Callable[[], object]:
        optimizer = torch.optim.Adam(theirs.module.parameters(), lr=1e-3)
        batches = itertools.cycle([(theirs.prepare(batch), batch[2]) for batch in self.shape.batches])

        def step() -> None:
            x, label = next(batches)
            optimizer.zero_grad()
            F.binary_cross_entropy(theirs.module(x).flatten(), label).backward()
            optimizer.step()

        return step

    def _ours(self, model: DCN, places: Places) -> dict[str, Tensor]:
        """The probabilities of the batch and the gradients of the loss."""
        dense, categorical, label = self.shape.batches[0]
        logits = model(dense, categorical)
        model.loss(logits, label).backward()
        gradients = {what: _gradient(model, names) for what, (names, _) in places.items()}
        model.zero_grad()
        return {"probability": torch.sigmoid(logits.detach()), **gradients}

    def _theirs(self, name: str, theirs: TheirModel) -> dict[str, Tensor]:
        places = THEIR_MODELS[name.removesuffix(SWAPPED)][1](self.shape)
        theirs.module.train()
        batch = self.shape.batches[0]
        probability = theirs.module(theirs.prepare(batch)).flatten()
        F.binary_cross_entropy(probability, batch[2]).backward()
        gradients = {what: _gradient(theirs.module, names) for what, (_, names) in places.items()}
        theirs.module.zero_grad()
        return {"probability": probability.detach(), **gradients}


@dataclass(frozen=True)
class Heights:
    """One step on tables of several heights in turns, the same ids in all: ``fastcross, 1000000 ids``."""

    shape: Shape
    latency: bool = False

    def __str__(self) -> str:
        return f"training step against the height of the tables, {self.shape}"

    def describe(self) -> dict[str, Any]:
        return {"title": str(self), **asdict(self.shape)}

    def expected(self) -> dict[str, Expected]:
        return {}

    def enter(self, name: str) -> Contestant:
        height = int(name.removeprefix(f"{OURS}, ").removesuffix(" ids"))
        step = TrainingStep(replace(self.shape, cardinality=height, ids=self.shape.cardinality))
        return replace(step.enter(OURS), expected=step.expected())


@dataclass(frozen=True)
class Request:
    """Probabilities for a few rows: what a caller waits."""

    shape: Shape
    latency: bool = True

    def __str__(self) -> str:
        return f"request, {self.shape}"

    def describe(self) -> dict[str, Any]:
        return {"title": str(self), **asdict(self.shape)}

    def expected(self) -> dict[str, Expected]:
        return expectations({"probability": self._ask(self.shape.model(backend="reference").eval())()})

    def enter(self, name: str) -> Contestant:
        if name.removesuffix(SWAPPED) in THEIR_MODELS:
            theirs = their_model(name, self.shape)
            theirs.module.eval()
            x = theirs.prepare(self.shape.batches[0])
            step = torch.no_grad()(lambda: theirs.module(x).flatten())
        else:
            model = self.shape.model().eval()
            if name in (EAGER, COMPILED):
                model.cross.backend = "reference"
            step = self._ask(self._exported(model) if name == EXPORTED else model)
            if name == COMPILED:
                step = self._ask(compiled(model))
        return Contestant(step, lambda: {"probability": step()})

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
