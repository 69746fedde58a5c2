"""schemas_logs: documents of the admin API about logs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Level = Literal["debug", "info", "warning", "error"]


class LogLevels(BaseModel):
    """The least level of the records that processes log, by kind; null: the default, info."""

    gateway: Level | None = Field(None, description="Of the gateways of the installation.")
    worker: Level | None = Field(None, description="Of the workers of the installation.")
    controller: Level | None = Field(None, description="Of the controllers of the installation.")
