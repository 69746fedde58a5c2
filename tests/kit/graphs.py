"""Pushes graphs to a running stack, and calls them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx2
import numpy as np

from tests.kit.stack import Stack

Array = np.ndarray[Any, Any]
_DATATYPES = {"float32": "FP32", "int64": "INT64"}
_NUMPY = {datatype: name for name, datatype in _DATATYPES.items()}


def push_graph(stack: Stack, name: str, graph: str | Mapping[str, Any], **query: Any) -> dict[str, Any]:
    """Upload a graph, and return the document of its version."""
    reply = upload(stack, name, graph, wait=60, **query)
    assert reply.status_code in {200, 201}, reply.text
    document: dict[str, Any] = reply.json()
    return document


def upload(stack: Stack, name: str, graph: str | Mapping[str, Any], **query: Any) -> httpx2.Response:
    text = graph if isinstance(graph, str) else json.dumps(graph)
    return stack.http.post(f"/admin/v1/models/{name}/versions", params=query, content=text.encode())


def body(array: Array, tensor: str = "x", **more: Any) -> dict[str, Any]:
    """Return a v2 request with one input."""
    found = {
        "name": tensor,
        "shape": list(array.shape),
        "datatype": _DATATYPES[array.dtype.name],
        "data": array.ravel().tolist(),
    }
    return {"inputs": [found], **more}


def call(stack: Stack, name: str, array: Array, **more: Any) -> httpx2.Response:
    return stack.http.post(f"/v2/models/{name}/infer", json=body(array, **more))


def outputs(reply: httpx2.Response) -> dict[str, Array]:
    """Return the outputs of a v2 reply by name."""
    assert reply.status_code == 200, reply.text
    return {
        one["name"]: np.array(one["data"], _NUMPY[one["datatype"]]).reshape(one["shape"])
        for one in reply.json()["outputs"]
    }


def steps_of(stack: Stack, model: str, outcome: str = "ok") -> float:
    """Return how many requests of graphs' steps a model had."""
    return stack.metrics().value("millstream_requests_total", model=model, protocol="graph", outcome=outcome)
