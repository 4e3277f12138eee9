"""From a click log or a table to batches: reader -> cache -> batch (dense, categorical, bags, label)."""

from typing import TYPE_CHECKING, Any

from fastcross.batch import Bag, Batch, Schema
from fastcross.data.cache import Cache
from fastcross.data.errors import DataError
from fastcross.extras import needs

if TYPE_CHECKING:
    from fastcross.data.build import prepare
    from fastcross.data.columns import Columns
    from fastcross.data.encoder import Encoder
    from fastcross.data.predict import read_for_prediction

__all__ = ["Bag", "Batch", "Cache", "Columns", "DataError", "Encoder", "Schema", "prepare", "read_for_prediction"]

# These need pyarrow, which training from a finished cache does not.
_READERS = {
    "prepare": "fastcross.data.build",
    "Columns": "fastcross.data.columns",
    "Encoder": "fastcross.data.encoder",
    "read_for_prediction": "fastcross.data.predict",
}


def __getattr__(name: str) -> Any:
    if name not in _READERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_READERS[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise ImportError(needs("reading data", "pyarrow")) from None
