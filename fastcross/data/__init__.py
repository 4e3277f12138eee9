"""From a click log or a table to batches: formats -> prepare -> cache -> batch (dense, categorical, bags, label)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastcross.extras import needs

if TYPE_CHECKING:
    from fastcross.batch import Bag, Batch, Schema
    from fastcross.data.cache import Cache
    from fastcross.data.columns import Columns, DataError
    from fastcross.data.encoder import Encoder
    from fastcross.data.prediction import read_for_prediction
    from fastcross.data.preparation import prepare

__all__ = ["Bag", "Batch", "Cache", "Columns", "DataError", "Encoder", "Schema", "prepare", "read_for_prediction"]

# Imported at their first use: the names of the formats need neither PyTorch nor pyarrow, a finished cache no pyarrow.
_HOMES = {
    "Bag": "fastcross.batch",
    "Batch": "fastcross.batch",
    "Schema": "fastcross.batch",
    "Cache": "fastcross.data.cache",
    "Columns": "fastcross.data.columns",
    "DataError": "fastcross.data.columns",
    "Encoder": "fastcross.data.encoder",
    "prepare": "fastcross.data.preparation",
    "read_for_prediction": "fastcross.data.prediction",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise ImportError(needs("reading data", "pyarrow")) from None
