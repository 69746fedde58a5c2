"""The records that workers publish about themselves: they expire, and are renewed with every heartbeat. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator


class State(StrEnum):
    """Progress of a version on its way to serving; a version's state is the best of its instances' states.

    RECEIVING: its upload is in progress. PENDING: it waits for its check or, published, for a worker to load it.
    STANDBY: no worker has loaded it; its first call makes a worker load it.
    """

    RECEIVING = "receiving"
    PENDING = "pending"
    CHECKING = "checking"
    STANDBY = "standby"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    UNLOADED = "unloaded"


class ErrorRecord(BaseModel):
    """An error of a version's runs. `at`: of the last one, in seconds since the epoch; `count`: that had this text."""

    model_config = ConfigDict(frozen=True)

    at: float
    text: str
    count: int = 1


class InstanceRecord(BaseModel):
    """A variant that one worker has loaded or is loading."""

    model_config = ConfigDict(frozen=True)

    content_id: str
    model: str
    version: int
    state: State
    reason: str | None = None
    profile: dict[int, float] = {}  # rows of a run -> seconds, corrected as it runs
    rows_max: int = 1  # rows of the largest run
    rows_efficient: int = 1  # more rows in one run gain almost nothing, or were not tried yet
    resident_bytes: int = 0  # 0 also before it is `measured`
    peak_bytes: int = 0  # beyond resident_bytes, while it loads, warms up or runs its largest batch
    device_resident_bytes: int = 0  # likewise of the memory of an accelerator
    device_peak_bytes: int = 0
    load_s: float = 0.0  # from the order until it was ready; 0: not yet
    loaded_at: float = 0.0  # instant at which it became ready, in seconds on the Redis clock; 0: not yet
    last_used: float = 0.0  # likewise, of its last request; 0: none
    usage: dict[str, float] = {}  # packed placement.usage.Usage
    runs: int = 0  # since it was loaded
    busy_s: float = 0.0  # that they took together
    batches: dict[int, int] = {}  # rows, a power of two -> runs of at most so many, and more than half as many
    why: str = ""  # why the worker loaded it, for people
    retry_at: float = 0.0  # of a failed load: when its worker tries again, on the Redis clock; 0: an operator decides
    variant: str = ""  # targets of the compiled forms that serve; "": the version's own file
    errors: tuple[ErrorRecord, ...] = ()  # the last ones, of this worker, the newest at the end

    @property
    def measured(self) -> bool:
        """Whether its bytes were measured. They may be 0: a small version can fit into memory that its worker had."""
        return self.load_s > 0 or self.resident_bytes > 0


class RefusalRecord(BaseModel):
    """A load that a worker was ordered to make and did not begin, or that failed."""

    model_config = ConfigDict(frozen=True)

    content_id: str
    kind: str  # a placement.views.RefusalKind; gateways treat one that they do not know as "failed"
    reason: str
    until: float  # instant from which on it is worth another try, in seconds on the Redis clock


class LoadRecord(BaseModel):
    """A load of a worker: in progress, or one that calls wait for."""

    model_config = ConfigDict(frozen=True)

    content_id: str
    began: float = 0.0  # in seconds on the Redis clock; 0: it waits for those before it
    yields_s: float = 0.0  # after its beginning, the next load that calls wait for begins beside it


class DeviceRecord(BaseModel):
    """What a worker runs on."""

    model_config = ConfigDict(frozen=True)

    kind: str  # "cpu" or "gpu"
    name: str = ""  # of the processor or GPU; "": unknown
    memory_bytes: int = 0  # of the GPU; of the machine or control group for a CPU; 0: unknown
    cores: float = 0.0  # processors that the worker may use, as its affinity and its control groups allow
    features: tuple[str, ...] = ()  # of the processor: flags of /proc/cpuinfo that matter for inference
    compute_capability: str = ""  # of the GPU, like "9.0"
    driver: str = ""  # version of the GPU's driver
    fingerprint: str = ""  # equal for equal devices: what was compiled on one runs on the others


def kind_of(backend: str, device: str) -> str:
    """Return the kind of a worker's instances, like "onnxruntime.cpu": its backend, and its device without a number."""
    return f"{backend}.{device.partition(':')[0]}"


class WorkerRecord(BaseModel):
    """What a worker process publishes about itself."""

    model_config = ConfigDict(frozen=True)

    id: str
    pool: str
    device: str
    backend: str
    pid: int
    host: str  # equal for processes that can share memory segments
    started: float
    heartbeat: float = 0.0  # time of the last heartbeat on the reader's clock; set by ClusterState
    batch_formats: tuple[int, ...] = ()  # batch formats that the worker reads
    #: Stored apart from the rest of the record, each by itself, and put in by the reader (queue.worker_records):
    #: an idle instance costs nothing with each heartbeat.
    instances_version: int = 0  # incremented with each change of an instance; 0: `instances` is in the record
    changed_since: int = 0  # version after which `changed` lists every change
    changed: dict[str, int] = {}  # content ids of instances that changed lately -> version of the change
    formats: tuple[str, ...] = ()  # model formats that its backend loads; empty: unknown
    hardware: DeviceRecord | None = None  # None: a release that did not publish it
    packages: dict[str, str] = {}  # inference libraries that are installed, with versions
    instances: tuple[InstanceRecord, ...] = ()
    budget_bytes: int = 0  # memory that the process may use, the interpreter included; 0: no limit
    used_bytes: int = 0  # in use, promised to loads in progress, or not yet free after an unload
    device_budget_bytes: int = 0  # memory of its accelerator that it may use; 0: it has none, or no limit
    device_used_bytes: int = 0
    room_bytes: int = 0  # what all instances together may take of the budget; 0: no limit
    device_room_bytes: int = 0
    draining: bool = False  # it stops soon and loads nothing
    token: str = ""  # of the repository state that its instances follow
    ready: bool = False  # it has loaded what it should hold, once, and does not drain
    #: whole seconds by which its machine's clock is ahead of the Redis clock; None: a release that did not publish it
    clock_ahead_s: int | None = None
    refusals: tuple[RefusalRecord, ...] = ()
    #: in progress, then those that calls wait for, in the order in which they begin; not those that wait for no call
    loads: tuple[LoadRecord, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of its instances."""
        return kind_of(self.backend, self.device)

    @field_validator("instances", mode="before")
    @classmethod
    def _leave_out_unreadable(cls, instances: object) -> object:
        """Leave out an instance in a state that this release does not know: the others serve."""
        return readable_instances(instances) if isinstance(instances, list) else instances


_STATES = frozenset(State)


def readable_instances(instances: list[Any]) -> list[Any]:
    """Return the instances whose state this release knows; wrong types stay, for the validation to refuse."""
    return [item for item in instances if not isinstance(item, dict) or item.get("state") in _STATES]
