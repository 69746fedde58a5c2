"""Every setting of every process, read from the environment here and nowhere else (`MILLSTREAM_<FIELD>`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from millstream.services.errors import Failure, invalid
from millstream.services.trace_settings import at_start

MIB = 1 << 20
# what clients changed while an installation runs: in the folder run of its home, gone at its next start
TRACE_SETTINGS = "trace-settings.json"
LOG_SETTINGS = "log-settings.json"

#: what an installation may be called: part of Redis keys and of file names
INSTANCE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"


class Settings(BaseSettings):
    """Validated when built: a bad value stops the process at start, with the field's name."""

    model_config = SettingsConfigDict(
        env_prefix="MILLSTREAM_", frozen=True, extra="ignore", populate_by_name=True, hide_input_in_errors=True
    )

    home: Path = Field(Path(".millstream"), description="Folder for everything that is kept: models, sockets, logs.")
    host: str = Field("127.0.0.1", description="Address the gateway listens on.")
    http_port: int = Field(8000, ge=0, le=65535, description="Port the gateway listens on; 0 picks a free one.")
    grpc_port: int = Field(8001, ge=-1, le=65535, description="Port for gRPC; 0 picks a free one, -1: no gRPC.")
    gateways: int = Field(1, ge=1, le=64, description="Gateway processes.")
    pools: str = Field("cpu=1", description="Worker pools as NAME=WORKERS, comma separated.")
    threads: int = Field(0, ge=0, le=1024, description="Threads of one worker; 0: its share of the machine.")
    cpu_affinity: bool = Field(True, description="On two cores, keep the embedded Redis and the gateway on one each.")
    redis_url: SecretStr | None = Field(
        None, description="Redis to use, by itself or behind Sentinel; unset: an embedded one."
    )
    admin_key: SecretStr | None = Field(None, description="Bearer key for the admin API; unset: loopback only.")
    example: bool = Field(True, description="Load the digits example at start.")
    models: str = Field("", description="Models to load at start as NAME=PATH, comma separated.")
    repository: str = Field("", description="Triton model repositories to serve in place: folders, comma separated.")
    url: str | None = Field(None, description="Endpoint of the command line tools; unset: the one in home.")

    device: str = Field("cpu", description="Device of a worker: cpu, cuda[:N] or tensorrt[:N].")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of a worker's own /metrics, if started alone; 0: none."
    )
    metrics_dir: Path | None = Field(None, description="Folder of the metric files shared on a host.")
    trace_file: Path | None = Field(None, description="File of request traces; unset: logs/trace.json in home.")
    trace: str = Field(
        "",
        description="Trace settings at start: any of level, rate, count, log-frequency as KEY=VALUE, comma separated.",
    )
    segments_dir: Path = Field(Path("/dev/shm"), description="Folder of the shared memory segments.")
    instance: str | None = Field(
        None,
        pattern=INSTANCE_PATTERN,
        description="Name of the installation in Redis and shared memory: processes of one name share a queue; unset: a "
        "name that is kept in the repository.",
    )

    body_bytes_max: int = Field(64 * MIB, ge=1024, description="Largest body of an inference request, decompressed.")
    reply_bytes_max: int = Field(
        256 * MIB, ge=1024, description="Largest outputs of one request, and of one batch through Redis."
    )
    json_bytes_max: int = Field(
        16 * MIB, ge=1024, description="Largest JSON document of a request, long lists of numbers in it not counted."
    )
    json_values_max: int = Field(
        1_000_000,
        ge=1000,
        description="Values in such a document: a list or an object counts as 8, a key as 3.",
    )
    upload_bytes_max: int = Field(4096 * MIB, ge=1024, description="Largest model upload.")
    inflight_max: int = Field(4096, ge=1, description="Requests admitted at once by one gateway.")
    inflight_bytes_max: int = Field(
        1024 * MIB,
        ge=1024,
        description="Bytes of requests that one gateway receives, and of those that it has admitted.",
    )
    unread_bytes_max: int = Field(
        1024 * MIB, ge=1024, description="Bytes of replies that one gateway holds for clients that have not read them."
    )
    queue_rows_max: int = Field(8192, ge=1, description="Rows that may wait in one lane of one gateway.")
    timeout_ms_max: float = Field(600_000, gt=0, description="Longest deadline a request may ask for.")
    segment_bytes_max: int = Field(256 * MIB, ge=0, description="Shared memory of one gateway; 0: none.")
    segment_tensor_bytes_min: int = Field(32 * 1024, ge=1, description="Tensors of this size and more travel there.")
    connections_max: int = Field(4096, ge=1, description="Open connections of one gateway.")
    keep_alive_s: float = Field(75, gt=0, description="How long an idle connection is kept.")
    client_stall_s_max: float = Field(
        60,
        gt=0,
        description="How long a client may be slower than 64 KiB a second with a request, or read nothing of a reply.",
    )
    grpc_call_s_max: float = Field(
        3600, gt=0, description="How long a gRPC call or stream may go on after its connection has come of age."
    )
    drain_s: float = Field(30, gt=0, description="How long stopping may take: what was accepted is answered first.")
    lease_ms: int = Field(2000, ge=100, description="How long a silent worker keeps its leases.")
    busy_poll_us_max: int = Field(
        400,
        ge=0,
        le=10_000,
        description="Microseconds that a process looks for work or a reply before it sleeps; 0: none.",
    )
    check_batches_one_in: int = Field(
        10_000,
        ge=0,
        description="Of so many shared runs of a version one is checked, in idle time, against runs of one row; 0: none.",
    )
    worker_memory_bytes_max: int | None = Field(
        None,
        ge=0,
        description="Memory of one worker; 0: no limit; unset: an equal share of 80 % of what the machine or container has.",
    )
    check_memory_bytes_max: int = Field(8192 * MIB, ge=64 * MIB, description="Memory of a model check.")
    check_s_max: float = Field(120, gt=0, description="Time of a model check.")
    load_s_max: float = Field(600, gt=0, description="How long a worker may take to load a version.")
    warm_up_s_max: float = Field(300, gt=0, description="How long a version's warm-up runs may take, all together.")
    run_seconds_max: float = Field(
        600, gt=0, description="How long one run of a model may take; a caller's deadline may end it before."
    )
    allow_client_shm: bool = Field(
        False, description="Let clients on this machine pass tensors in shared memory that they made."
    )
    server_name: str = Field("triton", description="What GET /v2 calls the server; Triton's clients look for theirs.")
    sagemaker_model: str | None = Field(
        None,
        validation_alias=AliasChoices("MILLSTREAM_SAGEMAKER_MODEL", "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"),
        description="The model of /invocations; unset: the only one there is.",
    )
    sagemaker_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        validation_alias=AliasChoices("MILLSTREAM_SAGEMAKER_PORT", "SAGEMAKER_BIND_TO_PORT"),
        description="Port of `millstream serve`; unset: 8080.",
    )
    models_api: Literal["torchserve", "sagemaker"] = Field(
        "torchserve",
        description="Whose calls /models takes: TorchServe's management, or those of SageMaker's multi-model containers.",
    )
    import_dir: Path | None = Field(
        None,
        description="Folder of files that may be registered by path; unset: none, or /opt/ml/models for SageMaker.",
    )
    fast_path: bool = Field(True, description="Answer infer requests in the HTTP protocol class.")

    @field_validator("admin_key", mode="after")
    @classmethod
    def _usable_key(cls, key: SecretStr | None) -> SecretStr | None:
        """An empty key would let everybody in; a header can carry visible ASCII characters only."""
        text = "x" if key is None else key.get_secret_value()
        if not text.strip():
            raise ValueError("the admin key is empty: unset it, or set it to a secret of your choice")
        if not all("!" <= character <= "~" for character in text):
            raise ValueError("the admin key may have visible ASCII characters only, no spaces or line breaks")
        return key

    @field_validator("trace", mode="after")
    @classmethod
    def _usable_trace(cls, text: str) -> str:
        try:
            at_start(text)
        except Failure as failure:
            raise ValueError(failure.message) from failure
        return text

    @property
    def repository_dirs(self) -> list[Path]:
        """The folders of `repository`."""
        parts = (part.strip() for part in self.repository.split(","))
        return [Path(part).expanduser().absolute() for part in parts if part]

    @property
    def repository_dir(self) -> Path:
        """The repository's root folder."""
        return self.home / "repository"

    @property
    def importable_dir(self) -> Path | None:
        """Where files may lie that management calls name."""
        return self.import_dir or (_SAGEMAKER_MODELS if self.models_api == "sagemaker" else None)


_SAGEMAKER_MODELS = Path("/opt/ml/models")
#: fields whose values no message may repeat
_SECRETS = frozenset({"admin_key", "redis_url"})
ADMIN_KEY = "MILLSTREAM_ADMIN_KEY"


def read_settings() -> Settings:
    """The settings of this process. Raises Failure(INVALID), one line that names the variable."""
    try:
        return Settings()
    except ValidationError as error:
        name, problem = explain(error)
        raise invalid(f"MILLSTREAM_{name.upper()}: {problem}") from None


def explain(error: ValidationError) -> tuple[str, str]:
    """The field that `error` is about, and what is wrong with it. A secret's value is not repeated."""
    first: Any = error.errors()[0]
    name = str(first["loc"][0]).lower().removeprefix("millstream_") if first["loc"] else "settings"
    message = first["msg"].removeprefix("Value error, ")
    problem = f"{message[0].lower()}{message[1:]}"
    return name, problem if name in _SECRETS else f"{problem}, got {first['input']!r}"


def child_environment(overrides: dict[str, str], without: frozenset[str] = frozenset()) -> dict[str, str]:
    """The environment for a child process: this one's but for the names in `without`, with `MILLSTREAM_…` overrides."""
    return {name: value for name, value in {**os.environ, **overrides}.items() if name not in without}
