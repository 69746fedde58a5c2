"""Types of the server's documents, for editors and type checkers: plain dicts when the program runs."""

from __future__ import annotations

from typing import TypedDict


class Tensor(TypedDict):
    """A named input or output. -1 in `shape` is a variable dimension."""

    name: str
    datatype: str
    shape: list[int]


class Instance(TypedDict):
    """A version in one worker. `profile`: measured seconds of a run by its number of rows, as text."""

    worker: str
    state: str
    reason: str | None
    profile: dict[str, float]
    size_bytes: int


class _VersionState(TypedDict):
    model: str
    state: str
    reason: str | None
    active: bool
    batching_decided: str | None
    batching_reason: str | None
    inputs: list[Tensor]
    outputs: list[Tensor]
    notes: list[str]
    instances: list[Instance]


class Version(_VersionState):
    """A version of a model. `digest`: sha256 of the upload; `created`: seconds since the epoch."""

    version: int
    digest: str
    size_bytes: int
    created: float
    pools: list[str]
    batching: bool
    rows_max: int


class ListedVersion(_VersionState):
    """A version in the list of its model. Of an upload in progress, the state and perhaps the number are known."""

    version: int | None
    digest: str | None
    size_bytes: int | None
    created: float | None
    pools: list[str]
    batching: bool | None
    rows_max: int | None


class Model(TypedDict):
    """A model and its versions, the oldest first. `serving`: the version that answers; None: none does."""

    name: str
    active: int | None
    serving: int | None
    source: str | None
    reason: str | None
    unloaded: bool
    versions: list[ListedVersion]


class Metadata(TypedDict):
    """The signature of a version, as the Open Inference Protocol describes it."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[Tensor]
    outputs: list[Tensor]
