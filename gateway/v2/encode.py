"""encode: a reply -> the bytes of a v2 inference response.

{"id"?, "model_name", "model_version", "outputs":[{"name","datatype","shape","data"|"parameters"}]} blob blob …

The text around the data depends only on shapes, and is cached by shape: encoding a reply of one output is then one
join. Everything is copied, because a reply may be a view of shared memory that is reused after the call.

Source: Open Inference Protocol v2, REST; Triton's binary tensor data extension.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from millstream.gateway.tensors.json_numbers import PIECE_ELEMENTS, dump_numbers
from millstream.gateway.tensors.output_options import Extensions, OutputOption
from millstream.gateway.tensors.outputs import VIEW_BYTES_MIN, Outputs, OutputTensor, Reply, raw_bytes
from millstream.gateway.v2.call import Options
from millstream.services.errors import invalid
from millstream.services.model.datatypes import BINARY_ONLY, BYTES, ITEM_BYTES
from millstream.services.model.signature import Signature, TensorSpec

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
