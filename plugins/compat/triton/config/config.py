"""Parses a Triton model configuration: config.pbtxt or its JSON form.

text or JSON ─> ParsedConfig (ModelConfig message; whether max_batch_size is set) ─> to_model_config, to_signature
Source: Triton's model_config.proto. Imported by gateways only: the message class belongs to the package tritonclient.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any, NamedTuple

from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig as Message

from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES, DATATYPES
from millstream.services.nearest_names import unknown_key

#: number of the enum -> v2 datatype
BY_NUMBER = dict(
    enumerate(
        ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"), 1
    )
) | {13: BYTES, 14: "BF16"}
NUMBERS = {datatype: number for number, datatype in BY_NUMBER.items()}

assert set(NUMBERS) == set(DATATYPES)


def type_name(datatype: str) -> str:
    """Return the configuration's name of a v2 datatype: TYPE_STRING for BYTES, TYPE_FP32 for FP32."""
    return "TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}"


def datatype_of(number: int, what: str) -> str:
    """Return the v2 datatype of an enum number. Raises Failure(INVALID), naming `what`, if there is none."""
    datatype = BY_NUMBER.get(number)
    if datatype is None:
        raise invalid(f"{what} has no data_type: set one, like TYPE_FP32")
    return datatype


CONFIG_BYTES_MAX = 1 << 20
NESTING_MAX = 32
_MESSAGE_CHARACTERS_MAX = 300
#: comments and string literals of the text form, in which a field's name is not a field
_IGNORED = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""")
#: protobuf's messages for an unknown field or value, in the text form and in JSON
_UNKNOWN = re.compile(
    r'(?:Message|Enum) type "(?P<type>[\w.]+)" has no (?P<what>field|value) named (?:"(?P<quoted>[^"]+)"|(?P<bare>\w+))'
    r"|Invalid enum (?P<kind>value) (?P<word>\w+) for enum type (?P<enum>[\w.]+)"
)
_BATCH_FIELD = re.compile(r"\bmax_batch_size\s*:")


class ParsedConfig(NamedTuple):
    """A parsed configuration.

    Args:
        message: a ModelConfig.
        has_max_batch_size: whether the field is present; the message does not distinguish 0 from absent.
    """

    message: Any
    has_max_batch_size: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON form, to store; `from_document` parses it again."""
        document: dict[str, Any] = json_format.MessageToDict(self.message, preserving_proto_field_name=True)
        if self.has_max_batch_size:
            document.setdefault("max_batch_size", 0)
        return document


def empty_config() -> ParsedConfig:
    """Return the configuration of a model without a configuration file."""
    return ParsedConfig(Message(), has_max_batch_size=False)


def from_text(text: str) -> ParsedConfig:
    """Parse the content of config.pbtxt. Raises Failure(INVALID) with line and column."""
    _check_size(text)
    message = Message()
    try:
        text_format.Parse(text, message)
    except (text_format.ParseError, ValueError, RecursionError) as error:
        raise invalid(f"config.pbtxt: {_short(error)}") from None
    return ParsedConfig(message, has_max_batch_size=_BATCH_FIELD.search(_IGNORED.sub("", text)) is not None)


def from_json(text: str) -> ParsedConfig:
    """Parse the JSON form, as sent with a load request: numbers or strings, snake or camel case.

    Raises Failure(INVALID).
    """
    _check_size(text)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"config: not JSON: {_short(error)}") from None
    if not isinstance(document, dict):
        raise invalid('config: give a JSON object, like {"max_batch_size": 8}')
    return from_document(document)


def from_document(document: dict[str, Any]) -> ParsedConfig:
    """Convert the JSON form after json.loads. Raises Failure(INVALID)."""
    message = Message()
    try:
        json_format.ParseDict(document, message, max_recursion_depth=NESTING_MAX)
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise invalid(f"config: {_short(error)}") from None
    return ParsedConfig(message, has_max_batch_size=bool({"max_batch_size", "maxBatchSize"} & document.keys()))


def _check_size(text: str) -> None:
    if len(text) > CONFIG_BYTES_MAX:
        raise invalid(f"the configuration is longer than {CONFIG_BYTES_MAX} bytes")


def _short(error: Exception) -> str:
    """Return the library's message; for an unknown field or value, with those that are valid."""
    text = " ".join(str(error).split())
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        type_name = unknown["type"] or unknown["enum"]
        name = unknown["quoted"] or unknown["bare"] or unknown["word"]
        key = unknown_key(name, _valid_names(type_name), unknown["what"] or unknown["kind"])
        return f"{text[: unknown.start()]}{type_name.rpartition('.')[2]}: {key}"
    return text[:_MESSAGE_CHARACTERS_MAX] or type(error).__name__


def _valid_names(name: str) -> list[str]:
    """Return the names of a message's fields, or of an enum's values."""
    pool = Message.DESCRIPTOR.file.pool
    with suppress(KeyError):
        return [field.name for field in pool.FindMessageTypeByName(name).fields]
    with suppress(KeyError):
        return [value.name for value in pool.FindEnumTypeByName(name).values]
    return []
