"""The one error of this package that a user's data can cause."""

from __future__ import annotations


class DataError(ValueError):
    """The input cannot be used as it is; the message names the file and, where there is one, the line."""
