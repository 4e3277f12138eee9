"""Where the Triton kernels are tested: in Triton's interpreter if it is set, else on a GPU."""

import os

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET", "") not in ("", "0")
MARKS = [] if INTERPRETING else [pytest.mark.gpu]

if INTERPRETING:
    from triton.runtime.interpreter import InterpretedFunction

    _call = InterpretedFunction.__call__

    def _call_helper(self, *args, **kwargs):
        # The interpreter patches triton.language anew at every call of a helper, which takes half of its time; for our
        # helpers the launch has done so already.
        return self.rewrite()(*args, **kwargs) if "fastcross" in self.fn.__module__ else _call(self, *args, **kwargs)

    InterpretedFunction.__call__ = _call_helper
