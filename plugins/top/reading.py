"""One reading of a server: the series of its metrics page that `millstream top` needs, and its workers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.client.models import Metrics, Sample
from millstream.client.replies import document_of
from millstream.services.errors import Code, Failure

if TYPE_CHECKING:
    from millstream.client.client import Client

REQUESTS = "millstream_requests_total"
DURATION = "millstream_request_duration_seconds_bucket"
ROWS, RUNS = "millstream_batch_rows_sum", "millstream_batch_rows_count"
QUEUED = "millstream_lane_rows"
INSTANCES = "millstream_instances_ready"
BUSY = "millstream_worker_busy_seconds_total"
RESIDENT = "millstream_process_resident_memory_bytes"
IN_FLIGHT = "millstream_requests_in_flight"
REFUSED = "millstream_requests_refused_total"
GATEWAYS = "millstream_gateway_ready"
REDIS_MEMORY = "millstream_redis_memory_used_bytes"
#: A page with many models has tens of thousands of lines; only those of these series are parsed.
_READ = (REQUESTS, DURATION, ROWS, RUNS, QUEUED, INSTANCES, BUSY, RESIDENT, IN_FLIGHT, REFUSED, GATEWAYS, REDIS_MEMORY)


class Reading(NamedTuple):
    """What a server said at one time.

    Args:
        at_s: when, in seconds on a clock that only grows.
        series: samples by the name of their series.
        workers: the workers of the placement document, each with its memory and without its instances.
        no_series: why the server does not show the series to this key; "": it does.
        no_workers: likewise the workers.
    """

    at_s: float
    series: dict[str, list[Sample]]
    workers: list[dict[str, Any]]
    no_series: str = ""
    no_workers: str = ""

    def sums(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the sums of a series by the values of these labels."""
        found: dict[tuple[str, ...], float] = {}
        for sample in self.series.get(name, ()):
            key = tuple(sample.labels.get(label, "") for label in labels)
            found[key] = found.get(key, 0.0) + sample.value
        return found


def read_server(client: Client) -> Reading:
    """Read the metrics page and the workers of a server, as far as the key allows.

    Raises Failure: FORBIDDEN if the key allows neither.
    """
    text, no_series = "", ""
    try:
        text = client.metrics().text
    except Failure as failure:
        no_series = _refusal(failure)
    at_s = time.monotonic()
    workers: list[dict[str, Any]] = []
    no_workers = ""
    try:
        # One model is asked for: `workers` are all in any page, and the versions come from the metrics.
        reply = client.request("GET", "/admin/v1/placement", query={"limit": "1"})
        workers = document_of(reply, "workers")["workers"]
    except Failure as failure:
        no_workers = _refusal(failure)
    if no_series and no_workers:
        raise Failure(Code.FORBIDDEN, f"{no_series}; {no_workers}")
    return reading_of(at_s, text, workers)._replace(no_series=no_series, no_workers=no_workers)


def _refusal(failure: Failure) -> str:
    """Return why the key does not allow a call. Raises any other failure."""
    if failure.code is not Code.FORBIDDEN:
        raise failure
    return failure.message


def reading_of(at_s: float, page: str, workers: list[dict[str, Any]]) -> Reading:
    """Return the reading of a metrics page and the documents of workers."""
    lines = [line for line in page.splitlines() if line.startswith(_READ)]
    series: dict[str, list[Sample]] = {}
    for sample in Metrics("\n".join(lines) + "\n").samples:
        series.setdefault(sample.name, []).append(sample)
    return Reading(at_s, series, workers)
