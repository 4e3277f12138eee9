"""fastcross: the Deep & Cross Network (Wang et al., 2017), in one pass over its input at any depth."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastcross._version import __version__

if TYPE_CHECKING:
    from fastcross import reference
    from fastcross.data.columns import DataWarning as DataWarning
    from fastcross.estimators.dcn import DCNClassifier as DCNClassifier
    from fastcross.estimators.dcn import DCNRegressor as DCNRegressor
    from fastcross.interop.export import export
    from fastcross.interop.swap import cross_state_dict, swap
    from fastcross.layers.cross import (
        CrossFCN,
        CrossGated,
        CrossLayer,
        CrossLowRank,
        CrossMatrix,
        CrossMixture,
        CrossNetwork,
    )
    from fastcross.models.dcn import DCN, DCNConfig
    from fastcross.models.fold import fold
    from fastcross.ops.cross_layer import cross_layer
    from fastcross.ops.cross_network import cross_logits, cross_network
    from fastcross.ops.multiplicative import cross_fcn, cross_gated, cross_low_rank, cross_matrix, cross_mixture
    from fastcross.serving.ranker import Ranker

__all__ = [
    "DCN",
    "CrossFCN",
    "CrossGated",
    "CrossLayer",
    "CrossLowRank",
    "CrossMatrix",
    "CrossMixture",
    "CrossNetwork",
    "DCNConfig",
    "Ranker",
    "__version__",
    "cross_fcn",
    "cross_gated",
    "cross_layer",
    "cross_logits",
    "cross_low_rank",
    "cross_matrix",
    "cross_mixture",
    "cross_network",
    "cross_state_dict",
    "export",
    "fold",
    "reference",
    "swap",
]

# Imported at first use: importing PyTorch takes two seconds, and `fastcross --help` does not need it. The estimators
# are not in __all__, so that `from fastcross import *` works without scikit-learn.
_HOMES = {
    "DCN": "fastcross.models.dcn",
    "DCNConfig": "fastcross.models.dcn",
    "DCNClassifier": "fastcross.estimators.dcn",
    "DCNRegressor": "fastcross.estimators.dcn",
    **dict.fromkeys(
        ("CrossFCN", "CrossGated", "CrossLayer", "CrossLowRank", "CrossMatrix", "CrossMixture", "CrossNetwork"),
        "fastcross.layers.cross",
    ),
    **dict.fromkeys(
        (
            "cross_fcn",
            "cross_gated",
            "cross_layer",
            "cross_logits",
            "cross_low_rank",
            "cross_matrix",
            "cross_mixture",
            "cross_network",
        ),
        "fastcross.ops",
    ),
    "DataWarning": "fastcross.data.columns",
    "cross_state_dict": "fastcross.interop.swap",
    "export": "fastcross.interop.export",
    "fold": "fastcross.models.fold",
    "swap": "fastcross.interop.swap",
    "Ranker": "fastcross.serving.ranker",
}


def __getattr__(name: str) -> Any:
    if name == "reference":
        return import_module("fastcross.reference")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOMES})
