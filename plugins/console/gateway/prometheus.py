"""Asks a Prometheus for the history that is longer than a gateway keeps."""

from __future__ import annotations

import json
import math
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

from millstream.plugins.console.gateway.rates import FAILED
from millstream.plugins.console.gateway.traffic_history import SERIES
from millstream.services.errors import Code, Failure

HOURS_MAX = 24 * 31
_POINTS = 240
_ANSWER_S_MAX = 10.0
_ANSWER_BYTES_MAX = 4 << 20
_REQUESTS = "sum(rate(millstream_requests_total{%s}[%s]))"
_QUANTILE = "histogram_quantile(%s, sum by (le) (rate(millstream_request_duration_seconds_bucket{%s}[%s])))"


def history(url: str, hours: float, model: str | None) -> dict[str, Any]:
    """Return the series of a model, or of all, as TrafficHistory.document does. Blocks. Raises Failure(UNAVAILABLE).

    Args:
        url: of the Prometheus.
        hours: how long ago the series begin.
        model: its name, which needs no quoting.
    """
    step_s = max(15.0, math.ceil(hours * 3600 / _POINTS))
    end = math.floor(time.time() / step_s) * step_s  # noqa: TID251 - instants for people
    at = [end - step_s * (_POINTS - number) for number in range(_POINTS + 1)]
    window = f"{max(60, int(step_s))}s"
    labels = "" if model is None else f'model="{model}"'
    queries = (
        _REQUESTS % (labels, window),
        _REQUESTS % (f'{labels}{"," if labels else ""}outcome=~"{"|".join(sorted(FAILED))}"', window),
        _QUANTILE % ("0.5", labels, window),
        _QUANTILE % ("0.99", labels, window),
        f"sum(millstream_lane_rows{{{labels}}})",
        f"avg(rate(millstream_worker_busy_seconds_total[{window}]))",
    )
    series = {name: _asked(url, query, at, step_s) for name, query in zip(SERIES, queries, strict=True)}
    return {"step_s": step_s, "at": at, **series}


def _asked(url: str, query: str, at: list[float], step_s: float) -> list[float | None]:
    """Return the values of a query at these instants; None where there is none."""
    asked = urlencode({"query": query, "start": at[0], "end": at[-1], "step": step_s})
    try:
        document = json.loads(_got(url, f"/api/v1/query_range?{asked}"))
        found = document["data"]["result"]
        values = {round(instant): float(value) for instant, value in found[0]["values"]} if found else {}
    except (OSError, HTTPException, ValueError, KeyError, TypeError, IndexError) as error:
        raise Failure(Code.UNAVAILABLE, f"Prometheus at {url} gave no history: {error}") from None
    return [value if value is not None and math.isfinite(value) else None for value in map(values.get, map(round, at))]


def _got(url: str, path: str) -> bytes:
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    end = time.monotonic() + _ANSWER_S_MAX
    connection = kind(parts.hostname or "", parts.port, timeout=_ANSWER_S_MAX)
    with closing(connection):
        connection.request("GET", f"{parts.path.rstrip('/')}{path}", headers={"accept": "application/json"})
        with closing(connection.getresponse()) as reply:
            if reply.status != 200:
                raise ValueError(f"status {reply.status}")
            body = b""
            while chunk := reply.read1(_ANSWER_BYTES_MAX):
                body += chunk
                if len(body) > _ANSWER_BYTES_MAX or time.monotonic() > end:
                    raise ValueError("the answer is too long")
            return body
