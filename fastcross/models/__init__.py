"""The Deep & Cross Network and the models the paper compares it with."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastcross.models.base import Model


CROSS_TYPES = ("vector", "matrix", "low_rank", "mixture", "gated", "fcn")  # of DCN


class _Registry(Mapping[str, "type[Model]"]):
    """Names at once, for the command line to offer; a class is imported, and PyTorch with it, when it is asked for."""

    def __init__(self, homes: dict[str, str]) -> None:
        self._homes = homes

    def __getitem__(self, name: str) -> "type[Model]":
        module, _, kind = self._homes[name].partition(":")
        return getattr(import_module(f"fastcross.models.{module}"), kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


# By the names of the command line and of run folders, in the order of the paper's table 1.
MODELS: Mapping[str, "type[Model]"] = _Registry(
    {
        "dcn": "dcn:DCN",
        "deep_crossing": "baselines:DeepCrossing",
        "dnn": "baselines:DNN",
        "wide_deep": "baselines:WideDeep",
        "fm": "baselines:FactorizationMachine",
        "lr": "baselines:LogisticRegression",
    }
)
