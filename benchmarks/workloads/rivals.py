"""The whole models of other packages, with our weights in them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.contestants import DEEPCTR, TORCHFM, Contestant
from benchmarks.harness import clock
from benchmarks.workloads.calls import import_peer, swap_or_refuse
from benchmarks.workloads.models import Batch, Shape

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


@dataclass(frozen=True)
class Rival:
    """A package that has a whole DCN: how it is built, and where its parameters lie."""

    build: Callable[[Shape], TheirModel]
    places: Callable[[Shape], Places]


RIVALS = {DEEPCTR.peer: Rival(deepctr, deepctr_places), TORCHFM.peer: Rival(torchfm, torchfm_places)}


def their_model(contestant: Contestant, shape: Shape) -> TheirModel:
    """Built, loaded with the weights that our model of this shape has, swapped, its tables' gradients sparse or not."""
    rival = RIVALS[contestant.peer]
    theirs, ours = rival.build(shape), shape.model()
    with torch.no_grad():
        # Batch normalisation's shift is the only bias of our deep layers.
        for name, parameter in theirs.module.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
        for our_names, their_names in rival.places(shape).values():
            values = torch.cat([ours.get_parameter(place).flatten() for place in our_names])
            parameters = [theirs.module.get_parameter(place) for place in their_names]
            for parameter, part in zip(parameters, values.split([p.numel() for p in parameters]), strict=True):
                parameter.copy_(part.view_as(parameter))
    if contestant.swapped:
        swap_or_refuse(contestant.name, theirs.module)
    for embedding in embeddings(theirs.module):
        embedding.sparse = contestant.lazy_adam
    return theirs


def embeddings(module: nn.Module) -> list[nn.Embedding]:
    return [part for part in module.modules() if isinstance(part, nn.Embedding)]


def _weight_and_bias(of: str) -> list[str]:
    return [f"{of}.weight", f"{of}.bias"]
