"""Send the held-out digits to a running endpoint, one by one over several connections, and say how it went.

held_out.npz ─> POST /v2/models/digits/infer, one image each ─> accuracy, rate, p50 / p95 / p99 latency
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

ACCURACY_MIN = 0.97
TIMEOUT_S = 30.0
HERE = Path(__file__).parent


class DemoError(Exception):
    """The endpoint could not be reached or did not answer with a label; said in one line."""


@dataclass(frozen=True)
class Outcome:
    """What a run of the demo measured; latencies in milliseconds."""

    images: int
    connections: int
    accuracy: float
    rate: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


def _load() -> tuple[list[bytes], list[int]]:
    """Request bodies and true labels of the held-out images."""
    held_out = np.load(HERE / "held_out.npz")
    bodies = []
    for image in held_out["images"]:
        tensor = {"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": image.tolist()}
        bodies.append(json.dumps({"inputs": [tensor], "outputs": [{"name": "label"}]}).encode())
    return bodies, held_out["labels"].tolist()


async def _ask(client: httpx.AsyncClient, url: str, body: bytes) -> int:
    """The label that the endpoint gives one image."""
    try:
        reply = await client.post(url, content=body, headers={"Content-Type": "application/json"})
    except httpx.HTTPError as error:
        raise DemoError(f"{url} cannot be reached: {str(error) or type(error).__name__}") from error
    try:
        document: dict[str, Any] = reply.json()
        if reply.status_code != httpx.codes.OK:
            raise DemoError(f"{url} answered {reply.status_code}: {document.get('error', document)}")
        return int(document["outputs"][0]["data"][0])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DemoError(
            f"{url} answered {reply.status_code} with something that is no label: {reply.text[:200]}"
        ) from error


async def measure(url: str, connections: int) -> Outcome:
    """Send every held-out image once, `connections` at a time. Raises DemoError."""
    bodies, labels = _load()
    answers, spans = [-1] * len(bodies), [0.0] * len(bodies)
    target = f"{url.rstrip('/')}/v2/models/digits/infer"
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)

    async def one_connection(client: httpx.AsyncClient, remaining: Iterator[int]) -> None:
        for index in remaining:
            started = time.perf_counter()
            answers[index] = await _ask(client, target, bodies[index])
            spans[index] = time.perf_counter() - started

    async with httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S, trust_env=False) as client:
        remaining = iter(range(len(bodies)))
        began = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as connected:
                for _ in range(connections):
                    connected.create_task(one_connection(client, remaining))
        except* DemoError as group:
            raise DemoError(str(group.exceptions[0])) from None
        seconds = time.perf_counter() - began
    p50, p95, p99 = (float(value) * 1e3 for value in np.percentile(spans, [50, 95, 99]))
    right = sum(answer == label for answer, label in zip(answers, labels, strict=True))
    return Outcome(len(bodies), connections, right / len(labels), len(bodies) / seconds, p50, p95, p99)


def _table(outcome: Outcome) -> Table:
    table = Table(title=f"{outcome.images} held-out digits over {outcome.connections} connections", show_header=False)
    table.add_row("accuracy", f"{outcome.accuracy:.4f}  (at least {ACCURACY_MIN})")
    table.add_row("rate", f"{outcome.rate:,.0f} images/s")
    table.add_row("latency p50 / p95 / p99", f"{outcome.p50_ms:.1f} / {outcome.p95_ms:.1f} / {outcome.p99_ms:.1f} ms")
    return table


def run(url: str, *, connections: int = 16, json_output: bool = False) -> int:
    """Run the demo against the server at `url` and print the outcome.

    Returns the exit status: 0; 1 when the accuracy is below 0.97 or the endpoint does not answer.
    """
    console = Console()
    try:
        outcome = asyncio.run(measure(url, connections))
    except DemoError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    if json_output:
        console.print_json(data=asdict(outcome))
    else:
        console.print(_table(outcome))
    return 0 if outcome.accuracy >= ACCURACY_MIN else 1
