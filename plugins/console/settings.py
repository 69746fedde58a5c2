"""The setting that the console adds."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ConsoleSettings(BaseModel):
    """Settings of the console."""

    console_prometheus_url: str | None = Field(
        None,
        pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$",
        description="Address of a Prometheus that scrapes this installation: the console's charts then reach back "
        "further than the hour that a gateway keeps. Gateways call it.",
    )
