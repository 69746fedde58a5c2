"""schemas: JSON bodies of SageMaker's calls, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict


class Ping(TypedDict):
    """Whether requests would be answered."""

    status: Literal["Healthy", "Unhealthy"]


SCHEMAS = (Ping,)
