"""The JSON bodies of Triton's extensions, for the OpenAPI document. Source: Triton, "Protocol Extensions"."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

Count = Annotated[int, Field(ge=0)]


class GenerateRequest(TypedDict):
    """Members with the name of an input are its value. Other members are parameters, and scalars."""

    id: NotRequired[str]
    parameters: NotRequired[dict[str, Any]]


class GenerateReply(TypedDict):
    """Each output is a member: a flat list, or the only element."""

    model_name: str
    model_version: str
    id: NotRequired[str]


class ConfigTensor(TypedDict):
    """An input or output in Triton's model configuration, without the rows."""

    name: str
    data_type: Annotated[str, Field(description="TYPE_ and the datatype; TYPE_STRING for BYTES.")]
    dims: list[int]


class ModelConfiguration(TypedDict):
    """Triton's ModelConfig message as JSON. Members that are not listed here are the message's other fields."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[ConfigTensor]
    output: list[ConfigTensor]


class RepositoryIndexRequest(TypedDict):
    """Which versions to list."""

    ready: NotRequired[Annotated[bool, Field(description="Only versions that answer requests.")]]


class RepositoryIndexEntry(TypedDict):
    """A version and its state. A model that was never loaded has only a name."""

    name: str
    version: NotRequired[str]
    state: NotRequired[Literal["READY", "UNAVAILABLE", "LOADING", "UNLOADING"]]
    reason: NotRequired[str]


class LoadRequest(TypedDict):
    """Overrides of a load."""

    parameters: NotRequired[
        Annotated[
            dict[str, str],
            Field(description="`config`: a ModelConfig as JSON text; `file:1/model.onnx`: a file in base64."),
        ]
    ]


class LoadReply(TypedDict):
    """The model serves. `versions`: those that do."""

    name: str
    load: bool
    versions: list[str]


class UnloadParameters(TypedDict):
    """Accepted for Triton's clients. Models do not depend on each other here."""

    unload_dependents: NotRequired[bool]


class UnloadRequest(TypedDict):
    """Parameters of an unload."""

    parameters: NotRequired[UnloadParameters]


class UnloadReply(TypedDict):
    """The model does not serve."""

    name: str
    unload: bool


class StatisticDuration(TypedDict):
    """A number of events, and their total time in nanoseconds."""

    count: Count
    ns: Count


class InferenceStatistics(TypedDict):
    """Counts and times of requests. Times of the cache are zero, since there is none."""

    success: StatisticDuration
    fail: StatisticDuration
    queue: StatisticDuration
    compute_input: StatisticDuration
    compute_infer: StatisticDuration
    compute_output: StatisticDuration
    cache_hit: StatisticDuration
    cache_miss: StatisticDuration


class BatchStatistics(TypedDict):
    """Runs of one batch size."""

    batch_size: Count
    compute_input: StatisticDuration
    compute_infer: StatisticDuration
    compute_output: StatisticDuration


class MemoryUsage(TypedDict):
    """Memory of the instances on a device."""

    type: str
    id: Count
    byte_size: Count


class VersionStatistics(TypedDict):
    """Statistics of one version since it was loaded, over all gateways."""

    name: str
    version: str
    last_inference: Annotated[int, Field(ge=0, description="Milliseconds since the epoch; 0: never.")]
    inference_count: Annotated[int, Field(ge=0, description="Rows of successful requests.")]
    execution_count: Annotated[int, Field(ge=0, description="Runs of the model.")]
    inference_stats: InferenceStatistics
    response_stats: dict[str, Any]
    batch_stats: list[BatchStatistics]
    memory_usage: list[MemoryUsage]


class Statistics(TypedDict):
    """Statistics of the loaded versions that the path names."""

    model_stats: list[VersionStatistics]


class TraceSettings(TypedDict):
    """The trace settings in force. Numbers are texts, as in Triton."""

    trace_level: list[Literal["OFF", "TIMESTAMPS", "TENSORS"]]
    trace_rate: str
    trace_count: str
    log_frequency: str
    trace_file: str
    trace_mode: str


class TraceSettingsChange(TypedDict):
    """The settings to change; null clears a setting, so that the global setting or the default applies."""

    trace_level: NotRequired[list[Literal["OFF", "TIMESTAMPS", "TENSORS"]] | str | None]
    trace_rate: NotRequired[str | None]
    trace_count: NotRequired[str | None]
    log_frequency: NotRequired[str | None]


class LogSettings(TypedDict):
    """The log settings of the gateways."""

    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: Count
    log_format: str


class LogSettingsChange(TypedDict):
    """The settings to change."""

    log_info: NotRequired[bool]
    log_warning: NotRequired[bool]
    log_error: NotRequired[bool]
    log_verbose_level: NotRequired[Count]
    log_format: NotRequired[str]


SCHEMAS = (
    GenerateRequest,
    GenerateReply,
    ModelConfiguration,
    RepositoryIndexRequest,
    RepositoryIndexEntry,
    LoadRequest,
    LoadReply,
    UnloadRequest,
    UnloadReply,
    Statistics,
    TraceSettings,
    TraceSettingsChange,
    LogSettings,
    LogSettingsChange,
)
