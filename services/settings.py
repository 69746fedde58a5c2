"""The settings of all processes, read from the environment (`MILLSTREAM_<FIELD>`); plug-ins add theirs.

A secret may also be the content of a file, which MILLSTREAM_<FIELD>_FILE names (secret_files.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from millstream.services.allowed_hosts import parse_hosts, parse_origins
from millstream.services.environment import CLIENT_VARIABLES, ENVIRONMENT, PORT, platform_port
from millstream.services.errors import Failure, invalid
from millstream.services.nearest_names import did_you_mean
from millstream.services.plugin.registry import contributions
from millstream.services.process.machine_share import parse_memory
from millstream.services.secret_files import SecretFiles, file_variable

T = TypeVar("T")

MIB = 1 << 20
#: A JSON document has at most a value for so many bytes of its limit: a value takes about 100 bytes of memory.
JSON_BYTES_OF_VALUE = 16
#: of requests, unless a run may take longer
REQUEST_TIMEOUT_S_MAX = 600.0
#: a conversion may take so many times as long as the check of a model
IMPORT_SHARE = 5
#: a conversion keeps the upload, what it was packed in, and what is made of it
IMPORT_COPIES = 4
# What clients change while an installation runs: files in the folder `run` of its home, deleted at the next start.
CLIENT_SETTINGS = "*-settings.json"
LOG_LEVELS = "log-levels.json"

LogFormat = Literal["text", "json"]
#: names of installations: they are part of Redis keys and of file names
INSTALLATION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"


class Settings(BaseSettings):
    """Settings, validated when they are built: an invalid value stops the process at start and names the field."""

    model_config = SettingsConfigDict(
        env_prefix="MILLSTREAM_", frozen=True, extra="forbid", populate_by_name=True, hide_input_in_errors=True
    )

    home: Path = Field(Path(".millstream"), description="Folder of all files that are kept: repository, sockets, logs.")
    installation_name: str | None = Field(
        None,
        pattern=INSTALLATION_PATTERN,
        description="Name of the installation in Redis keys and shared memory. Processes with one name share queues. "
        "Unset: a random name, stored in the repository.",
    )
    plugins: str = Field(
        "all",
        description="Plug-ins that are on: `all`, `none`, names (`openai,fleet`), or which to leave out (`-openai`).",
    )
    redis_url: SecretStr | None = Field(
        None, description="URL of a Redis or of its Sentinels. Unset: an embedded Redis."
    )
    admin_key: SecretStr | None = Field(
        None,
        description="Bearer key with all rights. Beside it there are API keys, and on this machine the token in "
        "`run/token` of `home`.",
    )
    keys: Literal["enforce", "warn"] = Field(
        "enforce",
        description="`warn`: calls that were open before the first API key are still served without a right one, and "
        "counted by reason (`millstream_key_requests_total`); limits do not hold. `enforce`: they are refused.",
    )
    open_control: bool = Field(
        False,
        description="Whether callers may change things without a key while there is no API key, over the protocols of "
        "other servers: Triton's load, unload, shared memory and settings, TorchServe's /models. Never the admin API.",
    )
    metrics_key: SecretStr | None = Field(
        None,
        description="Bearer key of `GET /metrics` alone, for Prometheus. It does not end, and limits nothing: without "
        "API keys anyone may read metrics.",
    )
    access_secret: SecretStr | None = Field(
        None,
        min_length=32,
        description="Secret from which the secrets of API keys are derived, at least 32 characters; the same in all "
        "gateways. Unset: a random one, in the file `access.key` of `home`.",
    )
    gateways: int = Field(
        1,
        ge=0,
        le=64,
        description="Number of gateway processes; 0: workers alone, for gateways of other hosts with the same Redis.",
    )
    pools: str = Field(
        "cpu=1",
        description="Worker pools as NAME=WORKERS, comma separated; after a pool the options of its workers: "
        "`gpu=1,device=cuda:0,device_memory=14GiB,threads=4,memory=16GiB,backend=onnxruntime,cpu=2`. "
        "`cpu=1:4`: the controller decides between 1 and 4; `cpu=0:4`: none while no request comes.",
    )
    drain_s: float = Field(
        30, gt=0, description="Seconds that a shutdown may take; accepted requests are answered first."
    )
    drain_delay_s: float = Field(
        5,
        ge=0,
        le=300,
        description="Seconds after SIGTERM for which a server that is no longer ready accepts connections, until load "
        "balancers know; then it drains. Not after SIGINT.",
    )

    preload: str = Field(
        "",
        description="Models to load at start as NAME=PATH, comma separated, beside the digits example; `none` among "
        "them: without that.",
    )

    host: str = Field("127.0.0.1", description="Address that gateways listen on.")
    http_port: int = Field(
        8000,
        ge=0,
        le=65535,
        description="Port for HTTP; 0: any free port. Unset: `PORT`, which platforms set, else the default.",
    )
    http_keep_alive_s: float = Field(75, gt=0, description="Seconds after which an idle HTTP connection is closed.")
    grpc_port: int = Field(
        8001,
        ge=-1,
        le=65535,
        description="Port for gRPC; that of HTTP: it answers both; 0: any free port, -1: no gRPC.",
    )
    tls_cert_file: Path | None = Field(
        None,
        description="Certificate of the server with its intermediates (PEM), for HTTP and gRPC. Read again when it "
        "changes. Unset: no TLS.",
    )
    tls_key_file: Path | None = Field(None, description="Private key of the certificate (PEM, without a passphrase).")
    tls_client_ca_file: Path | None = Field(
        None,
        description="Certificates (PEM) of the authorities that sign clients' certificates: clients without one are "
        "refused. Unset: clients need none.",
    )
    server_timing: bool = Field(
        False,
        description="Add `Server-Timing` to replies to inference requests: milliseconds in the lane, in the queue and "
        "in the run.",
    )
    allowed_hosts: str = Field(
        "",
        description="Names in the public DNS by which callers without a key reach the server, comma separated; "
        "`*.example.org`: all names below it; `*`: any. Addresses, local names and names in a cluster always count.",
    )
    cors_origins: str = Field(
        "",
        description="Origins whose web pages may call the server, comma separated, as `https://HOST[:PORT]`; `*`: all, "
        "without credentials. Unset: none.",
    )
    client_connections_max: int = Field(
        4096, ge=1, description="Open connections of one gateway, for HTTP and gRPC each."
    )
    client_stall_s_max: float = Field(
        60,
        gt=0,
        description="Grace period in seconds for clients that send below 64 KiB/s or do not read their reply.",
    )

    request_bytes_max: int = Field(
        64 * MIB,
        ge=1024,
        description="Largest body of an inference request, after decompression. Its JSON without long lists of numbers "
        "may have 16 MiB of that, or a quarter.",
    )
    reply_bytes_max: int = Field(
        256 * MIB, ge=1024, description="Largest outputs of one request, and of one batch that is sent through Redis."
    )
    upload_bytes_max: int = Field(
        4096 * MIB,
        ge=1024,
        description="Largest model upload; all files of its conversion together may take four times as much.",
    )
    versions_kept: int = Field(
        0,
        ge=0,
        description="Newest versions of a model that stay when another is uploaded, beside the active and the previous "
        "one; older ones are deleted. 0: all stay.",
    )
    inflight_requests_max: int = Field(4096, ge=1, description="Requests in flight in one gateway.")
    inflight_bytes_max: int = Field(
        1024 * MIB,
        ge=1024,
        description="Bytes of the requests that one gateway is receiving, of those that it has admitted, and of "
        "replies that clients have not read.",
    )
    queue_rows_max: int = Field(
        8192,
        ge=1,
        description="Rows that may wait in one lane of one gateway; of a request that runs in parts, the next parts.",
    )
    queue_direct: bool = Field(
        True,
        description="Send short batches to idle workers on the gateway's host directly, without a trip through Redis.",
    )
    queue_lease_s: float = Field(
        2, ge=0.1, description="Seconds without a heartbeat after which a worker loses its leases."
    )

    reply_port: int = Field(
        -1,
        ge=-1,
        le=65535,
        description="Port on which a gateway takes replies of workers on other hosts, without a trip through Redis, on "
        "the address by which it reaches Redis; the next free one, if several gateways share a host. 0: any free port, "
        "-1: these replies go through Redis.",
    )

    shm_dir: Path = Field(Path("/dev/shm"), description="Folder of shared memory segments and reply sockets.")
    shm_bytes_max: int = Field(256 * MIB, ge=0, description="Shared memory of one gateway; 0: none.")

    worker_memory: str | None = Field(
        None,
        description="Memory of one worker process, like `8GiB`, or of the workers of single pools, like "
        "`cpu=8GiB,gpu=16GiB`; 0: no limit. Unset: an equal share of 80 % of the memory of the machine or container.",
    )
    worker_load_s_max: float = Field(
        600, gt=0, description="Seconds that loading a version may take; its warm-up runs, half of them."
    )
    worker_run_s_max: float = Field(
        600,
        gt=0,
        description="Seconds that one run of a model may take; the deadline of a request may end it earlier. A "
        "request may set a timeout of this, or of 600 s.",
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port for /metrics, /ready and /live of a worker or controller that was started alone, or of "
        "`millstream up --gateways 0`; 0: none.",
    )

    check_s_max: float = Field(
        120,
        gt=0,
        description="Seconds that the check of an uploaded model may take; five times as long for its conversion.",
    )
    check_memory_bytes_max: int = Field(
        8192 * MIB,
        ge=64 * MIB,
        description="Memory of the check of an uploaded model; twice as much for its conversion.",
    )
    unconfined_imports: Literal["refuse", "accept"] = Field(
        "refuse",
        description="What may execute code, such as pickles, where the kernel confines no process: `accept` it.",
    )
    import_code: Literal["never", "admin", "writers"] = Field(
        "admin",
        description="Who may upload with `allow_pickle` or `allow_code`, and functions of Python, which execute code: "
        "`never` nobody, `admin` keys with `models:code` (or `admin`), `writers` all who may upload.",
    )
    live_check_one_in: int = Field(
        10_000,
        ge=0,
        description="One in this many shared runs of a version is compared with runs of one row, in idle time; "
        "0: none.",
    )

    metrics_models_max: int = Field(
        200,
        ge=1,
        description="Models with series of their own on the metrics page, the busiest of the last minutes; all others "
        "share the label value `other`.",
    )
    log_format: LogFormat = Field(
        "text", description="Form of log lines: `text`, or `json` for one JSON object a line on standard output."
    )

    access_log: Literal["off", "file", "stdout"] = Field(
        "off",
        description="A line for each finished request: `file` in `logs` in `home`, with a size limit, or `stdout`.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the signature is given
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in falling priority: arguments, environment, files of secrets, `PORT`."""
        platform = InitSettingsSource(settings_cls, {} if (port := platform_port()) is None else {"http_port": port})
        return init_settings, env_settings, SecretFiles(settings_cls, ENVIRONMENT, SECRETS), platform

    @field_validator("admin_key", "metrics_key", mode="after")
    @classmethod
    def _usable_key(cls, key: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        """Refuse an empty key, which any caller would know, and characters that a header cannot carry."""
        text = "x" if key is None else key.get_secret_value()
        name = str(info.field_name).replace("_", " ")
        if not text.strip():
            raise ValueError(f"the {name} is empty: unset it, or set it to a secret of your choice")
        if not all("!" <= character <= "~" for character in text):
            raise ValueError(f"the {name} may have visible ASCII characters only, no spaces or line breaks")
        return key

    @field_validator(
        "tls_cert_file",
        "tls_key_file",
        "tls_client_ca_file",
        mode="before",
    )
    @classmethod
    def _named_file(cls, path: object) -> object:
        """Take "" for unset: compose files pass on variables that may be empty."""
        return None if path == "" else path

    @field_validator("worker_memory", mode="after")
    @classmethod
    def _usable_memory(cls, text: str | None) -> str | None:
        """Refuse sizes that are none at start; "" counts as unset."""
        if not text or not text.strip():
            return None
        try:
            parse_memory(text)
        except Failure as failure:
            raise ValueError(failure.message.partition(": ")[2]) from failure
        return text

    @field_validator("cors_origins", mode="after")
    @classmethod
    def _usable_origins(cls, text: str) -> str:
        parse_origins(text)
        return text

    @field_validator("allowed_hosts", mode="after")
    @classmethod
    def _usable_hosts(cls, text: str) -> str:
        parse_hosts(text)
        return text

    @property
    def allowed_host_list(self) -> list[str]:
        """The names of `allowed_hosts`."""
        return parse_hosts(self.allowed_hosts)

    @property
    def cors_origin_list(self) -> list[str]:
        """The origins of `cors_origins`."""
        return parse_origins(self.cors_origins)

    @property
    def serves_grpc(self) -> bool:
        """Whether there is gRPC, on a port of its own or on that of HTTP."""
        return self.grpc_port >= 0

    @property
    def grpc_on_http_port(self) -> bool:
        """Whether one port answers HTTP/1.1 and gRPC."""
        return 0 < self.grpc_port == self.http_port

    @property
    def json_values_max(self) -> int:
        """Values in the JSON document of a request; a list or an object counts as 8, a key as 3."""
        return self.json_bytes_max // JSON_BYTES_OF_VALUE

    @property
    def json_bytes_max(self) -> int:
        """Largest JSON document of a request, without the long lists of numbers in it."""
        return max(self.request_bytes_max // 4, min(self.request_bytes_max, 16 * MIB))

    @property
    def request_timeout_s_max(self) -> float:
        """Longest timeout that a request may set."""
        return max(REQUEST_TIMEOUT_S_MAX, self.worker_run_s_max)

    @property
    def import_s_max(self) -> float:
        """Seconds that the conversion of an uploaded model of another framework may take."""
        return IMPORT_SHARE * self.check_s_max

    @property
    def reply_unread_bytes_max(self) -> int:
        """Bytes of replies that one gateway buffers for clients that have not read them."""
        return self.inflight_bytes_max

    @property
    def worker_warm_up_s_max(self) -> float:
        """Seconds that all warm-up runs of a version together may take."""
        return self.worker_load_s_max / 2

    @property
    def import_memory_bytes_max(self) -> int:
        """Memory of a conversion: a framework holds a model and what it makes of it."""
        return 2 * self.check_memory_bytes_max

    @property
    def import_disk_bytes_max(self) -> int:
        """All files of a conversion together, the uploaded ones among them."""
        return IMPORT_COPIES * self.upload_bytes_max

    @property
    def repository_dir(self) -> Path:
        """Root folder of the repository."""
        return self.home / "repository"


#: fields whose values are not shown in messages, and which may come from a file
SECRETS = frozenset(name for name, field in Settings.model_fields.items() if field.annotation == SecretStr | None)
PREFIX = "MILLSTREAM_"
ADMIN_KEY = f"{PREFIX}ADMIN_KEY"
ACCESS_SECRET = f"{PREFIX}ACCESS_SECRET"
METRICS_KEY = f"{PREFIX}METRICS_KEY"
#: variables that name files of secrets
SECRET_FILES = frozenset(map(file_variable, SECRETS))
_NAME_CHARACTERS_MAX = 128  # of an unknown variable's name in a message
#: variables that Kubernetes sets in each container for a Service whose name starts with "millstream"
_OF_A_SERVICE = re.compile(r"_SERVICE_(?:HOST|PORT(?:_\w+)?)$|_PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?$")
_ADDRESS_OF_A_SERVICE = re.compile(r"(?:tcp|udp|sctp)://[\d.:\[\]a-f]+$")


@cache
def settings_class() -> type[Settings]:
    """Return the settings of the core and of the plug-ins that are on: one class with the fields of all.

    Raises Failure: a plug-in cannot be loaded.
    """
    added = contributions("settings", type)
    return type("Settings", (*added, Settings), {"__module__": __name__}) if added else Settings


def settings_of(settings: object, plugin: type[T]) -> T:
    """Return the part of a process's settings that a plug-in added, typed as its class."""
    assert isinstance(settings, plugin)
    return settings


def has_tls() -> bool:
    """Return whether a certificate is set. Reads no file: a damaged one must not fail the health check of a server."""
    return bool(ENVIRONMENT.get(f"{PREFIX}TLS_CERT_FILE"))


def read_settings() -> Settings:
    """Return the settings of this process. Raises Failure(INVALID) with one line that names the variable."""
    try:
        return settings_class()()
    except ValidationError as error:
        name, problem = explain(error)
        raise invalid(f"{variable_of(name)}: {problem}") from None


def variable_of(name: str) -> str:
    """Return the variable of the environment that a field's value was read from, or would be."""
    if name in SECRETS and file_variable(name) in ENVIRONMENT:
        return file_variable(name)
    return variables().get(name, name.upper())


@cache
def variables() -> dict[str, str]:
    """Return the variable of each field: MILLSTREAM_NAME, or the one that a platform sets."""
    aliases = {name: field.validation_alias for name, field in settings_class().model_fields.items()}
    return {name: one if isinstance(one, str) else f"{PREFIX}{name.upper()}" for name, one in aliases.items()}


def check_platform_port() -> None:
    """Raise Failure(INVALID) if this process would listen on the port in `PORT`, and that is none."""
    if PORT in ENVIRONMENT and "MILLSTREAM_HTTP_PORT" not in ENVIRONMENT and platform_port() is None:
        raise invalid(f"{PORT}: input should be a port from 0 to 65535, got {ENVIRONMENT[PORT][:80]!r}")


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return a line for each MILLSTREAM_ variable that is no setting, with the settings that were perhaps meant.

    Warnings, not errors: Kubernetes sets such variables for its Services, and another release may know others.

    Args:
        environment: the variables; None: those of this process.
    """
    known = {*variables().values(), *SECRET_FILES, *CLIENT_VARIABLES}
    given = ENVIRONMENT if environment is None else environment
    return [
        f"{name[:_NAME_CHARACTERS_MAX]} is no setting and has no effect{did_you_mean(name, known)}"
        for name in sorted(given)
        if name.startswith(PREFIX) and name not in known and not _of_a_service(name, given[name])
    ]


def _of_a_service(name: str, value: str) -> bool:
    return bool(_OF_A_SERVICE.search(name) or _ADDRESS_OF_A_SERVICE.match(value))


def explain(error: ValidationError) -> tuple[str, str]:
    """Return the field that `error` is about, and the problem. The value of a secret is not shown."""
    first: Any = error.errors()[0]
    name = str(first["loc"][0]).lower().removeprefix("millstream_") if first["loc"] else "settings"
    message = first["msg"].removeprefix("Value error, ")
    problem = f"{message[0].lower()}{message[1:]}"
    if name in SECRETS:
        return name, problem
    problem = f"{problem}, got {first['input']!r}"
    if isinstance(first["input"], str) and _ADDRESS_OF_A_SERVICE.match(first["input"]):
        problem += "; Kubernetes sets it for a Service of this name: set enableServiceLinks: false in the pod"
    return name, problem


def changed_settings(settings: Settings) -> dict[str, str]:
    """Return the settings that differ from their defaults, by field, as text. Of a secret only that it is set."""
    changed = {}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value != field.default:
            changed[name] = "(set)" if name in SECRETS else str(value)
    return changed
