"""The documents of the repository: what a version is (manifest) and what a model's name resolves to (endpoint). Pure.

models/<model>/endpoint.json             Endpoint: mutable, replaced with compare-and-set on `generation`
models/<model>/<version>/manifest.json   Manifest: immutable
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from services.tensor import Signature

ROWS_MAX_DEFAULT = 64


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


class SourceFile(BaseModel):
    """One file of what was uploaded: path below the version folder, bytes, sha256 in hex."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    size_bytes: int
    sha256: str


class Manifest(BaseModel):
    """An immutable version of a model.

    `served`: path below the version folder of the ONNX file that serves (the source, or a rewritten variant).
    `digest`: sha256 (hex) over the uploaded bytes. `files`: every file a worker reads, with digests.
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
    notes: tuple[str, ...] = Field((), description="What the check found worth saying, one sentence each.")

    @property
    def release(self) -> str:
        """Identity of this version's content: differs when a deleted version number is used again."""
        return f"{self.model}:{self.version}:{self.digest[:8]}{int(self.created * 1000) & 0xFFFFFF:06x}"


class Endpoint(BaseModel):
    """What a model's public name resolves to.

    `active`: the version asked for; `previous`: the one that goes on serving until `active` is ready.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    generation: int = 0
    active: int | None = None
    previous: int | None = None
