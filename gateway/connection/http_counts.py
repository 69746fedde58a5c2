"""Counts replies over HTTP by the template of the path, method and status. Fast path and ASGI app use it.

The number of series is bounded: paths without a route, and methods that no route has, are counted as `other`.
"""

from __future__ import annotations

from millstream.gateway.connection.request_head import InferPath
from millstream.services.metrics.catalogue import HTTP_REQUESTS
from millstream.services.metrics.record import OTHER
from millstream.services.metrics.registry import Counter, MetricsRegistry

#: The templates of the infer routes, as in protocols/v2/routes_infer.py.
INFER_ROUTE = "/v2/models/{model}/infer"
INFER_VERSION_ROUTE = "/v2/models/{model}/versions/{version}/infer"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_STATUSES = range(100, 600)


class HttpCounts:
    """The counters of one gateway.

    `infer_ok`: the cells of replies 200 of the fast path, by whether the path names a version.
    """

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry
        self._counters: dict[tuple[str, ...], Counter] = {}
        self.infer_ok = tuple(
            self._counter(route, "POST", "200").cell() for route in (INFER_ROUTE, INFER_VERSION_ROUTE)
        )

    def add(self, route: str | None, method: str, status: int) -> None:
        """Count a reply. `route` None: no route has the path."""
        known = method if method in _METHODS else OTHER
        self._counter(route or OTHER, known, str(status) if status in _STATUSES else OTHER).add()

    def add_infer(self, path: InferPath, status: int) -> None:
        """Count a reply of the fast path; the path ("", None) is of a request whose head was refused."""
        model, version = path
        if not model:
            self.add(None, OTHER, status)
        else:
            self.add(INFER_ROUTE if version is None else INFER_VERSION_ROUTE, "POST", status)

    def _counter(self, *labels: str) -> Counter:
        counter = self._counters.get(labels)
        if counter is None:
            counter = self._counters[labels] = self._registry.counter(HTTP_REQUESTS, *labels)
        return counter
