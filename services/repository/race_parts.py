"""race_parts: what is read of the reports and events in the documents of races. A document without it is damaged."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StoredRow(BaseModel):
    """What is read of a row of a report; the rest is passed on."""

    model_config = ConfigDict(extra="allow")

    target: str
    candidate: str
    verdict: str
    why: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    cosine_min: float | None = None
    compile_s: float = 0.0
    size_bytes: int = 0


class StoredReport(BaseModel):
    """What is read of a report; the rest is passed on."""

    model_config = ConfigDict(extra="allow")

    baseline: str | None = None
    winner: str | None = None
    ratio: float = 1.0
    why: str = ""
    table: dict[int, str] = {}
    rows: list[StoredRow] = []
    notes: list[str] = []


class StoredProgress(BaseModel):
    """What is read of an event; the rest is passed on."""

    model_config = ConfigDict(extra="allow")

    stage: str = ""
    candidate: str = ""
    done: int = 0
    total: int = 0
    seconds: float = 0.0
    ratios: dict[str, float] = {}
