"""Triton's extensions of v2 as values and interfaces: what its REST routes and its gRPC calls both stand on. Pure.

Nothing here knows a protocol; every operation raises Failure, and the adapters give that the status of its code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from millstream.services.trace_settings import TraceValues

# --- statistics ---


@dataclass(frozen=True, slots=True)
class Duration:
    """So many events, and how long they took together."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Executions of one batch size (rows)."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """What one version did since it was loaded, in all gateways. `last_inference_ms`: since the epoch; 0: never.

    `inference_count`: rows of successful requests; `execution_count`: runs of the model.
    """

    name: str
    version: str
    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    batches: Sequence[BatchStatistics] = ()
    memory_bytes: Mapping[tuple[str, int], int] = field(default_factory=dict)  # (CPU | GPU, device number) -> bytes


class Statistics(Protocol):
    async def of(self, model: str | None, version: str | None) -> list[ModelStatistics]:
        """Of one version, of all loaded versions of a model, or of all models. Raises Failure(INVALID) where there is none."""


# --- model repository ---


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """`state`: READY, UNAVAILABLE, LOADING, UNLOADING; `version` and `state` are "" for a model that was never loaded."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class ModelLoader(Protocol):
    def index(self, *, ready: bool) -> list[IndexEntry]:
        """What the repository holds; `ready`: only what answers requests."""

    async def load(self, model: str, config: str | None, files: Mapping[str, bytes], *, retry: bool = True) -> None:
        """Load or load again, and return when it serves. `config`: a ModelConfig as JSON text.

        `files`: path below the model's folder ("1/model.onnx") -> content; they make up the whole folder.
        A load that fails leaves what served before serving.
        """

    async def unload(self, model: str) -> None:
        """Stop serving it; what is on its way is still answered. Unknown models are no error."""


# --- model configuration ---


class Configurations(Protocol):
    def of(self, model: str, version: str | None) -> dict[str, Any]:
        """A served version's ModelConfig in JSON form: proto field names, numbers as numbers, defaults written out.

        Raises Failure(NOT_FOUND).
        """


# --- shared memory of clients ---


@dataclass(frozen=True, slots=True)
class Region:
    """`key`: the name for shm_open; `offset` and `size_bytes`: the part of it that may be used."""

    name: str
    key: str
    offset: int
    size_bytes: int


class MemoryRegistry(Protocol):
    """Raises Failure(UNSUPPORTED) unless the server allows clients' shared memory."""

    def register(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Raises Failure: CONFLICT (the name is taken), INVALID (no such memory, or too small)."""

    def unregister(self, name: str | None) -> None:
        """Forget a region, or all of them; an unknown name is no error."""

    def regions(self, name: str | None) -> list[Region]:
        """Raises Failure(NOT_FOUND) for a name that is not registered."""


# --- trace and logging ---

LogValues = dict[str, str | int | bool]


class TraceSettings(Protocol):
    def get(self, model: str | None) -> TraceValues:
        """Settings in force: trace_level as a list, all else strings. Raises Failure(INVALID): no such model."""

    def update(self, model: str | None, values: Mapping[str, Any]) -> TraceValues:
        """Change some: strings, or lists of strings; None clears a model's own value, so that the global one counts."""


class LogSettings(Protocol):
    def get(self) -> LogValues:
        """log_file, log_info, log_warning, log_error, log_verbose_level, log_format."""

    def update(self, values: Mapping[str, Any]) -> LogValues:
        """Change some. Raises Failure(UNSUPPORTED) for log_file, Failure(INVALID) for what is no such setting or value."""
