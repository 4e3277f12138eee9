"""The base of all models: the configuration, the embedding of the features, the loss."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcross.fields import check_types
from fastcross.layers.embedding import EmbeddingStack
from fastcross.models import MODELS
from fastcross.ops import backends

Options = ParamSpec("Options")
AModel = TypeVar("AModel")
AConfig = TypeVar("AConfig")


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of every model: features, outputs, regularisation. Sequences become tuples.

    ``to_dict`` returns JSON's types, and ``Model.from_config`` accepts them.
    """

    cardinalities: Sequence[int]  # ids of each single-valued categorical feature
    num_dense: int  # dense features, normalised (section 4.2: a log transform)
    embedding_dim: int | Sequence[int] | None = None  # n_e; None is the paper's 6 · cardinality^(1/4)
    bag_cardinalities: Sequence[int] = field(default=(), kw_only=True)  # ids of each multi-valued feature
    bag_pooling: str = field(default="mean", kw_only=True)  # or "sum"
    embedding_std: float | None = field(default=None, kw_only=True)  # of the initial tables; None is n_e^(-1/2)
    num_outputs: int = field(default=1, kw_only=True)  # 1: click or not, or a quantity; C > 1: a class among C
    regression: bool = field(default=False, kw_only=True)  # the output is a quantity, learned by its squared error
    label_mean: float = field(default=0.0, kw_only=True)  # mean and standard deviation of a regression's label: the
    label_deviation: float = field(default=1.0, kw_only=True)  # last layer predicts the standardised label
    l2: float = field(default=0.0, kw_only=True)  # λ
    sparse_gradients: bool = field(default=False, kw_only=True)  # of the embedding tables
    backend: str = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        check_types(self)
        if self.num_outputs < 1:
            raise ValueError(f"num_outputs must be at least 1; got {self.num_outputs}")
        if self.regression and self.num_outputs != 1:
            raise ValueError(f"regression has one output; got num_outputs = {self.num_outputs}")
        if not (math.isfinite(self.label_mean) and 0 < self.label_deviation < math.inf):
            raise ValueError(
                "need a finite label_mean and a positive, finite label_deviation; "
                f"got {self.label_mean} and {self.label_deviation}"
            )
        if self.embedding_std is not None and not 0 < self.embedding_std < math.inf:
            raise ValueError(f"embedding_std must be positive and finite; got {self.embedding_std}")
        if not 0 <= self.l2 < math.inf:
            raise ValueError(f"l2 must be at least 0; got {self.l2}")
        backends.check(self.backend)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def takes_fields_of(
    config: Callable[Options, AConfig],
) -> Callable[[Callable[[AModel, AConfig], None]], Callable[Concatenate[AModel, Options], None]]:
    """Turns ``__init__(self, config)`` into one with the fields of a configuration as parameters.

    So an option is declared once, in the configuration, and editors and type checkers see it in the model.
    """

    def decorate(init: Callable[[AModel, AConfig], None]) -> Callable[Concatenate[AModel, Options], None]:
        def __init__(self: AModel, /, *args: Options.args, **kwargs: Options.kwargs) -> None:
            init(self, config(*args, **kwargs))

        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        options = inspect.signature(config).parameters.values()
        __init__.__signature__ = inspect.Signature([first, *options])  # type: ignore[attr-defined]
        __init__.__qualname__ = init.__qualname__
        return __init__

    return decorate


class Model(nn.Module):
    """Construction from a configuration, and the loss."""

    Config: ClassVar[type[ModelConfig]]
    config: Any  # of the type Config

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def from_config(cls, config: ModelConfig | dict[str, Any]) -> Self:
        return cls(**(config if isinstance(config, dict) else asdict(config)))

    def weights(self) -> Iterator[Tensor]:
        """The w_l of the regularisation term: every weight that multiplies features or hidden units.

        Biases, batch normalisation and embeddings are not included: the paper's sum runs over the layers' w, and a term
        over whole tables would make the cost of a step grow with their number of rows.
        """
        raise NotImplementedError

    def regularization(self) -> Tensor:
        """λ Σ_l ‖w_l‖², without a factor ½: its gradient is 2 λ w."""
        if not self.config.l2:
            return torch.zeros((), device=next(self.parameters()).device)
        return self.config.l2 * torch.stack([weight.square().sum() for weight in self.weights()]).sum()

    def loss(self, logits: Tensor, label: Tensor, weight: Tensor | None = None) -> Tensor:
        """Section 2.4: the mean log loss over the batch, and λ Σ_l ‖w_l‖².

        For regression: the mean of ((y - ŷ) / standard deviation of the label)². With weights (B,): the mean of w_i
        times the loss of row i. Divide the weights by their mean first to keep the loss's scale.
        """
        for name, value in (("label", label), ("weight", weight)):
            if value is not None and value.shape != logits.shape[:1]:
                raise ValueError(f"{name} must be ({logits.shape[0]},), as logits; got {tuple(value.shape)}")
        reduction = "mean" if weight is None else "none"
        if self.config.regression:
            target = ((label - self.config.label_mean) / self.config.label_deviation).to(logits.dtype)
            loss = F.mse_loss(self.unscaled(logits), target, reduction=reduction)
        elif self.config.num_outputs == 1:
            loss = F.binary_cross_entropy_with_logits(logits, label.to(logits.dtype), reduction=reduction)
        else:
            loss = F.cross_entropy(logits, label.long(), reduction=reduction)
        if weight is not None:
            loss = (loss * weight.to(loss.dtype)).mean()
        return loss + self.regularization() if self.config.l2 else loss

    def unscaled(self, outputs: Tensor) -> Tensor:
        """The last layer's output: for regression, the standardised label."""
        return (outputs - self.config.label_mean) / self.config.label_deviation if self.config.regression else outputs

    def _squeeze(self, z: Tensor) -> Tensor:
        """(B, C) -> (B,) for one output; a regression's in the label's unit."""
        z = z.squeeze(1) if self.config.num_outputs == 1 else z
        if not self.config.regression:
            return z
        z = z.to(torch.promote_types(z.dtype, torch.float32))  # autocast's bfloat16 would round the sum
        return z * self.config.label_deviation + self.config.label_mean


def model_class(name: str) -> type[Model]:
    """The class of a name among MODELS."""
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    module, _, kind = MODELS[name].partition(".")
    return getattr(import_module(f"fastcross.models.{module}"), kind)


def embedding_layer(config: ModelConfig) -> EmbeddingStack:
    """The embedding and stacking layer (section 2.1) of a configuration."""
    stack = EmbeddingStack(
        config.cardinalities,
        config.num_dense,
        config.embedding_dim,
        bag_cardinalities=config.bag_cardinalities,
        bag_pooling=config.bag_pooling,
        sparse_gradients=config.sparse_gradients,
        backend=config.backend,
    )
    if config.embedding_std is not None:
        scale_tables(stack.tables, config.embedding_std)
    return stack


@torch.no_grad()
def scale_tables(tables: Iterable[Tensor], std: float) -> None:
    """From N(0, 1/n_e) to N(0, std²), without another draw: seeds keep their meaning."""
    for table in tables:
        table *= std * table.shape[1] ** 0.5
