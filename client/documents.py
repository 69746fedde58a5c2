"""Types of the server's documents, for editors and type checkers: plain dicts when the program runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class Tensor(TypedDict):
    """A named input or output. -1 in `shape` is a variable dimension.

    `on_request`, of an output: it is answered only to requests that name it.
    """

    name: str
    datatype: str
    shape: list[int]
    on_request: NotRequired[bool]


class Usage(TypedDict):
    """How a version wants to be called: services/model/usage.py says it for each kind."""

    kind: str  # text, columns, image, tokens or tensors
    input: str | None
    columns: list[str]
    image: dict[str, Any] | None
    sentence: str
    example: dict[str, Any] | None


class Instance(TypedDict):
    """A version in one worker. `profile`: measured seconds of a run by its number of rows, as text."""

    worker: str
    state: str
    reason: str | None
    profile: dict[str, float]
    variant: NotRequired[str | None]
    size_bytes: int


class Variant(TypedDict):
    """What a device's library compiled from a version."""

    name: str
    target: str
    runtime: str
    device: str
    flags: dict[str, str]
    seconds: float
    size_bytes: int
    refused: str | None


class LoadFailure(TypedDict):
    """Why workers of one kind do not load a version any more."""

    kind: str  # backend and device, like "onnxruntime.cuda"; "every": all kinds
    reason: str
    failed_at: float  # seconds since the epoch


class RaceSummary(TypedDict):
    """What the last race of a version found on one kind of worker. `undone`: why the winner serves no longer."""

    kind: str
    state: str
    winner: str | None
    ratio: float
    serving: bool
    undone: str | None


class ImportedModel(TypedDict):
    """The framework whose model a version was made from, and how well the outputs of both agree."""

    importer: str
    producer: str
    rows: int
    output: str
    difference: float
    rtol: float
    atol: float
    embeddings: list[str]


class _VersionState(TypedDict):
    model: str
    state: str
    reason: str | None
    active: bool
    batching_decided: str | None
    batching_reason: str | None
    inputs: list[Tensor]
    outputs: list[Tensor]
    usage: NotRequired[Usage | None]  # servers of the release before do not say it
    load_failures: list[LoadFailure]
    variants: list[Variant]
    notes: list[str]
    races: NotRequired[list[RaceSummary]]
    imported: ImportedModel | None
    instances: list[Instance]


class Version(_VersionState):
    """A version of a model. `digest`: sha256 of the upload; `created`: seconds since the epoch.

    `existing`: of an upload, the version was there already, with the same bytes and configuration.
    """

    version: int
    digest: str
    size_bytes: int
    created: float
    pools: list[str]
    batching: bool
    rows_max: int
    existing: NotRequired[bool]


class Race(TypedDict):
    """A race of a version on a kind of device. `rows`: all candidates; `report`: None before the verdict."""

    model: str
    version: int
    pool: str
    kind: str
    device: str
    state: str
    why: str
    requested_at: float
    began_at: float | None
    ended_at: float | None
    worker: str | None
    tries: int
    options: dict[str, Any]
    progress: dict[str, Any]
    baseline: str | None
    winner: str | None
    ratio: float
    table: dict[str, str]
    rows: list[dict[str, Any]]
    report: dict[str, Any] | None
    serving: bool
    undone: dict[str, Any] | None
    past: list[dict[str, Any]]


class ListedVersion(_VersionState):
    """A version in the list of its model. Of an upload in progress, the state and perhaps the number are known."""

    version: int | None
    digest: str | None
    size_bytes: int | None
    created: float | None
    pools: list[str]
    batching: bool | None
    rows_max: int | None


class SettingsFields(TypedDict):
    """Where and how often a model is loaded. `pools`: empty for those of the version; 0: no limit."""

    pools: list[str]
    instances_min: int
    instances_max: int
    idle_s: float
    pin: bool
    owner: NotRequired[str]
    labels: NotRequired[dict[str, str]]


class SettingsChanges(TypedDict, total=False):
    """Changes of the settings of a model's endpoint; None leaves a setting as it is.

    Args:
        pools: pools that may serve it, the preferred one first; empty: those of the version.
        instances_min: instances that are always loaded.
        instances_max: most instances in a pool; 0: no limit.
        idle_s: seconds without a call until it is unloaded; 0: only if memory is short.
        pin: whether a loaded instance stays, also when memory is short.
        owner: name of an API key, "" for none; it needs the scope `admin`.
        labels: labels to set, by name; a value of None removes one.
    """

    pools: Sequence[str] | None
    instances_min: int | None
    instances_max: int | None
    idle_s: float | None
    pin: bool | None
    owner: str | None
    labels: Mapping[str, str | None] | None


class EndpointSettings(TypedDict):
    """The settings of a model's endpoint. `warnings`: what keeps them from having an effect now."""

    model: str
    generation: int
    settings: SettingsFields
    warnings: list[str]


class Controller(TypedDict):
    """The controller that leads. `token` grows with each new leader."""

    name: str
    token: int


class PlacedInstance(TypedDict):
    """A version in a worker. Ages are in seconds; None: not ready yet, or not used."""

    model: str
    version: int
    state: str
    reason: str | None
    size_bytes: int
    peak_bytes: int
    device_size_bytes: int
    device_peak_bytes: int
    load_s: float
    loaded_age_s: float | None
    last_used_age_s: float | None
    in_use: bool
    pinned: bool
    why: str


class PlacedWorker(TypedDict):
    """A worker and its memory. `budget_bytes`: None without a limit; `device_budget_bytes`: also on a CPU."""

    id: str
    pool: str
    device: str
    draining: bool
    budget_bytes: int | None
    used_bytes: int
    free_bytes: int | None
    room_bytes: NotRequired[int | None]
    device_budget_bytes: int | None
    device_used_bytes: int
    device_free_bytes: int | None
    device_room_bytes: NotRequired[int | None]
    instances_total: int
    instances: list[PlacedInstance]


class LoadRefusal(TypedDict):
    """Why a worker does not load a version."""

    worker: str
    kind: str
    reason: str
    retry_after_s: float


class LoadPrediction(TypedDict):
    """What the load of a version takes in a pool. `measured`: an earlier load took this; else it is a prediction."""

    pool: str
    size_bytes: int
    peak_bytes: int
    device_size_bytes: int
    device_peak_bytes: int
    load_s: float
    measured: bool


class FailedInstance(TypedDict):
    """A worker that could not load a version."""

    worker: str
    reason: str


class PlacedVersion(TypedDict):
    """A version that serves, and the workers that hold it. `load`: None if it is ready."""

    model: str
    version: int
    active: bool
    state: str
    reason: str | None
    pools: list[str]
    settings: SettingsFields
    holders: list[str]
    failed: list[FailedInstance]
    standby: bool
    load: LoadPrediction | None
    refusals: list[LoadRefusal]
    missing: NotRequired[str | None]  # servers of the release before do not say it


class Placement(TypedDict):
    """Who holds what."""

    leader: Controller | None
    workers: list[PlacedWorker]
    models: list[PlacedVersion]
    next_page_token: str | None


class PoolScale(TypedDict):
    """How many workers a pool should have, and why. Instants are on the Redis clock, in seconds since the epoch."""

    pool: str
    wanted: int
    ready: int
    workers_min: int
    workers_max: int
    queue_rows: int
    oldest_wait_s: float
    arrival_rows_per_s: float
    capacity_rows_per_s: float
    utilisation: float
    reason: str
    decided_at: float
    start_s: float
    explanation: list[str]


class Duration(TypedDict):
    """A number of events, and their total time in nanoseconds."""

    count: int
    ns: int


class RequestStatistics(TypedDict):
    """Requests of a version; the members that the client uses."""

    success: Duration


class BatchStatistics(TypedDict):
    """Runs of one batch size."""

    batch_size: int
    compute_infer: Duration


class VersionStatistics(TypedDict):
    """What one version has run since it was loaded, over all gateways. `inference_count`: rows."""

    name: str
    version: str
    inference_count: int
    execution_count: int
    inference_stats: RequestStatistics
    batch_stats: list[BatchStatistics]


class Model(TypedDict):
    """A model and its versions, the oldest first. `serving`: the version that answers; None: none does.

    `owner`: name of the API key that uploaded its first version; "": none.
    """

    name: str
    active: int | None
    serving: int | None
    source: str | None
    reason: str | None
    unloaded: bool
    owner: NotRequired[str]
    labels: NotRequired[dict[str, str]]
    versions: list[ListedVersion]


class UsageParameters(TypedDict):
    """What metadata says of a version that takes more than tensors. `text_input`: of versions with a tokenizer."""

    text_input: NotRequired[str]
    usage: NotRequired[Usage]


class Metadata(TypedDict):
    """The signature of a version, as the Open Inference Protocol describes it."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    parameters: NotRequired[UsageParameters]
