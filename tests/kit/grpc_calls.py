"""Generates varied gRPC calls, the same for the same seed, and records what a client sees of them.

calls(seed, count) ─> played(target, calls) ─> Outcome of each
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import serialize_byte_tensor

from millstream.services.model.datatypes import NUMPY

SERVICE = "/inference.GRPCInferenceService/"
KINDS = (*sorted(set(NUMPY) - {"BF16"}), "BYTES")
CALLS_AT_ONCE = 16
REQUEST_ID = "x-request-id"
_FIELDS = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_COMPRESSIONS = (None, None, grpc.Compression.Gzip, grpc.Compression.Deflate)


class Call(NamedTuple):
    """A call of GRPCInferenceService. Several messages: of ModelStreamInfer."""

    method: str
    messages: tuple[bytes, ...]
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    timeout_s: float | None = None
    compression: grpc.Compression | None = None


class Outcome(NamedTuple):
    """What a client sees of a call. Request ids that it did not send are blank."""

    messages: tuple[bytes, ...]
    code: grpc.StatusCode
    details: str
    initial: tuple[tuple[str, Any], ...]
    trailing: tuple[tuple[str, Any], ...]


def calls(seed: int, count: int) -> list[Call]:
    """Return calls to the models `add`, `kinds` and `wide` of tests/integration/test_grpc_same_calls.py."""
    chance = random.Random(seed)
    return [_call(chance) for _ in range(count)]


def _call(chance: random.Random) -> Call:
    make = chance.choices((_infer, _stream, _query, _garbage), (80, 5, 10, 5))[0]
    method, messages = make(chance)
    timeout_s = chance.choice((None, None, 500.0, 300.5, 4000.0))
    return Call(method, messages, _metadata(chance), timeout_s, chance.choice(_COMPRESSIONS))


def _infer(chance: random.Random) -> tuple[str, tuple[bytes, ...]]:
    return "ModelInfer", (_message(chance),)


def _stream(chance: random.Random) -> tuple[str, tuple[bytes, ...]]:
    return "ModelStreamInfer", tuple(_message(chance) for _ in range(chance.randint(0, 6)))


def _garbage(chance: random.Random) -> tuple[str, tuple[bytes, ...]]:
    body = _message(chance)
    cut = body[: chance.randrange(len(body))]
    return chance.choice(("ModelInfer", "ModelReady", "NoSuchMethod")), (chance.choice((b"", b"\xff\xff", cut)),)


def _query(chance: random.Random) -> tuple[str, tuple[bytes, ...]]:
    name, version = chance.choice(("add", "kinds", "nothing")), chance.choice(("", "1", "7", "x"))
    method = chance.choice(("ServerLive", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig"))
    kind = getattr(pb, f"{method}Request")
    fields = {"name": name, "version": version} if method.startswith("Model") else {}
    return method, (kind(**fields).SerializeToString(),)


def _metadata(chance: random.Random) -> tuple[tuple[str, str | bytes], ...]:
    known: list[tuple[str, str | bytes]] = [
        (REQUEST_ID, f"id-{chance.randrange(1000)}"),
        ("accept-encoding", chance.choice(("gzip", "deflate", "br", "identity"))),
        ("mine", "a value"),
        ("mine-bin", bytes(range(20))),
    ]
    return tuple(chance.sample(known, chance.choice((0, 0, 0, 1, 2))))


def _message(chance: random.Random) -> bytes:
    request = chance.choices((_add, _kinds, _wide), (5, 3, 2))[0](chance)
    if chance.random() < 0.2:
        request.id = chance.choice(("7", "müller", "x" * 300))
    if chance.random() < 0.2:
        name = {"add": "sum", "kinds": "y3", "wide": "y"}[request.model_name]
        request.outputs.add(name=chance.choice((name, name, "unknown")))
    if chance.random() < 0.2:
        request.parameters["priority"].int64_param = chance.choice((0, 1, -1))
    if chance.random() < 0.2:
        chance.choice(_FAULTS)(chance, request)
    return bytes(request.SerializeToString(deterministic=True))


def _add(chance: random.Random) -> Any:
    rows = chance.choice((1, 1, 1, 2, 5))
    request = pb.ModelInferRequest(model_name="add", model_version=chance.choice(("", "1")))
    typed = chance.random() < 0.3
    for name in ("a", "b"):
        _input(chance, request, name, "FP32", (rows, 4), typed=typed)
    return request


def _kinds(chance: random.Random) -> Any:
    request = pb.ModelInferRequest(model_name="kinds")
    for number, datatype in enumerate(KINDS):
        _input(chance, request, f"x{number}", datatype, (chance.choice((1, 2)), 3), typed=False)
    if chance.random() < 0.5:  # of as many rows, so that some are refused and some are not
        for one in request.inputs:
            one.shape[0] = request.inputs[0].shape[0]
    return request


def _wide(chance: random.Random) -> Any:
    request = pb.ModelInferRequest(model_name="wide")
    columns = chance.choice((1, 100, 4096, 50_000))
    _input(chance, request, "x", "FP32", (chance.choice((1, 3)), columns), typed=columns == 100)
    return request


def _input(
    chance: random.Random, request: Any, name: str, datatype: str, shape: tuple[int, ...], *, typed: bool
) -> None:
    numbers = np.random.default_rng(chance.randrange(1 << 30)).integers(0, 2, shape)
    tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
    if typed:
        getattr(tensor.contents, _FIELDS[datatype]).extend(numbers.ravel().tolist())
    elif datatype == "BYTES":
        words = np.array([f"é{number}" for number in numbers.ravel()], object)
        request.raw_input_contents.append(serialize_byte_tensor(words).tobytes())
    else:
        request.raw_input_contents.append(numbers.astype(NUMPY[datatype]).tobytes())


def _other_model(_: random.Random, request: Any) -> None:
    request.model_name = "nothing"


def _other_version(chance: random.Random, request: Any) -> None:
    request.model_version = chance.choice(("9", "abc", "-1"))


def _other_datatype(chance: random.Random, request: Any) -> None:
    request.inputs[0].datatype = chance.choice(("INT32", "FP64", "FLOAT", ""))


def _other_shape(chance: random.Random, request: Any) -> None:
    request.inputs[-1].shape[:] = chance.choice(([1], [1, 5], [-1, 4], [1 << 40, 4], []))


def _other_name(_: random.Random, request: Any) -> None:
    request.inputs[0].name = "unknown"


def _missing_input(_: random.Random, request: Any) -> None:
    del request.inputs[0]


def _missing_bytes(_: random.Random, request: Any) -> None:
    if request.raw_input_contents:
        request.raw_input_contents[0] = request.raw_input_contents[0][:-1]


def _sequence(_: random.Random, request: Any) -> None:
    request.parameters["sequence_id"].int64_param = 5


_FAULTS: tuple[Callable[[random.Random, Any], None], ...] = (
    _other_model,
    _other_version,
    _other_datatype,
    _other_shape,
    _other_name,
    _missing_input,
    _missing_bytes,
    _sequence,
)


async def played(target: str, recorded: Sequence[Call]) -> list[Outcome]:
    """Make the calls, a few at a time, and return what became of each."""
    turn = asyncio.Semaphore(CALLS_AT_ONCE)

    async def play(call: Call) -> Outcome:
        async with turn:
            return await _outcome(channel, call)

    async with grpc.aio.insecure_channel(target) as channel:
        return await asyncio.gather(*map(play, recorded))


async def _outcome(channel: grpc.aio.Channel, call: Call) -> Outcome:
    options = {"timeout": call.timeout_s, "metadata": call.metadata, "compression": call.compression}
    messages: list[bytes] = []
    running: Any
    try:
        if call.method == "ModelStreamInfer":
            running = channel.stream_stream(SERVICE + call.method)(iter(call.messages), **options)
            messages += [message async for message in running]
        else:
            running = channel.unary_unary(SERVICE + call.method)(call.messages[0], **options)
            messages.append(await running)
    except grpc.aio.AioRpcError:
        pass
    asked = {value for name, value in call.metadata if name == REQUEST_ID}
    trailing = tuple(
        (name, "" if name == REQUEST_ID and not asked else value) for name, value in await running.trailing_metadata()
    )
    return Outcome(
        tuple(messages),
        await running.code(),
        await running.details(),
        tuple(await running.initial_metadata()),
        trailing,
    )
