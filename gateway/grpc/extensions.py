"""What a tensor of a gRPC request may ask for besides itself: shared memory for it, classes instead of it.

The only place where these are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.errors import Code, Failure


def check_input(parameters: Mapping[str, Any], where: str) -> None:
    """Raises Failure(UNSUPPORTED) for an input in shared memory."""
    if "shared_memory_region" in parameters:
        raise Failure(Code.UNSUPPORTED, f"client shared memory is not enabled on this server{where}")


def check_output(parameters: Mapping[str, Any], where: str) -> None:
    """Raises Failure(UNSUPPORTED) for an output that is to go to shared memory, or is wanted as classes."""
    if "shared_memory_region" in parameters:
        raise Failure(Code.UNSUPPORTED, f"client shared memory is not enabled on this server{where}")
    if "classification" in parameters:
        raise Failure(Code.UNSUPPORTED, f"classification is not supported{where}: ask for the tensor itself")
