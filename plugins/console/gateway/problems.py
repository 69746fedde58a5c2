"""What is wrong now, and what to do about it, in the words of the alerts (deploy/prometheus/rules). Pure.

An alert waits for minutes before it calls somebody; the console is looked at, so it tells at once.
docs/operations.md has a section for each alert, with more to look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from millstream.gateway.catalog.snapshot import Snapshot
from millstream.plugins.console.gateway.rates import Growth
from millstream.services.metrics import catalogue
from millstream.services.wire.records import State

PROBLEMS_MAX = 50  # that are told; the critical ones come first
_FAILING_MIN, _FAILING_SHARE = 5, 0.05  # requests of a model that failed, and their share
_FULL, _FREE = 0.9, 0.1
_REDIS_FULL = 0.85
_DAY_S = 86_400.0
_CERTIFICATE_S, _KEY_S = 14 * _DAY_S, 7 * _DAY_S
_REASON_MAX = 300  # characters


class Problem(NamedTuple):
    """One problem. `model`: that it is about, so that others need not see it. `private`: who reads all sees it."""

    severity: str
    title: str
    detail: str
    action: str
    model: str | None = None
    private: bool = False


def problems(growth: Growth, snapshot: Snapshot, disk: tuple[int, int], at: float) -> list[dict[str, Any]]:
    """Return the problems, the critical ones first.

    Args:
        growth: since some seconds ago.
        snapshot: the models and workers.
        disk: bytes of the disk that holds the models, and those that are free; (0, 0): not known.
        at: the current instant, in seconds since the epoch.
    """
    found = [
        *_of_processes(growth, snapshot),
        *_of_redis(growth),
        *_of_requests(growth),
        *_of_versions(growth, snapshot),
        *_of_limits(growth, disk, at),
    ]
    found.sort(key=lambda one: one.severity)  # "critical" is before "warning"
    return [one._asdict() for one in found[:PROBLEMS_MAX]]


def _of_processes(growth: Growth, snapshot: Snapshot) -> Iterator[Problem]:
    wanted, ready = growth.now.of(catalogue.WORKERS_WANTED), growth.now.of(catalogue.WORKERS_READY)
    needs_none = bool(wanted) and not any(values[0] for values in wanted.values())
    if not snapshot.workers and not needs_none:
        yield Problem(
            "critical",
            "No worker is running",
            "Requests wait until their deadline and then fail.",
            "Start workers. If they die at once: a memory limit, a missing device, or wrong settings; `millstream "
            "doctor` and the workers' logs tell which.",
        )
    for (process,), (value, *_) in growth.now.of(catalogue.GATEWAY_READY).items():
        if not value and not needs_none:
            yield Problem(
                "critical",
                f"{process} is not ready",
                "It is running, but Redis or every worker does not answer it: load balancers send it nothing.",
                "GET /v2/health/ready says why. Start Redis or workers.",
            )
    for (pool,), (count, *_) in wanted.items():
        if count > ready.get((pool,), (0.0,))[0]:
            yield Problem(
                "warning",
                f"Pool {pool} has fewer workers than the {count:.0f} that it needs",
                "Scaling does not work, or is too slow for the load.",
                "Workers start and do not become ready: look at their logs. No worker starts: what scales the pool "
                "has reached its own limit.",
            )
    for (pool,) in growth.all(catalogue.BATCHES_RECLAIMED):
        yield Problem(
            "warning",
            f"Pool {pool} loses workers",
            "Workers die or freeze with work in hand. Their callers wait longer and are answered by others.",
            "Look for memory limits and at the supervisor's log; `millstream logs supervisor`.",
        )
    leads = growth.now.of(catalogue.CONTROLLER_LEADS)
    if leads and not growth.now.value(catalogue.CONTROLLER_LEADS):
        yield Problem(
            "warning",
            "No controller leads",
            "Serving goes on; but no instance is added, moved or unloaded, and pools are not scaled.",
            "Start one. If one runs: it needs Redis and may read the repository.",
        )


def _of_redis(growth: Growth) -> Iterator[Problem]:
    for (process,), (value, *_) in growth.now.of(catalogue.REDIS_UP).items():
        if not value:
            yield Problem(
                "critical",
                f"Redis does not answer {process}",
                "Requests wait until their deadline and then fail; batches in flight are put again when Redis is back.",
                "Start Redis, or mend the network. Nothing is lost but requests whose deadline passed.",
            )
    used = growth.now.value(catalogue.REDIS_MEMORY_USED_BYTES)
    limit = growth.now.value(catalogue.REDIS_MEMORY_LIMIT_BYTES)
    if limit and used / limit > _REDIS_FULL:
        yield Problem(
            "critical",
            f"Redis uses {used / limit:.0%} of its memory limit",
            "At the limit Redis refuses new batches and callers get errors.",
            "Raise the limit (`redis-cli config set maxmemory 2gb`), or lower MILLSTREAM_INFLIGHT_BYTES_MAX to refuse "
            "earlier instead.",
        )


def _of_requests(growth: Growth) -> Iterator[Problem]:
    by_model: dict[str, list[float]] = {}
    for (model, _), (requests, failed, _) in growth.all(catalogue.REQUESTS).items():
        counts = by_model.setdefault(model, [0.0, 0.0])
        counts[0] += requests
        counts[1] += failed
    for model, (requests, failed) in sorted(by_model.items()):
        if failed >= _FAILING_MIN and failed > _FAILING_SHARE * requests:
            yield Problem(
                "critical",
                f"{model}: {failed / requests:.0%} of the requests fail",
                "Requests and logs tell how and why.",
                "Overloaded or expired: more workers, or fewer calls at once. The model fails: activate the version "
                "before.",
                model,
            )
    for (reason,), (count, *_) in growth.all(catalogue.REQUESTS_REFUSED).items():
        if per_s := growth.rate(count):
            yield Problem(
                "warning",
                f"Requests are refused: {reason}",
                f"{per_s:.3g} a second, before they are queued; callers get 429 or 503 with Retry-After.",
                _REFUSED.get(reason, "Add workers or slow the callers down."),
            )
    if count := growth.now.value(catalogue.REQUESTS_QUARANTINED):
        yield Problem(
            "warning",
            f"{count} requests are refused because they killed workers",
            "A caller that sends the same bytes again gets an error; the workers' logs tell which model it was.",
            "Find the caller by the request id, and the input that ends the process. The quarantine ends by itself.",
        )


_REFUSED = {
    "lane_full": "More workers, or fewer calls at once.",
    "deadline": "More workers, or fewer calls at once.",
    "gateway_full": "More gateways, or a higher MILLSTREAM_INFLIGHT_REQUESTS_MAX.",
    "receiving_full": "Callers send slowly; find them in the log of your proxy.",
    "unread_full": "Callers read slowly; find them in the log of your proxy.",
}


def _of_versions(growth: Growth, snapshot: Snapshot) -> Iterator[Problem]:
    refused = {key[:2] for key, (value, *_) in growth.now.of(catalogue.VERSION_REFUSED).items() if value}
    for model, version in sorted(refused):
        yield Problem(
            "critical",
            f"{model} {version} keeps ending its workers and is refused",
            "Requests crash it, or run without end; workers' logs tell how.",
            "Activate another version. To try this one again, activate it once its reason is gone.",
            model,
        )
    for (model, version), (value, *_) in sorted(growth.now.of(catalogue.BATCHING_OFF).items()):
        if value:
            yield Problem(
                "warning",
                f"{model} {version}: its rows influence each other, batching is off",
                "A live batch gave what its rows do not give alone, so earlier answers of this version may be wrong. "
                "Its requests run one at a time now.",
                "Export the model without what normalises or sorts over the batch. To activate the same version tries "
                "batching again.",
                model,
            )
    for model, version in sorted(growth.queued().keys() - growth.now.instances().keys()):
        yield Problem(
            "critical",
            f"{model} {version}: rows wait, nothing is ready",
            "No instance of this version may serve.",
            "It is being loaded: wait. It could not be loaded: the model's page shows the reason. Its pool has no "
            "worker: start one, or take the pool out of the model's settings.",
            model,
        )
    for view in snapshot.models.values():
        for number, one in view.versions.items():
            if one.loaded and one.state is State.FAILED:
                yield Problem(
                    "warning",
                    f"{view.name} {number} could not be loaded",
                    (one.reason or "The workers' logs have the reason.")[:_REASON_MAX],
                    "Too little memory: a larger budget, or more workers. A damaged file: push the version again. An "
                    "operator that the backend does not have: convert the model, or use another backend.",
                    view.name,
                )


def _of_limits(growth: Growth, disk: tuple[int, int], at: float) -> Iterator[Problem]:
    allowed = growth.now.of(catalogue.PROCESS_MAX_FDS)
    for (process,), (count, *_) in growth.now.of(catalogue.PROCESS_OPEN_FDS).items():
        limit = allowed.get((process,), (0.0,))[0]
        if limit and count / limit > _FULL:
            yield Problem(
                "warning",
                f"{process} has {count / limit:.0%} of its file descriptors open",
                "New connections are refused at the limit.",
                "Raise it (`ulimit -n`), or add gateways.",
            )
    size_bytes, free_bytes = disk
    if size_bytes and free_bytes / size_bytes < _FREE:
        yield Problem(
            "warning",
            f"{free_bytes / size_bytes:.0%} of the disk that holds the models are free",
            "Uploads are refused below 256 MiB. Serving goes on.",
            "Delete versions that serve nothing, let uploads do it (MILLSTREAM_VERSIONS_KEPT), or give the folder a "
            "larger disk.",
        )
    for (listener,), (expires, *_) in growth.now.of(catalogue.TLS_CERTIFICATE_EXPIRY).items():
        if expires - at < _CERTIFICATE_S:
            yield Problem(
                "warning",
                f"The certificate of {listener} expires in {_days(expires - at)}",
                "Clients refuse connections from then on.",
                "Put the new certificate in its place: the gateway reads it without a restart.",
            )
    for (key,), (expires, *_) in growth.now.of(catalogue.KEY_EXPIRY).items():
        if 0 < expires - at < _KEY_S:
            yield Problem(
                "warning",
                f"API key {key} expires in {_days(expires - at)}",
                "Its callers are refused from then on.",
                f"`millstream keys edit {key} --expires 90d`",
                private=True,
            )


def _days(seconds: float) -> str:
    return f"{max(0.0, seconds) / _DAY_S:.1f} days"
