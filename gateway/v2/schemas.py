"""schemas: the JSON bodies of the Open Inference Protocol v2 and of Triton's extensions, for the OpenAPI document.

Source: KServe, "Open Inference Protocol", REST; Triton, "Protocol Extensions".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from millstream.services.model.usage import Usage

Datatype = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
]
Shape = list[Annotated[int, Field(ge=0)]]
Count = Annotated[int, Field(ge=0)]

# --- inference ---


class InferInput(TypedDict):
    """An input. Its content is in `data`, or after the JSON part, or in shared memory."""

    name: str
    shape: Shape
    datatype: Datatype
    parameters: NotRequired[
        Annotated[
            dict[str, Any],
            Field(
                description="`binary_data_size`: bytes after the JSON part; `shared_memory_region`, "
                "`shared_memory_byte_size`, `shared_memory_offset`: memory that the client registered."
            ),
        ]
    ]
    data: NotRequired[Annotated[list[Any], Field(description="The elements in row-major order, flat or nested.")]]


class InferRequestedOutput(TypedDict):
    """An output that the reply has to contain."""

    name: str
    parameters: NotRequired[
        Annotated[
            dict[str, Any],
            Field(
                description="`binary_data`: raw bytes after the JSON part; `classification`: the number of classes; "
                "`shared_memory_region`, `shared_memory_byte_size`, `shared_memory_offset`: where to write it."
            ),
        ]
    ]


class InferRequest(TypedDict):
    """The inputs of a request, and which outputs it asks for."""

    inputs: list[InferInput]
    id: NotRequired[Annotated[str, Field(description="The reply repeats it.")]]
    parameters: NotRequired[
        Annotated[
            dict[str, Any],
            Field(
                description="`timeout` in microseconds, `priority`, `binary_data_output`: all outputs as raw bytes. "
                "Other parameters may be any scalar."
            ),
        ]
    ]
    outputs: NotRequired[Annotated[list[InferRequestedOutput], Field(description="Left out: all outputs.")]]


class InferOutput(TypedDict):
    """An output. Without `data` its content is after the JSON part (`binary_data_size`), or in shared memory."""

    name: str
    datatype: Datatype
    shape: Shape
    parameters: NotRequired[dict[str, Any]]
    data: NotRequired[Annotated[list[Any], Field(description="The elements in row-major order, flat.")]]


class InferReply(TypedDict):
    """The outputs of one version."""

    model_name: str
    model_version: str
    id: NotRequired[Annotated[str, Field(description="That of the request.")]]
    parameters: NotRequired[dict[str, Any]]
    outputs: list[InferOutput]


class GenerateRequest(TypedDict):
    """Members with the name of an input are its value. Other members are parameters, and scalars."""

    id: NotRequired[str]
    parameters: NotRequired[dict[str, Any]]


class GenerateReply(TypedDict):
    """Each output is a member: a flat list, or the only element."""

    model_name: str
    model_version: str
    id: NotRequired[str]


# --- metadata and health ---


class ServerMetadata(TypedDict):
    """Name and version of the server, and the protocol extensions that it supports."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(TypedDict):
    """A named input or output. -1 in `shape` is a variable dimension."""

    name: str
    datatype: Datatype
    shape: list[Annotated[int, Field(ge=-1)]]


class UsageParameters(TypedDict):
    """Of a version that takes more than tensors.

    `text_input`, of versions with a tokenizer: a BYTES input, (texts), that may replace all inputs.
    """

    text_input: NotRequired[str]
    usage: Usage


class ModelMetadata(TypedDict):
    """The signature of a version, and the versions of its model that are ready."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: NotRequired[UsageParameters]


class ModelNames(TypedDict):
    """Names of the models that answer requests."""

    models: list[str]


class ServerLive(TypedDict):
    """The process answers."""

    live: bool


class ServerReady(TypedDict):
    """Whether the server answers inference requests, and why not."""

    ready: bool
    error: NotRequired[str]


class ModelReady(TypedDict):
    """Whether a version answers requests, and why not. `load_s`: a request waits for its load about so many seconds."""

    name: str
    ready: bool
    error: NotRequired[str]
    load_s: NotRequired[float]


# --- configuration and repository ---


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


# --- statistics ---


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


# --- trace and log settings ---


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
    InferRequest,
    InferReply,
    GenerateRequest,
    GenerateReply,
    ServerMetadata,
    ModelMetadata,
    ModelNames,
    ServerLive,
    ServerReady,
    ModelReady,
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
