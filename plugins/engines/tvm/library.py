"""Imports TVM without PyTorch, which TVM imports wherever it is installed, only to be there before it."""

from __future__ import annotations

import sys
from typing import Any


def load_tvm() -> Any:
    """Return the module `tvm` with its virtual machine. Raises ImportError."""
    missing = "torch" not in sys.modules
    if missing:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tvm
        import tvm.runtime.vm
    finally:
        if missing:
            del sys.modules["torch"]
    return tvm
