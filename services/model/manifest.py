"""The documents of the repository: what a version is (manifest) and what a model's name resolves to (endpoint). Pure.

models/<model>/endpoint.json             Endpoint: mutable, replaced with compare-and-set on `generation`
models/<model>/<version>/manifest.json   Manifest: immutable
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millstream.services.model.signature import Signature

ROWS_MAX_DEFAULT = 64
LEVELS_MAX = 1024
SIZES_MAX = 64
WARMUPS_MAX = 64


class QueuePolicy(BaseModel):
    """How requests of one priority wait. `timeout_ms_default` 0: the version's own deadline alone counts.

    Where a version has any policy but the default, a request's own timeout is no deadline any more, as in Triton.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout_ms_default: float = Field(0, ge=0, description="How long a request waits at most; 0: no limit here.")
    timeout_action: Literal["reject", "delay"] = Field(
        "reject", description="What then: refuse it, or let it wait behind all others."
    )
    timeout_override: bool = Field(False, description="Whether a request's own timeout may shorten the wait.")
    requests_max: int = Field(0, ge=0, description="Requests that may wait in one gateway; 0: the lane's limit alone.")


class WarmupInput(BaseModel):
    """One input of a warm-up request. `shape`: without the rows. `fill`: zeros, random numbers, or a file's bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    datatype: str
    shape: tuple[int, ...]
    fill: Literal["zero", "random", "file"] = "zero"
    file: str | None = Field(None, description="Below the version's folder, in raw form.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(dim < 0 for dim in self.shape):
            raise ValueError("the shape of a warm-up input has no variable dimension")
        if (self.fill == "file") != (self.file is not None):
            raise ValueError('a file belongs to the fill "file", and to no other')
        return self


class Warmup(BaseModel):
    """A request that a version must have answered before it is ready."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    rows: int = Field(1, ge=0, description="Rows; 0 for versions that do not batch.")
    count: int = Field(1, ge=1, le=1000)
    inputs: dict[str, WarmupInput] = {}


class ModelConfig(BaseModel):
    """What an uploader may say about a version (the `config` part of an upload). Every field has a default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batching: bool | None = Field(None, description="Share runs between requests; default: found out by the check.")
    rows_max: int = Field(ROWS_MAX_DEFAULT, ge=1, le=65536, description="Largest number of rows in one run.")
    pool: str = Field("cpu", description="The worker pool that serves the version.")
    timeout_ms_default: float = Field(
        30_000, gt=0, le=3_600_000, description="Deadline of a request that names none, from its arrival."
    )
    queue_delay_ms_max: float = Field(
        0, ge=0, le=10_000, description="How long a batch may wait for more rows on an idle system; 0: never."
    )
    rows_preferred: tuple[int, ...] = Field((), description="Sizes of batches that are worth no more waiting.")
    instances_max: int = Field(
        0, ge=0, description="Workers of the pool that hold it at most, on each machine; 0: all."
    )
    priority_levels: int = Field(
        0,
        ge=0,
        le=LEVELS_MAX,
        description="Priorities from 1 (first) on; others count as none given. 0: any number counts.",
    )
    priority_default: int = Field(0, ge=0, description="Of a request that names none.")
    queue: QueuePolicy = Field(QueuePolicy(), description="How requests wait.")
    queue_by_priority: dict[int, QueuePolicy] = Field({}, description="The same for single priorities.")
    warmup: tuple[Warmup, ...] = Field((), description="Requests to answer before it is ready.")
    labels: dict[str, str] = Field({}, description="Output -> file of its class names, one a line.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        levels = self.priority_levels
        if levels and not 1 <= self.priority_default <= levels:
            raise ValueError(f"priority_default must be one of the {levels} priority_levels, 1 to {levels}")
        if not levels and self.priority_default:
            raise ValueError("priority_default needs priority_levels")
        if wrong := [level for level in self.queue_by_priority if not 1 <= level <= (levels or LEVELS_MAX)]:
            raise ValueError(f"queue_by_priority: {wrong[0]} is no priority, they are 1 to {levels or LEVELS_MAX}")
        if wrong := [rows for rows in self.rows_preferred if not 1 <= rows <= self.rows_max]:
            raise ValueError(f"rows_preferred: {wrong[0]} is not between 1 and rows_max, which is {self.rows_max}")
        if len(self.rows_preferred) > SIZES_MAX:
            raise ValueError(f"rows_preferred: at most {SIZES_MAX} sizes")
        if len(self.warmup) > WARMUPS_MAX:
            raise ValueError(f"warmup: at most {WARMUPS_MAX} requests")
        return self


class SourceFile(BaseModel):
    """One file of what was uploaded: path below the version folder, bytes, sha256 in hex."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    size_bytes: int
    sha256: str


class Batching(BaseModel):
    """How it was decided whether requests share runs of a version.

    proven: an analysis of the graph shows that rows are independent, and trials agree. requested: the configuration asks
    for it, without a proof. off: each request runs alone. `reason`: why it is not proven, or off.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    decided: Literal["proven", "requested", "off"] = "off"
    reason: str = ""


class Manifest(BaseModel):
    """An immutable version of a model.

    `served`: path below the version folder of the ONNX file that serves (the source, or a rewritten variant).
    `digest`: sha256 (hex) over the uploaded bytes. `files`: every file a worker reads, with digests.
    `origin`: the folder that the files are in where that is another one: they are served in place.
    `triton`: the Triton model configuration that it was given, in JSON form; empty: none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    model: str
    version: int
    created: float = Field(description="Seconds since the epoch.")
    digest: str
    source_format: str = "onnx"
    served: str
    files: tuple[SourceFile, ...]
    signature: Signature
    config: ModelConfig
    opset: int
    ir_version: int
    producer: str = ""
    batching: Batching = Field(Batching(), description="How it was decided whether requests share runs.")
    notes: tuple[str, ...] = Field((), description="What the check found worth saying, one sentence each.")
    origin: str | None = None
    triton: dict[str, Any] = {}

    @property
    def content_id(self) -> str:
        """Identifies this version's content and names its lane. Differs when a deleted version number is used again."""
        return f"{self.model}:{self.version}:{self.digest[:8]}{int(self.created * 1000) & 0xFFFFFF:06x}"


class Endpoint(BaseModel):
    """What a model's public name resolves to.

    `active`: the version asked for; `previous`: the one that goes on serving until `active` is ready.
    `loaded`: the versions that are served; None: all that there are; empty: the model is unloaded.
    `source`: the folder of models that this one is served from in place; None: it was uploaded.
    `failure`: why the last load failed; empty: it did not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    generation: int = 0
    active: int | None = None
    previous: int | None = None
    loaded: tuple[int, ...] | None = None
    source: str | None = None
    failure: str = ""

    def serves(self, version: int) -> bool:
        """Whether the version is loaded."""
        return self.loaded is None or version in self.loaded
