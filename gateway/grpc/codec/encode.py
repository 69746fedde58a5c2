"""A reply -> the bytes of a ModelInferResponse, with raw_output_contents whatever the form of the request.

head: model, version, outputs with their shapes │ id? │ parameters? │ per output: tag, length, raw bytes

The head depends only on shapes, and is cached by shape. Fields of a message may come in any order.
Source: Protocol Buffers, "Encoding"; Triton's inference.proto for the field numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.tensors.output_options import Extensions, OutputOption
from millstream.gateway.tensors.outputs import OutputTensor, Reply, raw_bytes
from millstream.services.model.signature import Signature

_HEADS_MAX = 256  # cached heads; a full cache is emptied
_NOTHING = np.empty(0, np.uint8)
_ID, _RAW = b"\x1a", b"\x32"  # tags of fields 3 and 6, both with a length
_INFER_RESPONSE = b"\x12"  # field 2 of ModelStreamInferResponse

_FINAL = pb.ModelInferResponse()
_FINAL.parameters["triton_final_response"].bool_param = True
#: parameter that marks a reply in a stream as the last reply to its request
FINAL: bytes = _FINAL.SerializeToString()
_FINAL.parameters["triton_final_response"].bool_param = False
#: the same of a part of an answer
NOT_FINAL: bytes = _FINAL.SerializeToString()


def varint(number: int) -> bytes:
    """Return a length as a protobuf varint."""
    if number < 0x80:
        return bytes((number,))
    octets = bytearray()
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    octets.append(number)
    return bytes(octets)


def stream_response(response: bytes) -> bytes:
    """Return a ModelStreamInferResponse that holds `response`, a ModelInferResponse."""
    return b"".join((_INFER_RESPONSE, varint(len(response)), response))


class GrpcEncoder:
    """Encodes the responses of one version."""

    def __init__(self, model: str, version: int, signature: Signature, extensions: Extensions) -> None:
        self._model = model
        self._extensions = extensions
        self._version = str(version)
        self._signature = signature
        self._all = tuple(index for index, spec in enumerate(signature.outputs) if not spec.on_request)
        self._heads: dict[tuple[Any, ...], bytes] = {}

    def encode(
        self,
        requested: tuple[int, ...] | None,
        request_id: str,
        reply: Reply,
        extra: bytes = b"",
        output_options: dict[int, OutputOption] | None = None,
    ) -> bytes:
        """Return an encoded response. Raises Failure(INVALID) if an output does not fit into its shared memory.

        Args:
            requested: indices of outputs in the signature; None: those that are not answered on request alone.
            request_id: "": the request has none.
            reply: all outputs of the version.
            extra: more fields of the response, in wire form.
            output_options: by index, for outputs that are not sent as plain tensors.
        """
        if output_options is not None:
            reply = [self._with_option(index, output, output_options.get(index)) for index, output in enumerate(reply)]
        indices = self._all if requested is None else requested
        outputs = [reply[index] for index in indices]
        key = (requested, *[output.shape for output in outputs], *(() if output_options is None else output_options))
        head = self._heads.get(key) or self._head(key, indices, outputs)
        pieces: list[bytes | memoryview] = [head]
        if request_id:
            name = request_id.encode()
            pieces += (_ID, varint(len(name)), name)
        if extra:
            pieces.append(extra)
        for output in outputs:
            raw = raw_bytes(output)
            pieces += (_RAW, varint(len(raw)), raw)
        return b"".join(pieces)

    def empty_final(self, request_id: str) -> bytes:
        """Return a response without outputs that ends an answer in parts."""
        response = pb.ModelInferResponse(model_name=self._model, model_version=self._version, id=request_id)
        response.parameters["triton_final_response"].bool_param = True
        encoded: bytes = response.SerializeToString()
        return encoded

    def _with_option(self, index: int, output: OutputTensor, option: OutputOption | None) -> OutputTensor:
        """Return `output` as classes, or, after writing it to shared memory, its shape without data."""
        if option is None:
            return output
        if option.classes:
            return self._extensions.classified(index, output, option.classes)
        assert option.target is not None
        option.target.write(raw_bytes(output), self._signature.outputs[index].name)
        return output._replace(array=_NOTHING)

    def _head(self, key: tuple[Any, ...], indices: tuple[int, ...], outputs: list[OutputTensor]) -> bytes:
        message = pb.ModelInferResponse(model_name=self._model, model_version=self._version)
        for index, output in zip(indices, outputs, strict=True):
            name = self._signature.outputs[index].name
            message.outputs.add(name=name, datatype=output.datatype, shape=output.shape)
        if len(self._heads) >= _HEADS_MAX:
            self._heads.clear()
        head: bytes = message.SerializeToString()
        self._heads[key] = head
        return head
