"""Bytes of a ModelInferRequest in, bytes of its ModelInferResponse out. All policy is in Caller and the lanes.

envelope cached? ─> find ─> (decode ─> prepare) ─> Caller.call ……… encode

The status message of a request that does not fit gets the signature, and a request that works, as far as they are
short: a status has no members but its message.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from millstream.gateway.access.principal import Principal
from millstream.gateway.connection.budgets import ReplyPermit
from millstream.gateway.connection.error_reply import internal_failure
from millstream.gateway.grpc.codec.decode import FIELDS, GrpcCall, GrpcDecoder
from millstream.gateway.grpc.codec.encode import FINAL, NOT_FINAL, GrpcEncoder
from millstream.gateway.grpc.codec.envelopes import Envelopes, MessageEnvelope, inputs_of
from millstream.gateway.grpc.codec.messages import PACKED, Messages, parse_infer, set_compression
from millstream.gateway.scheduling.caller import DEFAULT_OPTIONS, Caller, RequestOptions
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.scheduling.streams import Stream
from millstream.gateway.tensors.examples import Filled, Sample, Target, json_text, python_text, raw_element, samples
from millstream.gateway.tensors.input_plans import InputPlans, Inputs
from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.tensors.outputs import Reply
from millstream.gateway.tensors.prepared import PreparedPlans, prepared_for
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import BINARY_ONLY, BYTES
from millstream.services.model.signature import TensorSpec
from millstream.services.process.threads import run_in_thread_if_large


class _Codec(NamedTuple):
    decoder: GrpcDecoder
    encoder: GrpcEncoder
    prepared: GrpcDecoder | None  # of requests that give texts or encoded files


class AnswerParts(NamedTuple):
    """An answer in parts. `write`: encodes one as a response. `last`: a response after the last; b"": there is none."""

    request_id: str
    stream: Stream
    write: Callable[[Reply], bytes]
    last: bytes


class _Read(NamedTuple):
    route: ModelRoute
    call: GrpcCall
    size_bytes: int
    remaining_s: float | None


class InferCalls:
    """Answers inference requests, of unary calls and of streams (millstream.gateway.grpc.methods.infer_stream).

    Args:
        caller: finds versions and runs them.
        messages: reads requests and sends replies.
    """

    def __init__(self, caller: Caller, messages: Messages) -> None:
        self._caller = caller
        self._messages = messages
        self._envelopes = Envelopes()
        self._advice: WeakKeyDictionary[InputPlans, str] = WeakKeyDictionary()
        self._codecs: WeakKeyDictionary[InputPlans, _Codec] = WeakKeyDictionary()

    async def model_infer(self, _: Any, context: Any) -> bytes:
        """Handle a ModelInfer call."""
        messages = self._messages
        permit = messages.call(context)
        try:
            body = await messages.read(context)
            reply = await self.reply(body, context.time_remaining(), permit)
        except Failure as failure:
            await messages.refuse(context, failure)
        except Exception as error:
            await messages.refuse(context, internal_failure("a ModelInfer call", error))
        set_compression(body, context, len(reply))
        messages.ending(context)
        return reply

    async def reply(self, body: bytes, remaining_s: float | None, permit: ReplyPermit) -> bytes:
        """Return the reply to one request. Raises Failure.

        Args:
            body: the encoded request.
            remaining_s: seconds until the deadline of the call; None: it has no deadline.
            permit: counts the reply in the reply budget.
        """
        return await self._run(await self._read(body, remaining_s), permit, b"")

    async def reply_in_stream(self, body: bytes, remaining_s: float | None, permit: ReplyPermit) -> bytes | AnswerParts:
        """Return the reply to one request of a stream, or the parts of its answer. Arguments and Failure as `reply`."""
        read = await self._read(body, remaining_s)
        manifest = read.route.lane.manifest
        if not manifest.streams:
            return await self._run(read, permit, FINAL)
        inputs, rows, _, outputs, request_id, output_options, shared_memory_bytes, *_ = read.call
        options = self._limited(read)
        encoder = self._codecs[read.route.plans].encoder
        stream = self._caller.stream(
            read.route,
            Inputs(inputs, rows),
            read.size_bytes + shared_memory_bytes,
            options._replace(outputs=outputs),
        )
        write = partial(encoder.encode, outputs, request_id, extra=NOT_FINAL, output_options=output_options)
        return AnswerParts(request_id, stream, write, encoder.empty_final(request_id) if read.call.empty_final else b"")

    async def _read(self, body: bytes, remaining_s: float | None) -> _Read:
        """Return a request in decoded form. Raises Failure."""
        envelope = self._envelopes.find(body)
        if envelope is not None:
            route = self._caller.find(envelope.model, envelope.version or None)
            if route.plans is envelope.plans:
                call = GrpcCall(inputs_of(body, envelope), envelope.rows, DEFAULT_OPTIONS, envelope.outputs)
                return _Read(route, call, len(body), remaining_s)
        size_bytes = len(body)
        if body and body[0] in PACKED:
            body = await self._messages.plain(body)
            size_bytes = max(size_bytes, len(body))
        request = await parse_infer(body)
        route = find(self._caller, request.model_name, request.model_version)
        codec = self._codecs.get(route.plans) or self._new_codec(route)
        with self._advising(route), self._caller.count_rejections(route):
            try:
                if request.raw_input_contents and len(request.inputs) <= len(route.plans):
                    call = codec.decoder.decode(request)
                else:
                    call = await run_in_thread_if_large(len(body), codec.decoder.decode, request)
            except Failure as failure:
                prepared = prepared_for(route.plans, failure)
                if codec.prepared is None or prepared is None:
                    raise
                began = time.monotonic()
                call = await _prepared(prepared, codec.prepared, request, size_bytes)
                if remaining_s is not None:
                    remaining_s = max(remaining_s - (time.monotonic() - began), 0.0)
            else:
                self._envelopes.learn(body, request, route.plans, call)
        return _Read(route, call, size_bytes, remaining_s)

    def largest_tensor(self, size_bytes: int, first: bytes) -> tuple[int, int] | None:
        """Return where the largest tensor of an arriving message is, as Envelopes does."""
        return self._envelopes.largest_tensor(size_bytes, first)

    def prepared(
        self, body: bytes | memoryview, principal: Principal | None
    ) -> tuple[ModelRoute, MessageEnvelope, GrpcEncoder] | None:
        """Return the route, envelope and encoder of a message whose envelope is cached; None: it needs `reply`.

        `principal`: who sent it; None: no key is needed.
        """
        envelope = self._envelopes.find(body)
        if envelope is None or (principal is not None and not principal.infers(envelope.model)):
            return None
        try:
            route = self._caller.find_checked(envelope.model, envelope.version or None)
        except Failure:
            return None
        if route.plans is not envelope.plans:
            return None
        return route, envelope, self._codecs[route.plans].encoder

    def _run(self, read: _Read, permit: ReplyPermit, extra: bytes) -> Coroutine[Any, Any, bytes]:
        route, call, size_bytes, _ = read
        inputs, rows, _, outputs, request_id, output_options, shared_memory_bytes, *_ = call
        options = self._limited(read)
        if outputs is not None:
            options = options._replace(outputs=outputs)
        write = partial(
            self._codecs[route.plans].encoder.encode, outputs, request_id, extra=extra, output_options=output_options
        )
        return self._caller.call(route, inputs, rows, size_bytes + shared_memory_bytes, write, options, permit)

    @staticmethod
    def _limited(read: _Read) -> RequestOptions:
        """Return the options of a request, whose timeout the deadline of its call limits."""
        options = read.call.options
        if read.remaining_s is not None:
            timeout_s = read.route.timeout_s if options.timeout_s is None else options.timeout_s
            options = options._replace(timeout_s=min(timeout_s, read.remaining_s))
        return options._replace(id=read.call.id) if read.call.id else options

    @contextmanager
    def _advising(self, route: ModelRoute) -> Iterator[None]:
        """Add the inputs and an example to the message of a Failure(INVALID) of the block."""
        try:
            yield
        except Failure as failure:
            if failure.code is not Code.INVALID:
                raise
            raise invalid(with_advice(failure.message, self._advice_text(route.plans))) from None

    def _advice_text(self, plans: InputPlans) -> str:
        text = self._advice.get(plans)
        if text is None:
            text = self._advice[plans] = advice_text(plans)
        return text

    def _new_codec(self, route: ModelRoute) -> _Codec:
        manifest = route.lane.manifest
        encoder = GrpcEncoder(manifest.model, manifest.version, manifest.answered, route.extensions)
        codec = self._codecs[route.plans] = _Codec(
            GrpcDecoder(route.plans, route.extensions),
            encoder,
            None if route.plans.prepared is None else GrpcDecoder(route.plans.prepared, route.extensions),
        )
        return codec


async def _prepared(plans: PreparedPlans, decoder: GrpcDecoder, request: Any, size_bytes: int) -> GrpcCall:
    """Return a request with texts or encoded files, decoded, with tensors in their place. Raises Failure."""
    call = await run_in_thread_if_large(size_bytes, decoder.decode, request)
    inputs = await plans.prepare(call.inputs)
    return call._replace(inputs=inputs.tensors)


def find(caller: Caller, model: str, version: str) -> ModelRoute:
    """Return the route of a model and version ("": none). Raises Failure: NOT_FOUND, INVALID (not a number)."""
    check_version(version)
    return caller.find(model, version or None)


def check_version(version: str) -> None:
    """Raise Failure(INVALID) unless `version` is a number or ""."""
    if version and not (version.isascii() and version.isdigit()):
        raise invalid(
            f"failed to get model version from specified version string '{excerpt(version)}': "
            "version should be an integral value > 0"
        )


#: longer examples are left out: clients take about 8 KiB of headers, the status message included
EXAMPLE_CHARACTERS_MAX = 1024
SIGNATURE_CHARACTERS_MAX = 512
MESSAGE_BYTES_MAX = 2048


def advice_text(plans: InputPlans) -> str:
    """Return the end of a status message: the inputs, and a request that works as ModelInferRequest in JSON."""
    specs = plans.signature.inputs
    inputs = ", ".join(f"{spec.name} {spec.datatype}{_dims(spec)}" for spec in specs)
    if len(inputs) > SIGNATURE_CHARACTERS_MAX:
        inputs = f"{len(specs)}, which ModelMetadata lists"
    if plans.trial is None:
        return f"; inputs: {inputs}"
    target = Target(plans.model, plans.signature, samples(plans.signature, plans.trial))
    return f"; inputs: {inputs}{_example(infer_document(target))}"


def with_advice(message: str, advice: str) -> str:
    """Return `message` with `advice` at its end, or without it where that would be too long for a status message."""
    complete = f"{message.removesuffix('.')}{advice}"
    return complete if len(complete.encode("utf-8", "backslashreplace")) <= MESSAGE_BYTES_MAX else message


def _example(document: dict[str, Any] | None) -> str:
    text = "" if document is None else json_text(document, EXAMPLE_CHARACTERS_MAX)
    if text:
        return f"; a request that works: {text}"
    python = "" if document is None else python_text(document)
    return f"; a request that works, in Python: {python}" if 0 < len(python) <= EXAMPLE_CHARACTERS_MAX else ""


def infer_document(target: Target) -> dict[str, Any] | None:
    """Return a ModelInferRequest in protobuf's JSON form. If an input has no typed contents, all are raw.

    None if raw contents would be longer than EXAMPLE_CHARACTERS_MAX.
    """
    if not any(sample.datatype in BINARY_ONLY for sample in target.samples):
        return _request(target, [_tensor(sample) | {"contents": _contents(sample)} for sample in target.samples])
    if sum(sample.elements for sample in target.samples) > EXAMPLE_CHARACTERS_MAX:
        return None
    raws = [base64.b64encode(raw_element(sample) * sample.elements).decode() for sample in target.samples]
    return _request(target, [_tensor(sample) for sample in target.samples]) | {"raw_input_contents": raws}


def _request(target: Target, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model_name": target.model, "inputs": inputs}


def _tensor(sample: Sample) -> dict[str, Any]:
    return {"name": sample.name, "datatype": sample.datatype, "shape": list(sample.shape)}


def _contents(sample: Sample) -> Mapping[str, Filled]:
    if sample.datatype == BYTES:
        return {"bytes_contents": sample.flat._replace(element=base64.b64encode(sample.element.encode()).decode())}
    return {FIELDS[sample.datatype][0]: sample.flat}


def _dims(spec: TensorSpec) -> str:
    return "[" + ",".join(map(str, spec.shape)) + "]"
