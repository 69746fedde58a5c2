"""The traces of requests as tests see them: their ids, the spans of a request, and the lines of the access log."""

from __future__ import annotations

import secrets

from tests.kit.otlp import Seen
from tests.kit.stack import Stack
from tests.kit.wait import wait_until

#: spans of a request, in the order in which they begin
PARTS = ["decode", "lane", "queue", "worker", "run", "reply"]
#: kind of the span of a request
SERVER = 2


def new_trace() -> tuple[str, str, str]:
    """A trace id, the id of the caller's span, and the header that has both."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, f"00-{trace_id}-{span_id}-01"


def assert_whole(spans: dict[str, Seen], server: Seen, parent: str, rows: int = 2) -> None:
    """The parts of a request are in its trace, in the order of time and within the server's span."""
    assert set(PARTS) <= spans.keys(), spans.keys()
    assert (server.parent_id, server.failed) == (parent, False)
    parts = [spans[name] for name in PARTS]
    assert [part.parent_id for part in parts if part.name != "run"] == [server.span_id] * 5
    assert spans["run"].parent_id == spans["worker"].span_id
    assert [part.start_ns for part in parts] == sorted(part.start_ns for part in parts)
    assert all(server.start_ns <= part.start_ns <= part.end_ns <= server.end_ns for part in parts)
    assert server.resource["service.name"] == "millstream-gateway"
    assert server.resource["deployment.environment.name"] == "test"
    assert spans["run"].resource["service.name"] == "millstream-worker"
    assert spans["worker"].attributes["millstream.model"] == "m"
    assert spans["worker"].attributes["millstream.rows"] == rows


def access_lines(stack: Stack, text: str, count: int = 1) -> list[str]:
    """Wait for lines of the access log that contain `text`."""

    def find() -> list[str]:
        found = (stack.home / "logs" / "gateway-0-access.log").read_text().splitlines()
        return [line for line in found if text in line]

    return wait_until(lambda: lines if len(lines := find()) >= count else [], what=f"{text} in the access log")
