"""From a click log or a table to batches: reader -> cache -> batch (dense, categorical, bags, label)."""

from fastcross.data.batch import Bag, Batch, Schema
from fastcross.data.cache import Cache
from fastcross.data.errors import DataError

__all__ = ["Bag", "Batch", "Cache", "DataError", "Schema"]
