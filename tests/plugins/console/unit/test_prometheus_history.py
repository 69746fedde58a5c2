"""The longer history: what a Prometheus answers, and one that answers wrongly.

`live/test_prometheus.py` asks a real one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from millstream.plugins.console.gateway import prometheus
from millstream.plugins.console.gateway.traffic_history import SERIES
from millstream.services.errors import Code, Failure

Query = dict[str, list[str]]
#: query -> status and body
Answer = Callable[[Query], tuple[int, bytes]]


@contextmanager
def server(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server below a path, and the paths that it is asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            asked.append(parts.path)
            status, body = answer(parse_qs(parts.query))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_port}/prometheus/", asked
        finally:
            made.shutdown()
            thread.join()


def matrix(query: Query, value: Callable[[int], str]) -> bytes:
    """A reply in the form of Prometheus' documentation, "Range queries", without each fifth instant."""
    start, end, step = (float(query[name][0]) for name in ("start", "end", "step"))
    instants = [start + step * number for number in range(round((end - start) / step) + 1)]
    values = [[at, value(number)] for number, at in enumerate(instants) if number % 5]
    result = [{"metric": {}, "values": values}]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()


def test_series_are_those_that_prometheus_answers() -> None:
    queries: list[str] = []

    def answer(query: Query) -> tuple[int, bytes]:
        queries.extend(query["query"])
        return 200, matrix(query, lambda number: "NaN" if number % 5 == 1 else str(number / 2))

    with server(answer) as (url, asked):
        found = prometheus.history(url, 6, "m")
    assert set(asked) == {"/prometheus/api/v1/query_range"}
    assert found.keys() == {"step_s", "at", *SERIES}
    assert found["step_s"] * (len(found["at"]) - 1) == 6 * 3600
    for name in SERIES:
        assert len(found[name]) == len(found["at"])
        assert found[name][:4] == [None, None, 1.0, 1.5]  # none was sent; NaN; the values of the others
    assert all('{model="m"' in query for query in queries[:5])


def test_nothing_known_is_no_error() -> None:
    empty = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": []}}).encode()
    with server(lambda _: (200, empty)) as (url, _):
        found = prometheus.history(url, 1, None)
    assert set(found["p99_s"]) == {None}


@pytest.mark.parametrize(
    "reply",
    [
        (422, b'{"status": "error", "errorType": "execution", "error": "too many samples"}'),
        (302, b""),
        (200, b"<html>a proxy's page</html>"),
        (200, b"{}"),
        (200, b"[]"),
        (200, b'{"data": {"result": [{"values": [["x", "1"]]}]}}'),
        (200, b'{"data": {"result": [{"values": 1}]}}'),
        (200, b'{"data": {"result": "x"}}'),
        (200, b" " * (5 << 20)),
    ],
)
def test_a_wrong_answer_is_an_error_of_one_line(reply: tuple[int, bytes]) -> None:
    with server(lambda _: reply) as (url, _), pytest.raises(Failure) as caught:
        prometheus.history(url, 1, None)
    assert caught.value.code is Code.UNAVAILABLE
    assert "Prometheus" in caught.value.message
    assert "\n" not in caught.value.message


def test_one_that_is_away_is_an_error() -> None:
    with server(lambda _: (200, b"")) as (url, _):
        pass
    with pytest.raises(Failure, match="gave no history"):
        prometheus.history(url, 1, None)
