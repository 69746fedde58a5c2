"""Converts between the datatype names of Triton's model configuration (TYPE_FP32) and of v2 (FP32). Pure.

Source: model_config.proto, enum DataType.
"""

from __future__ import annotations

from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES, DATATYPES

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
