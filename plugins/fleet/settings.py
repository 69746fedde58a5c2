"""Settings that the controller and autoscaling add."""

from __future__ import annotations

from pydantic import BaseModel, Field


class FleetSettings(BaseModel):
    """Settings of the controller and of autoscaling."""

    controller: bool = Field(
        True,
        description="Whether `millstream up` runs a controller, which keeps `instances_min`, adds second instances and "
        "unloads idle models.",
    )
    scale_latency_ms: float = Field(
        200, gt=0, le=600_000, description="Time in which autoscaling has rows answered: wait and run."
    )
    scale_down_s: float = Field(
        120, ge=1, le=3600, description="Seconds for which autoscaling keeps workers after they were last needed."
    )
