"""A model configuration as it is given: config.pbtxt, or its JSON form, into the message that both are forms of.

text or JSON ─> Given (ModelConfig message, and what the message cannot say) ─> millstream.services.triton_config.to_model_config, .tensors
Source: Triton's model_config.proto. Imported by gateways only: the message comes with a gRPC client.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig as Message

from millstream.services.errors import invalid

CONFIG_BYTES_MAX = 1 << 20
NESTING_MAX = 32
_MESSAGE_CHARACTERS_MAX = 300
#: comments and texts of the text form, in which a field's name means nothing
_IGNORED = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""")
_BATCH_FIELD = re.compile(r"\bmax_batch_size\s*:")


class Given(NamedTuple):
    """`message`: a ModelConfig. `says_batch`: max_batch_size stands there, and be it 0, which the message cannot tell."""

    message: Any
    says_batch: bool

    def document(self) -> dict[str, Any]:
        """The JSON form, for keeping; `from_document` reads it again."""
        document: dict[str, Any] = json_format.MessageToDict(self.message, preserving_proto_field_name=True)
        if self.says_batch:
            document.setdefault("max_batch_size", 0)
        return document


def nothing() -> Given:
    """The configuration of a model that has none."""
    return Given(Message(), says_batch=False)


def from_text(text: str) -> Given:
    """config.pbtxt. Raises Failure(INVALID) with line and column."""
    _check_size(text)
    message = Message()
    try:
        text_format.Parse(text, message)
    except (text_format.ParseError, ValueError, RecursionError) as error:
        raise invalid(f"config.pbtxt: {_short(error)}") from None
    return Given(message, says_batch=_BATCH_FIELD.search(_IGNORED.sub("", text)) is not None)


def from_json(text: str) -> Given:
    """The JSON form, as a load may bring it: numbers or strings, snake or camel case. Raises Failure(INVALID)."""
    _check_size(text)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"config: not JSON: {_short(error)}") from None
    if not isinstance(document, dict):
        raise invalid('config: give a JSON object, like {"max_batch_size": 8}')
    return from_document(document)


def from_document(document: dict[str, Any]) -> Given:
    """The JSON form, parsed. Raises Failure(INVALID)."""
    message = Message()
    try:
        json_format.ParseDict(document, message, max_recursion_depth=NESTING_MAX)
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise invalid(f"config: {_short(error)}") from None
    return Given(message, says_batch=bool({"max_batch_size", "maxBatchSize"} & document.keys()))


def _check_size(text: str) -> None:
    if len(text) > CONFIG_BYTES_MAX:
        raise invalid(f"the configuration is longer than {CONFIG_BYTES_MAX} bytes")


def _short(error: Exception) -> str:
    shown = " ".join(str(error).split())[:_MESSAGE_CHARACTERS_MAX]
    return shown or type(error).__name__
