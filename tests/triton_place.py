"""Where the Triton kernels are tested: in Triton's interpreter if it is set, else on a GPU."""

import os

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET", "") not in ("", "0")
MARKS = [] if INTERPRETING else [pytest.mark.gpu]
