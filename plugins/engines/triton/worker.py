"""The Triton backend: forwards each run over gRPC to a server that speaks Triton's protocol, Millstream included.

load ─> connect ─> is the model ready? is its metadata the signature? ─> run: raw tensors ─> ModelInfer ─> raw tensors
the server is gone ─> `lost` ─> the worker unloads the model, and loads it again when the server is back

The model file is JSON: {"url": "grpcs://host:8001", "model": "resnet", "version": "", "timeout_s": 60}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from millstream.plugins.engines.triton.health import ServerHealth
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES, NUMPY, decode_elements, encode_elements
from millstream.services.model.signature import Signature
from millstream.workers.backends.base import Array, Options, Stop, Terminated
from millstream.workers.backends.engine_parts import CheckedInputs, CpuBackend, whole_import

FORMAT = "triton"
LIMIT_S_MIN = 0.001  # of a run whose callers' deadline has just passed
READY_S_MAX = 1.0  # for the server to say whether the model is ready
LOAD_S_MAX = 10.0  # for the server to answer one question of a load
MESSAGE_BYTES_MAX = 2**31 - 1  # of gRPC
REFUSALS_MAX = 3  # checks in a row that fail, or have no answer, until a model counts as gone; at once if unreachable
#: A connection that was silent for so long is pinged, so that one is closed whose machine is gone; gRPC waits a minute
#: for the answer, which comes behind the tensors that are on their way.
KEEPALIVE_MS = 5_000
RECONNECT_MS_MAX = 1_000  # pause between two tries to connect: a server that is back serves at once
MESSAGE_CHARACTERS_MAX = 1000


class Remote(BaseModel):
    """The contents of a model file of this backend."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(min_length=1, max_length=1024, description="HOST:PORT of its gRPC; grpcs://HOST:PORT: with TLS.")
    model: str = Field(min_length=1, max_length=1024, description="The model's name on the server.")
    version: str = Field("", max_length=64, description="Its version; empty: the server's choice.")
    timeout_s: float = Field(60, gt=0, le=3600, description="A longer run fails, whatever its callers' deadlines.")


def _library() -> tuple[Any, Any, Any]:
    """Return the modules grpc, tritonclient.grpc.service_pb2 and service_pb2_grpc. Raises Failure(UNAVAILABLE)."""
    try:
        with whole_import("grpc", "tritonclient"):
            import grpc
            from tritonclient.grpc import service_pb2, service_pb2_grpc
    except ImportError as error:
        raise Failure(
            Code.UNAVAILABLE, f"tritonclient cannot be imported ({error}): install millstream[triton]"
        ) from error
    return grpc, service_pb2, service_pb2_grpc


def _channel(grpc: Any, url: str) -> Any:
    """Return a channel, with TLS for grpcs://. Raises Failure(MODEL), Failure(UNAVAILABLE) if the CA cannot be read."""
    options = [
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS_MAX),
        ("grpc.use_local_subchannel_pool", 1),  # else a new connection inherits the backoff of a failed one
        ("grpc.enable_http_proxy", 0),
    ]
    scheme, separator, address = url.rpartition("://")
    if separator and scheme not in {"grpc", "grpcs"}:
        raise Failure(Code.MODEL, f"triton: the url begins with {scheme[:20]!r}, not with grpc:// or grpcs://")
    if scheme != "grpcs":
        return grpc.insecure_channel(address, options)
    # Trusts what gRPC brings, or the file that GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names.
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(), options)


def _raw(array: Array, datatype: str) -> bytes:
    return encode_elements(array.ravel().tolist()) if datatype == BYTES else np.ascontiguousarray(array).tobytes()


def _array(raw: bytes, datatype: str, shape: Sequence[int]) -> Array:
    """Return a tensor of a reply. Raises ValueError if its bytes do not fit its shape."""
    if datatype == BYTES:
        return np.array(decode_elements(raw), dtype=object).reshape(shape)
    return np.frombuffer(raw, NUMPY[datatype]).reshape(shape).copy()


class TritonInstance:
    """A model on another server, over a connection of its own."""

    def __init__(
        self,
        remote: Remote,
        signature: Signature,
        stop: Stop | None,
        health: ServerHealth,
    ) -> None:
        self._grpc, self._messages, services = _library()
        self._remote = remote
        self._signature = signature
        self._inputs = {spec.name: spec.datatype for spec in signature.inputs}
        self._checked = CheckedInputs("Triton", signature)
        self._call: Any = None  # in progress
        self._terminating = False
        self.size_bytes = 0  # in another process, with a budget of its own
        self.lost = ""
        self._refusals = 0  # checks in a row that failed, or had no answer
        self._health = health
        self._limit_s = float("inf")  # of the next run
        self._channel: Any = _channel(self._grpc, remote.url)
        self._stub = services.GRPCInferenceServiceStub(self._channel)
        if stop is not None:
            stop.on_request(self._channel.close)
        try:
            self._check_server(stop)
            health.add(self)
        except BaseException:
            self.close()
            raise

    def check(self, stub: Any) -> bool:
        """Ask the server over `stub` whether it serves the model; set `lost` if it does not. False: no answer."""
        try:
            ready = stub.ModelReady(self._ready_question(), timeout=READY_S_MAX).ready
        except self._grpc.RpcError as error:
            self._refusals += 1
            if error.code() is self._grpc.StatusCode.UNAVAILABLE or self._refusals >= REFUSALS_MAX:
                self._lost(_details(error))
            return error.code() is not self._grpc.StatusCode.DEADLINE_EXCEEDED
        self._refusals = 0
        if not ready:
            self._lost("it is not ready there")
        elif self.lost:  # it is back before it was unloaded here
            with suppress(Failure, self._grpc.RpcError):  # perhaps as another model
                self._check_tensors(stub)
                self.lost = ""
        return True

    def lose(self, reason: str) -> None:
        """Count the server as gone, and end the run in progress: the other models of the worker wait for it."""
        self._lost(reason)
        call = self._call
        if call is not None:
            call.cancel()

    def _lost(self, reason: str) -> None:
        self.lost = f"{self._where}: the model {self._remote.model!r}: {reason}"

    @property
    def _where(self) -> str:
        return f"the server {self._remote.url}"

    def _check_server(self, stop: Stop | None) -> None:
        """Raise Failure(UNAVAILABLE) if the model is not ready there, Failure(MODEL) if it is another one."""
        try:
            if not self._ask_ready(LOAD_S_MAX):
                raise Failure(Code.UNAVAILABLE, f"{self._where}: the model {self._remote.model!r} is not ready")
            self._check_tensors(self._stub)
        except (self._grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed
            if stop is not None and stop.reason:
                raise Failure(Code.MODEL, stop.reason) from error
            raise Failure(Code.UNAVAILABLE, f"{self._where}: {_details(error)}") from error

    def _check_tensors(self, stub: Any) -> None:
        """Raise Failure(MODEL) if the model there has other inputs and outputs than here, and what gRPC raises."""
        name, version = self._remote.model, self._remote.version
        question = self._messages.ModelMetadataRequest(name=name, version=version)
        metadata = stub.ModelMetadata(question, timeout=LOAD_S_MAX)
        found = {tensor.name: tensor.datatype for tensor in (*metadata.inputs, *metadata.outputs)}
        for spec in (*self._signature.inputs, *self._signature.outputs):
            if found.get(spec.name) != spec.datatype:
                raise Failure(
                    Code.MODEL,
                    f"{self._where}: tensor {spec.name!r} of the model {name!r} is {found.get(spec.name, 'missing')}, "
                    f"and the signature says {spec.datatype}",
                )

    def _ask_ready(self, timeout_s: float) -> bool:
        return bool(self._stub.ModelReady(self._ready_question(), timeout=timeout_s).ready)

    def _ready_question(self) -> Any:
        return self._messages.ModelReadyRequest(name=self._remote.model, version=self._remote.version)

    def _ready(self) -> bool:
        try:
            return self._ask_ready(READY_S_MAX)
        except self._grpc.RpcError:
            return False

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        if self._channel is None:
            raise Failure(Code.UNAVAILABLE, "the model was unloaded")
        if self.lost:  # each further run would take the time in which a connection is given up
            raise Failure(Code.UNAVAILABLE, self.lost)
        request = self._request(inputs)
        try:
            timeout_s, self._limit_s = min(self._remote.timeout_s, self._limit_s), float("inf")
            self._call = self._stub.ModelInfer.future(request, timeout=timeout_s)
            if self._terminating:
                self._call.cancel()
            reply = self._call.result()
        except self._grpc.FutureCancelledError as error:
            raise self._cancelled() from error
        except self._grpc.RpcError as error:
            raise self._failure(error) from error
        finally:
            self._call = None
        return self._outputs(reply)

    def _cancelled(self) -> Exception:
        """Return what a cancelled run raises: it was terminated, or its server is gone."""
        if self.lost and not self._terminating:
            return Failure(Code.UNAVAILABLE, self.lost)
        self._terminating = False
        return Terminated()

    def _request(self, inputs: Mapping[str, Array]) -> Any:
        self._checked.check(inputs)
        request = self._messages.ModelInferRequest(model_name=self._remote.model, model_version=self._remote.version)
        for name, array in inputs.items():
            datatype = self._inputs[name]
            request.inputs.add(name=name, datatype=datatype, shape=array.shape)
            request.raw_input_contents.append(_raw(array, datatype))
        for spec in self._signature.outputs:
            request.outputs.add(name=spec.name)
        return request

    def _outputs(self, reply: Any) -> list[Array]:
        """Return the outputs in the signature's order. Raises Failure(MODEL) if the reply is incomplete or wrong."""
        found = dict(zip((output.name for output in reply.outputs), reply.raw_output_contents, strict=False))
        shapes = {output.name: (output.datatype, tuple(output.shape)) for output in reply.outputs}
        outputs = []
        for spec in self._signature.outputs:
            datatype, shape = shapes.get(spec.name, ("missing", ()))
            if spec.name not in found or datatype != spec.datatype:
                raise Failure(Code.MODEL, f"{self._where}: output {spec.name!r} is {datatype}, not {spec.datatype}")
            try:
                outputs.append(_array(found[spec.name], datatype, shape))
            except ValueError as error:
                raise Failure(Code.MODEL, f"{self._where}: output {spec.name!r}: {error}") from error
        return outputs

    def _failure(self, error: Any) -> Failure:
        """Return what the status of a failed call means here."""
        codes, status, details = self._grpc.StatusCode, error.code(), _details(error)
        if status in {codes.UNAVAILABLE, codes.NOT_FOUND}:
            reason = f"{self._where}: {details}"
            if not self._ready():  # else it is only busy
                self.lost = reason
            return Failure(Code.UNAVAILABLE, reason)
        if status is codes.DEADLINE_EXCEEDED:
            return Failure(Code.EXPIRED, f"{self._where} took longer than the callers wait, or than timeout_s")
        if status is codes.RESOURCE_EXHAUSTED:
            return Failure(Code.OVERLOADED, f"{self._where}: {details}")
        return Failure(Code.MODEL, f"{self._where}: {details}")

    def limit(self, seconds: float) -> None:
        """Give up the next run, there and here, after this time: its callers wait no longer."""
        self._limit_s = max(LIMIT_S_MIN, seconds)

    def terminate(self) -> None:
        self._terminating = True
        call = self._call
        if call is not None:
            call.cancel()

    def rebuild(self) -> None:
        """Do nothing: runs leave no memory behind here."""

    def close(self) -> None:
        self._health.remove(self)
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _details(error: Any) -> str:
    details = getattr(error, "details", None)
    text = details() if callable(details) else str(error)
    return " ".join(str(text).split())[:MESSAGE_CHARACTERS_MAX] or type(error).__name__


class Triton(CpuBackend):
    """Loads model files that name a server. `device` is "cpu": what device the server uses is its own affair."""

    name = title = "triton"
    known: ClassVar[Mapping[str, type]] = {}
    formats = frozenset({FORMAT})
    forwards = True

    def __init__(self, home: Path | None = None) -> None:
        super().__init__(home)
        self._health: dict[str, ServerHealth] = {}  # by server

    def prepare(self, device: str) -> None:
        """Import tritonclient. Raises Failure(UNAVAILABLE) if it is not installed."""
        _library()

    def check_signature(self, signature: Signature) -> None:
        """Take every type: the server has the model."""

    def open(
        self, path: Path, signature: Signature, threads: int, options: Options, stop: Stop | None
    ) -> TritonInstance:
        """Connect to the server. Raises Failure(UNAVAILABLE) if it does not serve the model, Failure(MODEL)."""
        try:
            remote = Remote.model_validate(json.loads(path.read_bytes()))
        except (OSError, ValueError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            raise Failure(Code.MODEL, f"triton: {path.name}: {why}") from error
        return TritonInstance(remote, signature, stop, self._health_of(remote.url))

    def _health_of(self, url: str) -> ServerHealth:
        def connect() -> tuple[Any, Callable[[], None]]:
            grpc, _, services = _library()
            channel = _channel(grpc, url)
            return services.GRPCInferenceServiceStub(channel), channel.close

        return self._health.setdefault(url, ServerHealth(connect))
