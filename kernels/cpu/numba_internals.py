"""The one place that knows what Numba does not document; where another version lacks it, nothing but time is lost.

``tests/kernels/test_numba_internals.py`` notices.
"""

import re
from typing import Any

# What LLVM may leave to the C library; anything else would have to be found when the code is loaded.
_IN_C_LIBRARY = ("memcpy", "memmove", "memset")


def object_code(native: Any) -> bytes | None:
    """The object code of a ``numba.cfunc``, if it can be had and needs nothing of Numba's when it is loaded again."""
    try:
        declared = set(re.findall(r'^declare [^@\n]*@"?([^"(\s]+)"?\(', native.inspect_llvm(), re.MULTILINE))
        code = native._library._get_compiled_object()
    except (AttributeError, RuntimeError, ValueError):
        return None
    known = all(name.startswith("llvm.") or name in _IN_C_LIBRARY for name in declared)
    return bytes(code) if known else None
