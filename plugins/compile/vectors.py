"""How alike two outputs are. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np


def cosine(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Return the cosine of two vectors; 1.0 if both are zero, 0.0 if one is, or has numbers that are not finite."""
    norms = float(np.linalg.norm(one)), float(np.linalg.norm(other))
    if one.shape != other.shape or not all(map(np.isfinite, norms)):
        return 0.0
    if not all(norms):
        return float(not any(norms))
    return float(one @ other / (norms[0] * norms[1]))
