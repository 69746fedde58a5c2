"""schemas_logs: documents of the admin API about logs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Level = Literal["debug", "info", "warning", "error"]


class LogLevels(BaseModel):
    """The least level of the records that processes log, by kind; null: the default, info."""

    gateway: Level | None = Field(None, description="Of the gateways of this machine.")
    worker: Level | None = Field(None, description="Of the workers of this machine.")
    controller: Level | None = Field(None, description="Of the controller of this machine.")
