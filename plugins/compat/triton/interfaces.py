"""interfaces: Triton's extensions of v2 as values and interfaces, for its REST routes and its gRPC calls. Pure.

Nothing here depends on a protocol. Every operation raises Failure, which each adapter maps to a status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from millstream.plugins.compat.triton.trace_settings import TraceValues

# --- statistics ---


@dataclass(frozen=True, slots=True)
class Duration:
    """A number of events, and their total time."""

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
    """Counts and times of one version since it was loaded, over all gateways."""

    name: str
    version: str
    last_inference_ms: int = 0  # since the epoch; 0: never
    inference_count: int = 0  # rows of successful requests
    execution_count: int = 0  # runs of the model
    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    batches: Sequence[BatchStatistics] = ()
    memory_bytes: Mapping[tuple[str, int], int] = field(default_factory=dict)  # (CPU | GPU, device number) -> bytes


# --- model repository ---


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A version in the index of the model repository, or a model without versions."""

    name: str
    version: str = ""  # "" for a model that was never loaded
    state: str = ""  # READY, UNAVAILABLE, LOADING, UNLOADING; "" for a model that was never loaded
    reason: str = ""


# --- model configuration ---


# --- shared memory of clients ---


@dataclass(frozen=True, slots=True)
class Region:
    """Shared memory of a client, registered under a name."""

    name: str
    key: str  # the name for shm_open
    offset: int  # start of the part that may be used
    size_bytes: int  # size of that part


class MemoryRegistry(Protocol):
    """The registered shared memory of clients, as far as it belongs to the key of the caller.

    Methods raise Failure(UNSUPPORTED) unless the server allows it.
    """

    def register(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Register a region. Raises Failure: CONFLICT (the name or the memory is taken), INVALID (no such memory)."""

    def unregister(self, name: str | None) -> None:
        """Unregister a region; None: all regions. An unknown name is no error."""

    def regions(self, name: str | None) -> list[Region]:
        """Return a region; None: all regions. Raises Failure(NOT_FOUND) for an unknown name."""


# --- trace and logging ---

LogValues = dict[str, str | int | bool]


class TraceSettings(Protocol):
    """Reads and changes trace settings."""

    def get(self, model: str | None) -> TraceValues:
        """Return the settings in force, global or of a model: trace_level as a list, the others as strings.

        Raises:
            Failure: INVALID: no such model.
        """

    def update(self, model: str | None, values: Mapping[str, Any]) -> TraceValues:
        """Change some settings, and return those in force.

        Args:
            model: The model whose settings change; None: the global settings.
            values: Strings, or lists of strings; None clears a value, so that the global value or the default holds.
        """


class LogSettings(Protocol):
    """Reads and changes log settings."""

    def get(self) -> LogValues:
        """Return log_file, log_info, log_warning, log_error, log_verbose_level and log_format."""

    def update(self, values: Mapping[str, Any]) -> LogValues:
        """Change some settings, and return all. Raises Failure: UNSUPPORTED for log_file, INVALID for unknown ones."""
