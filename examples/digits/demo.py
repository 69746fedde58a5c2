"""Send the held-out digits to a running endpoint, one by one over several connections, and print the results.

held_out.npz ─> POST /v2/models/digits/infer, one image each ─> accuracy, rate, p50 / p95 / p99 latency
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np

from millstream.client.address import ServerAddress
from millstream.client.cli.load_generator import LoadTarget, drive
from millstream.client.cli.terminal import emit, results, show_detail
from millstream.services.errors import Code, Failure

ACCURACY_MIN = 0.97
TIMEOUT_S = 30.0
HERE = Path(__file__).parent


class DemoError(Failure):
    """The endpoint could not be reached, or did not answer with a label; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.UNAVAILABLE, message)


@dataclass(frozen=True)
class Outcome:
    """The measurements of a run of the demo."""

    images: int
    connections: int
    accuracy: float  # 0 … 1
    rate: float  # images per second
    p50_ms: float
    p95_ms: float
    p99_ms: float


def _load() -> tuple[list[bytes], list[int]]:
    """Return request bodies and true labels of the held-out images."""
    held_out = np.load(HERE / "held_out.npz")
    bodies = []
    for image in held_out["images"]:
        tensor = {"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": image.tolist()}
        bodies.append(json.dumps({"inputs": [tensor], "outputs": [{"name": "label"}]}).encode())
    return bodies, held_out["labels"].tolist()


class _Answers:
    """Hands out the request of each image once and stores the answers."""

    def __init__(self, requests: list[bytes]) -> None:
        self._remaining = iter(enumerate(requests))
        self.labels = [-1] * len(requests)
        self.seconds = [0.0] * len(requests)

    def take(self) -> tuple[int, bytes] | None:
        return next(self._remaining, None)

    def answered(self, number: int, status: int, body: bytes, seconds: float) -> None:
        """Store an answer. Raises DemoError if it is not a label."""
        self.seconds[number] = seconds
        try:
            document: dict[str, Any] = json.loads(body)
            if status != HTTPStatus.OK:
                raise DemoError(f"the endpoint answered {status}: {document.get('error', document)}")
            self.labels[number] = int(document["outputs"][0]["data"][0])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            text = body[:200].decode(errors="replace")
            raise DemoError(f"the endpoint answered {status}, with no label: {text}") from error


async def measure(server: ServerAddress, connections: int) -> Outcome:
    """Send every held-out image once, `connections` at a time. Raises DemoError."""
    bodies, labels = _load()
    targets = [LoadTarget.of(server, "/v2/models/digits/infer", body, None) for body in bodies]
    answers = _Answers([target.request for target in targets])
    try:
        seconds = await drive(targets[0], answers, connections, TIMEOUT_S)
    except DemoError:
        raise
    except Failure as failure:
        raise DemoError(f"{server.url}: {failure.message}; is `millstream up` running?") from failure
    p50, p95, p99 = (float(value) * 1e3 for value in np.percentile(answers.seconds, [50, 95, 99]))
    right = sum(answer == label for answer, label in zip(answers.labels, labels, strict=True))
    return Outcome(len(bodies), connections, right / len(labels), len(bodies) / seconds, p50, p95, p99)


def run(server: ServerAddress, *, connections: int = 16, json_output: bool = False) -> int:
    """Run the demo against a server and print the outcome.

    Returns the exit status: 0, or 1 if the accuracy is below 0.97. Raises DemoError.
    """
    outcome = asyncio.run(measure(server, connections))
    if json_output:
        emit(asdict(outcome))
    else:
        _show(outcome)
    return 0 if outcome.accuracy >= ACCURACY_MIN else 1


def _show(outcome: Outcome) -> None:
    console = results()
    console.print(f"[bold]{outcome.images} held-out digits[/] over {outcome.connections} connections")
    verdict = "" if outcome.accuracy >= ACCURACY_MIN else "[red], too low[/]"
    show_detail(console, "  accuracy  ", f"{outcome.accuracy:.4f} (at least {ACCURACY_MIN}){verdict}")
    show_detail(console, "  rate      ", f"{outcome.rate:,.0f} images/s")
    latency = f"p50 {outcome.p50_ms:.1f} ms   p95 {outcome.p95_ms:.1f} ms   p99 {outcome.p99_ms:.1f} ms"
    show_detail(console, "  latency   ", latency)
