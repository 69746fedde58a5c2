"""What workers publish about themselves: short-lived records, renewed with every heartbeat. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator


class State(StrEnum):
    """Progress of a version on its way to serving; a version's state is the best of its instances' states.

    RECEIVING: its upload is in progress. PENDING: it waits for its check or, published, for a worker to load it.
    """

    RECEIVING = "receiving"
    PENDING = "pending"
    CHECKING = "checking"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    UNLOADED = "unloaded"


class InstanceRecord(BaseModel):
    """A variant loaded, or on its way, in one worker.

    `profile`: rows of a run -> seconds, corrected as it runs. `rows_max`: the largest run this instance takes;
    `rows_efficient`: more in one run gain next to nothing, or was not tried yet.
    """

    model_config = ConfigDict(frozen=True)

    content_id: str
    model: str
    version: int
    state: State
    reason: str | None = None
    profile: dict[int, float] = {}
    rows_max: int = 1
    rows_efficient: int = 1
    size_bytes: int = 0


class WorkerRecord(BaseModel):
    """A worker process. `host`: equal for processes that can share memory segments. `batch_formats`: that it reads.

    `heartbeat`: of the last one, by the clock of whoever reads it: the board fills it in.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    pool: str
    device: str
    backend: str
    pid: int
    host: str
    started: float
    heartbeat: float = 0.0
    batch_formats: tuple[int, ...] = ()
    instances: tuple[InstanceRecord, ...] = ()

    @field_validator("instances", mode="before")
    @classmethod
    def _leave_out_unreadable(cls, instances: object) -> object:
        """An instance in a state that this release does not know is left out: the others serve."""
        return readable_instances(instances) if isinstance(instances, list) else instances


_STATES = frozenset(State)


def readable_instances(instances: list[Any]) -> list[Any]:
    """Those of a record's instances whose states this release knows. Wrong types are left for the validation to refuse."""
    return [one for one in instances if not isinstance(one, dict) or one.get("state") in _STATES]
