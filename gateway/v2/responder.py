"""Writes the outputs of a batch as the replies to its v2 REST requests.

answer ─> same options? ──yes──> all bodies at once ─┬─> (compress) ─> done(HttpReply)
             └──no──> body by body ─────────────────┘
{"id"?, "model_name", "model_version", "outputs":[{"name","datatype","shape","data"|"parameters"}]} blob blob …

The text around the data depends only on shapes, and is cached by shape: encoding a reply of one output is then one
join. Everything is copied, because a reply may be a view of shared memory that is reused after the call.

Source: Open Inference Protocol v2, REST; Triton's binary tensor data extension.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
import orjson

from millstream.gateway.connection.budgets import ReplyBudget
from millstream.gateway.connection.error_reply import JSON_HEADERS, error_reply, internal_failure
from millstream.gateway.connection.infer_handler import HttpReply, ReplyHeaders, reply_headers
from millstream.gateway.http.compression import choose_encoding, compress
from millstream.gateway.observing.finished import server_timing
from millstream.gateway.scheduling.load_report import HEADER, load_report, wanted_format
from millstream.gateway.scheduling.request import FORM_HEADER, Request, said_of, served_by
from millstream.gateway.tensors.output_options import Extensions, OutputOption
from millstream.gateway.tensors.outputs import (
    PIECE_ELEMENTS,
    VIEW_BYTES_MIN,
    Outputs,
    OutputTensor,
    Reply,
    dump_numbers,
    own_copies,
    raw_bytes,
    size_of,
)
from millstream.gateway.v2.options import Options
from millstream.services.errors import Failure, invalid
from millstream.services.metrics.catalogue import RequestProtocol
from millstream.services.model.datatypes import BINARY_ONLY, BYTES, ITEM_BYTES
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.process.threads import run_in_thread_if_large

__all__ = ["V2Encoder"]

_HEADS_MAX = 256
_END = b"}]}"

_PLAIN = OutputOption()

_dumps = orjson.dumps
_NUMPY = orjson.OPT_SERIALIZE_NUMPY


class V2Encoder:
    """Writes the responses of one version."""

    def __init__(self, model: str, version: int, signature: Signature, extensions: Extensions | None = None) -> None:
        self._extensions = extensions or Extensions(signature, {}, None, 0)
        self._classes = [_OutputText(spec.model_copy(update={"datatype": BYTES})) for spec in signature.outputs]
        self._outputs = [_OutputText(spec) for spec in signature.outputs]
        count = len(signature.outputs)
        named_none = [index for index, spec in enumerate(signature.outputs) if not spec.on_request]
        self._all = ([(index, False) for index in named_none], [(index, True) for index in named_none])
        self._start = b'"model_name":' + _dumps(model) + b',"model_version":"%d","outputs":[' % version
        # Whole responses of one output up to the data, by index of the output and shape.
        self._json: list[dict[tuple[int, ...], bytes]] = [{} for _ in range(count)]
        self._binary: list[dict[tuple[int, ...], bytes]] = [{} for _ in range(count)]

    def encode_all(self, options: Options, outputs: Outputs, count: int) -> tuple[list[bytes], int | None] | None:
        """Return the bodies for `count` requests with the same options, and the lengths of their JSON parts.

        All numbers are written by one call. Returns None if there are several outputs, or the text is not cached.
        """
        requested = options.outputs or self._all[options.binary_default]
        if len(requested) != 1 or options.id or options.output_options is not None:
            return None
        index, binary = requested[0]
        _, inner, array = outputs.columns[index]
        if isinstance(array, list):
            return None
        shape = (options.rows, *inner) if outputs.batching else inner
        head = (self._binary if binary else self._json)[index].get(shape)
        if head is None:
            return None
        if binary:
            size = array.nbytes // count
            if size < VIEW_BYTES_MIN:
                raw = array.tobytes()
                return [head + raw[at : at + size] for at in range(0, len(raw), size)], len(head)
            view = array.reshape(-1).view(np.uint8).data
            return [b"".join((head, view[at : at + size])) for at in range(0, len(view), size)], len(head)
        text = _dumps(array.reshape(count, array.size // count), None, _NUMPY)
        if b"null" in text:
            return None
        return [b"%b[%b]}]}" % (head, row) for row in text[2:-2].split(b"],[")], None

    def all_raw(self, options: Options) -> bool:
        """Whether all outputs of a response are raw bytes."""
        return all(binary for _, binary in options.outputs or self._all[options.binary_default])

    def encode(self, options: Options, reply: Reply) -> tuple[bytes, int | None]:
        """Return (body, length of its JSON part); the length is None if the whole body is JSON.

        Raises Failure(INVALID) if an output has no JSON form and was not asked for in binary form.
        """
        requested = options.outputs or self._all[options.binary_default]
        if len(requested) == 1 and not options.id and options.output_options is None:
            index, binary = requested[0]
            output = reply[index]
            if binary:
                head = self._binary[index].get(output.shape)
                if head is not None:
                    return b"".join((head, raw_bytes(output))), len(head)
            else:
                head = self._json[index].get(output.shape)
                if head is not None:
                    return b"".join((head, _numbers(output.array), _END)), None  # type: ignore[arg-type]
            return self._encode_first(index, binary, output)
        return self._encode_any(options.id, requested, options.output_options or {}, reply)

    def _encode_first(self, index: int, binary: bool, output: OutputTensor) -> tuple[bytes, int | None]:
        """Return a response of one output whose text is not cached, or cannot be."""
        text = self._outputs[index]
        if binary:
            blob = raw_bytes(output)
            head = b"{" + self._start + text.binary(output.shape, len(blob)) + b"]}"
            if not blob:
                return head, None
            if text.item_bytes:
                _remember(self._binary[index], output.shape, head)
            return head + blob, len(head)
        head = b"{" + self._start + text.json(output.shape)
        if text.plain:
            _remember(self._json[index], output.shape, head)
        return head + text.data(output) + _END, None

    def _encode_any(
        self, request_id: str, requested: list[tuple[int, bool]], output_options: dict[int, OutputOption], reply: Reply
    ) -> tuple[bytes, int | None]:
        texts: list[bytes] = []
        blobs: list[bytes | memoryview] = []
        for index, binary in requested:
            text = self._outputs[index]
            output = reply[index]
            option = output_options.get(index, _PLAIN)
            if option.classes:
                text, output = self._classes[index], self._extensions.classified(index, output, option.classes)
            if option.target is not None:
                option.target.write(raw_bytes(output), text.name)
                texts.append(text.in_shared_memory(output.shape))
            elif binary:
                blob = raw_bytes(output)
                blobs.append(blob)
                texts.append(text.binary(output.shape, len(blob)))
            else:
                texts.append(text.json(output.shape) + text.data(output) + b"}")
        start = b'{"id":' + _dumps(request_id) + b"," if request_id else b"{"
        head = b"".join((start, self._start, b",".join(texts), b"]}"))
        return (b"".join((head, *blobs)), len(head)) if any(map(len, blobs)) else (head, None)


class _OutputText:
    """One output of a version as text."""

    def __init__(self, spec: TensorSpec) -> None:
        self.name = spec.name
        self.datatype = spec.datatype
        self.item_bytes = ITEM_BYTES.get(spec.datatype, 0)
        #: Whether orjson writes its arrays without conversion.
        self.plain = spec.datatype != BYTES and spec.datatype not in BINARY_ONLY
        self._start = b'{"name":' + _dumps(spec.name) + b',"datatype":"' + spec.datatype.encode() + b'","shape":['

    def _shape(self, shape: tuple[int, ...]) -> bytes:
        return self._start + ",".join(map(str, shape)).encode()

    def json(self, shape: tuple[int, ...]) -> bytes:
        """Return the text of the output up to its data."""
        return self._shape(shape) + b'],"data":'

    def binary(self, shape: tuple[int, ...], size_bytes: int) -> bytes:
        """Return the whole text of an output whose data follows the JSON."""
        return self._shape(shape) + b'],"parameters":{"binary_data_size":%d}}' % size_bytes

    def in_shared_memory(self, shape: tuple[int, ...]) -> bytes:
        """Return the whole text of an output whose data is in the client's shared memory."""
        return self._shape(shape) + b"]}"

    def data(self, output: OutputTensor) -> bytes:
        """Return the elements as a flat JSON array. Raises Failure(INVALID) if they have no JSON form."""
        array = output.array
        if isinstance(array, list):
            return self._strings(array)
        if self.datatype in BINARY_ONLY:
            raise invalid(
                f"sending {self.datatype} data via JSON is not supported. "
                f"Please request binary data (binary_data: true) for output {self.name}"
            )
        return _numbers(array)

    def _strings(self, elements: list[bytes]) -> bytes:
        count = len(elements)
        try:
            if count <= PIECE_ELEMENTS:
                return _dumps([element.decode() for element in elements])
            pieces = [elements[at : at + PIECE_ELEMENTS] for at in range(0, count, PIECE_ELEMENTS)]
            return b"[%b]" % b",".join([_dumps([element.decode() for element in piece])[1:-1] for piece in pieces])
        except UnicodeDecodeError:
            raise invalid(
                f"output '{self.name}' holds bytes that are not UTF-8 and have no JSON form. "
                "Please request binary data (binary_data: true) for it"
            ) from None


def _numbers(array: np.ndarray[Any, Any]) -> bytes:
    """Return the elements as a flat JSON array."""
    return dump_numbers(array.ravel())


def _remember(heads: dict[tuple[int, ...], bytes], shape: tuple[int, ...], head: bytes) -> None:
    if len(heads) >= _HEADS_MAX:
        heads.clear()
    heads[shape] = head


log = logging.getLogger("millstream.infer")

Done = Callable[[HttpReply], None]

OCTETS = b"application/octet-stream"
#: outputs of a batch from this size on are written in a thread: writing their text would block the event loop
LARGE_BYTES_MIN = 256 * 1024
COMPRESS_BYTES_MIN = 1024  # below this a compressed body is hardly smaller and costs both sides time
COMPRESS_INLINE_BYTES_MAX = 64 * 1024  # a larger body is compressed in a thread

#: Makes a NamedTuple in a third of the time that its constructor takes.
_new = tuple.__new__


class RestRequest(Request):
    """A request of v2 REST: the options that its reply depends on, and the function that takes the reply."""

    options: Options
    accept_encoding: bytes | None
    load_format: bytes | None = None
    done_with: Done

    @property
    def id(self) -> str:
        return self.options.id

    @property
    def said(self) -> dict[str, Any]:
        options = self.options
        return said_of(options.id, options.timeout_s, options.parameters)

    @property
    def wanted(self) -> list[int] | None:
        outputs = self.options.outputs
        return None if outputs is None else [index for index, _ in outputs]

    def cancel(self) -> None:
        """Drop the request unless it has left the lane; it gets no reply."""
        self.lane.cancel(self)


class RestResponder:
    """Answers the requests of one version, all of which are RestRequests."""

    protocol = RequestProtocol.V2

    def __init__(self, encoder: V2Encoder, reply_budget: ReplyBudget) -> None:
        self._encoder = encoder
        self._reply_budget = reply_budget
        self._tasks: set[asyncio.Future[None]] = set()

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        mine = cast("Sequence[RestRequest]", requests)
        options = mine[0].options
        written = None
        large = outputs.size_bytes >= LARGE_BYTES_MIN
        alike = all([request.options is options for request in mine])  # noqa: C419 - a list is faster here
        if alike and (not large or self._encoder.all_raw(options)):
            try:
                written = self._encoder.encode_all(options, outputs, len(mine))
            except Exception:
                log.exception("replies could not be written at once")
        if written is None:
            write = self._write_large if large else self._write
            for request, reply in zip(mine, outputs.replies([request.rows for request in mine]), strict=True):
                write(request, reply)
            return
        bodies, header_length = written
        headers = _headers(header_length)
        for request, body in zip(mine, bodies, strict=True):
            self._send(request, headers, body)

    def answer_one(self, request: Request, reply: Reply) -> None:
        mine = cast("RestRequest", request)
        (self._write_large if size_of(reply) >= LARGE_BYTES_MIN else self._write)(mine, reply)

    def _write(self, mine: RestRequest, reply: Reply) -> None:
        try:
            body, header_length = self._encoder.encode(mine.options, reply)
        except Failure as failure:
            self.fail(mine, failure)
        except Exception as error:
            mine.done_with(error_reply(internal_failure("a reply could not be written", error)))
        else:
            self._send(mine, _headers(header_length), body)

    def _write_large(self, mine: RestRequest, reply: Reply) -> None:
        """Write a large reply if the reply budget has room: numbers as text in a thread, raw bytes here."""
        size_bytes = size_of(reply)
        if not self._reply_budget.has_room(size_bytes):
            self.fail(mine, self._reply_budget.refusal())
        elif mine.options.output_options is not None or self._encoder.all_raw(mine.options):
            self._write(mine, reply)
        else:
            self._reply_budget.take(size_bytes)
            self._spawn(self._write_in_thread(mine, own_copies(reply), size_bytes))

    async def _write_in_thread(self, mine: RestRequest, reply: Reply, size_bytes: int) -> None:
        try:
            body, header_length = await run_in_thread_if_large(size_bytes, self._encoder.encode, mine.options, reply)
        except Failure as failure:
            self.fail(mine, failure)
        except Exception as error:
            mine.done_with(error_reply(internal_failure("a reply could not be written", error)))
        else:
            self._send(mine, _headers(header_length), body)
        finally:
            self._reply_budget.release(size_bytes)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def fail(self, request: Request, failure: Failure) -> None:
        cast("RestRequest", request).done_with(error_reply(failure))

    def _send(self, request: RestRequest, headers: ReplyHeaders, body: bytes) -> None:
        added = b""
        if (request.timing is not None or request.steps) and (timing := server_timing(request, time.monotonic())):
            added = b"server-timing: %b\r\n" % timing
        if request.form:
            added += b"%b: %b\r\n" % (FORM_HEADER, served_by(request))
        if request.load_format is not None and (wanted := wanted_format(request.load_format)) is not None:
            added += b"%b: %b\r\n" % (HEADER, load_report(request.lane.load, wanted))
        reply: HttpReply = _new(HttpReply, (200, headers, body, added))
        try:
            if request.accept_encoding is not None and len(body) >= COMPRESS_BYTES_MIN:
                self._compress(request.accept_encoding, reply, request.done_with)
            else:
                request.done_with(reply)
        except Exception:
            log.exception("a reply could not be delivered")

    def _compress(self, accept_encoding: bytes, reply: HttpReply, done: Done) -> None:
        encoding = choose_encoding(accept_encoding)
        if encoding is None:
            done(reply)
        elif len(reply.body) <= COMPRESS_INLINE_BYTES_MAX:
            done(_compressed(reply, encoding))
        else:
            self._spawn(self._compress_in_thread(reply, encoding, done))

    async def _compress_in_thread(self, reply: HttpReply, encoding: bytes, done: Done) -> None:
        size_bytes = len(reply.body)
        if not self._reply_budget.has_room(size_bytes):
            done(error_reply(self._reply_budget.refusal()))
            return
        self._reply_budget.take(size_bytes)
        try:
            compressed = await asyncio.to_thread(_compressed, reply, encoding)
        except Exception as error:
            compressed = error_reply(internal_failure("a reply could not be compressed", error))
        finally:
            self._reply_budget.release(size_bytes)
        done(compressed)


@lru_cache(maxsize=256)
def _headers(header_length: int | None) -> ReplyHeaders:
    if header_length is None:
        return JSON_HEADERS
    return reply_headers((b"content-type", OCTETS), (b"inference-header-content-length", b"%d" % header_length))


def _compressed(reply: HttpReply, encoding: bytes) -> HttpReply:
    headers = reply_headers(*reply.headers.pairs, (b"content-encoding", encoding))
    return HttpReply(reply.status, headers, compress(reply.body, encoding), reply.added)
