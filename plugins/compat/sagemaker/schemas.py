"""schemas: JSON bodies of SageMaker's calls, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class Ping(TypedDict):
    """Whether requests would be answered."""

    status: Literal["Healthy", "Unhealthy"]


class DataFrameSplit(TypedDict):
    """A pandas DataFrame in the orientation `split`."""

    columns: NotRequired[list[Any]]
    index: NotRequired[list[Any]]
    data: list[list[Any]]


class DataFrameRequest(TypedDict):
    """A DataFrame, as clients of MLflow send it: give one of the two."""

    dataframe_split: NotRequired[DataFrameSplit]
    dataframe_records: NotRequired[list[dict[str, Any]]]
    params: NotRequired[dict[str, Any]]


SCHEMAS = (Ping, DataFrameRequest)
