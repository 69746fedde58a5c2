"""Measure what models cost that are registered and not called, and what calls cost among many models.

python -m tests.bench --many 10,100,1000     (make bench ARGS="--many 10,100,1000")
registered -> idle: CPU, memory, Redis, pages -> started again -> hot calls -> cold calls
"""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import orjson
import redis as redis_py
from rich.table import Table

from millstream.services.queue.server import socket_path
from tests.bench.errors import LoadError
from tests.bench.processes import GATEWAY, WORKER, cpu_s, memory, running_module
from tests.bench.servers import ADMIN, Server, millstream_up
from tests.kit.many_models import many_heavy, many_mlps, many_scales, write_repository
from tests.kit.metrics import Page

IDLE_S = 10.0
THOUSAND = 1000
HOT = 50
CALLS = 2000
COLD_CALLS = 100
READY_S_MAX = 600.0
HOT_ROUNDS = 3  # each of calls of one model alone and of HOT among many, in turn
_BODY = orjson.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]})


@dataclass(frozen=True)
class Idle:
    """An installation of one gateway and one worker with this many models, of which none is called."""

    models: int
    register_s: float  # from the start until all models of a repository are served
    start_s: float  # of the same installation again
    gateway_cpu: float  # seconds of CPU per second
    worker_cpu: float
    redis_cpu: float
    gateway_mib: float
    worker_mib: float
    redis_keys: int
    redis_kib: float
    record_bytes: int  # of the worker, which it writes with every heartbeat
    metrics_ms: float
    metrics_kib: float
    index_ms: float  # POST /v2/repository/index
    models_ms: float  # GET /v2/models


@dataclass(frozen=True)
class Calls:
    """Calls of one row, one after the other."""

    models: int
    called: int  # models that are called in turn
    p50_us: float
    p99_us: float
    cpu_us: float  # of all processes, per call


def _get(connection: HTTPConnection, method: str, path: str, body: bytes | None = None) -> bytes:
    connection.request(method, path, body, ADMIN)
    reply = connection.getresponse()
    content = reply.read()
    if reply.status >= 300:
        raise LoadError(f"{method} {path} answered {reply.status}: {content[:200]!r}")
    return content


@contextmanager
def connection_to(server: Server) -> Iterator[HTTPConnection]:
    """Yield a connection to a server."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = HTTPConnection(host, int(port), timeout=120)
    try:
        yield connection
    finally:
        connection.close()


def _milliseconds(work: Callable[[], object], times: int = 5) -> float:
    """Return the median time of `work`, after one run that is not measured."""
    work()
    spans = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        spans.append(time.perf_counter() - began)
    return statistics.median(spans) * 1e3


def measure(folder: Path, models: int, status: Callable[[str], None], *, hot: bool) -> Iterator[Idle | Calls]:
    """Measure an installation with `models` models without calls; `hot`: then with calls of HOT of them, too."""
    repository = write_repository(folder / f"repository-{models}", many_scales(models))
    arguments = ["--triton-repository", str(repository)]
    status(f"{models} models: registering")
    began = time.monotonic()
    with millstream_up(folder, f"many-{models}", arguments):
        register_s = time.monotonic() - began
    status(f"{models} models: starting again")
    began = time.monotonic()
    with millstream_up(folder, f"many-{models}", arguments) as server:
        start_s = time.monotonic() - began
        status(f"{models} models: idle")
        yield _idle(server, folder / f"many-{models}", models, register_s, start_s)
        if hot:
            yield from _hot(folder, server, models, status)


def _hot(folder: Path, server: Server, models: int, status: Callable[[str], None]) -> Iterator[Calls]:
    """Measure calls of one model alone in an installation of its own and of HOT among many, in turn."""
    one = write_repository(folder / "repository-one", many_scales(1))
    with millstream_up(folder, "one", ["--triton-repository", str(one)]) as alone:
        names = [name for name, _ in many_scales(min(models, HOT))]
        for turn in range(1, HOT_ROUNDS + 1):
            status(f"{models} models: hot calls, round {turn}")
            yield calls(alone, names[:1], 1)
            yield calls(server, names, models)


class Thousand(NamedTuple):
    """An installation of THOUSAND models.

    Args:
        register_s: from the start until all of them are served.
        alone: hot calls of the only model of another installation, one for each round.
        among: hot calls of HOT of the models.
    """

    register_s: float
    alone: Sequence[Calls]
    among: Sequence[Calls]


def measure_thousand(folder: Path, status: Callable[[str], None]) -> Thousand:
    """Register THOUSAND models and call some of them."""
    repository = write_repository(folder / "repository-thousand", many_scales(THOUSAND))
    status(f"{THOUSAND} models: registering")
    began = time.monotonic()
    with millstream_up(folder, "thousand", ["--triton-repository", str(repository)]) as server:
        register_s = time.monotonic() - began
        found = list(_hot(folder, server, THOUSAND, status))
    return Thousand(register_s, found[::2], found[1::2])


def _idle(server: Server, home: Path, models: int, register_s: float, start_s: float) -> Idle:
    with connection_to(server) as connection:
        await_served(connection, models)
        gateway, worker = running_module(server.pid, GATEWAY)[0], running_module(server.pid, WORKER)[0]
        redis = redis_py.Redis(unix_socket_path=str(socket_path(home / "run")))
        pids = (gateway, worker, int(redis.info("server")["process_id"]))
        time.sleep(IDLE_S / 2)
        before = [cpu_s(pid) for pid in pids]
        time.sleep(IDLE_S)
        of_gateway, of_worker, of_redis = ((cpu_s(pid) - at) / IDLE_S for pid, at in zip(pids, before, strict=True))
        page = _get(connection, "GET", "/metrics")
        record = next(redis.scan_iter("*:record:*"))
        return Idle(
            models=models,
            register_s=register_s,
            start_s=start_s,
            gateway_cpu=of_gateway,
            worker_cpu=of_worker,
            redis_cpu=of_redis,
            gateway_mib=memory(gateway).rss_bytes / (1 << 20),
            worker_mib=memory(worker).rss_bytes / (1 << 20),
            redis_keys=redis.dbsize(),
            redis_kib=redis.info("memory")["used_memory"] / 1024,
            record_bytes=len(redis.get(record) or b""),
            metrics_ms=_milliseconds(lambda: _get(connection, "GET", "/metrics")),
            metrics_kib=len(page) / 1024,
            index_ms=_milliseconds(lambda: _get(connection, "POST", "/v2/repository/index", b"{}")),
            models_ms=_milliseconds(lambda: _get(connection, "GET", "/v2/models")),
        )


def await_served(connection: HTTPConnection, models: int) -> None:
    """Return when all models answer, on standby or ready."""
    deadline = time.monotonic() + READY_S_MAX
    while time.monotonic() < deadline:
        listed = orjson.loads(_get(connection, "POST", "/v2/repository/index", b"{}"))
        if sum(entry.get("state") == "READY" for entry in listed) == models:
            return
        time.sleep(0.5)
    raise LoadError(f"{models} models were not served after {READY_S_MAX:g} s")


def calls(server: Server, names: Sequence[str], models: int, count: int = CALLS) -> Calls:
    """Call `names` in turn over one connection."""
    with connection_to(server) as connection:
        for name in names:
            _get(connection, "POST", f"/v2/models/{name}/infer", _BODY)
        before, spans = cpu_s(server.pid), []
        for number in range(count):
            began = time.perf_counter()
            _get(connection, "POST", f"/v2/models/{names[number % len(names)]}/infer", _BODY)
            spans.append(time.perf_counter() - began)
        cpu = cpu_s(server.pid) - before
    spans.sort()
    return Calls(models, len(names), spans[count // 2] * 1e6, spans[count * 99 // 100] * 1e6, cpu / count * 1e6)


@contextmanager
def calling(server: Server, names: Sequence[str], per_s: float) -> Iterator[None]:
    """Call models in turn, each at its time, as long as the block lasts."""
    ended = threading.Event()

    def call() -> None:
        with connection_to(server) as connection:
            began, number = time.monotonic(), 0
            while not ended.wait(max(0.0, began + number / per_s - time.monotonic())):
                _get(connection, "POST", f"/v2/models/{names[number % len(names)]}/infer", _BODY)
                number += 1

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class ColdModel(NamedTuple):
    """A kind of model whose first calls are measured.

    Args:
        size: of its file, for people.
        make: yields the names and files of so many models.
        models: how many are registered: more than fit in `memory`.
        memory: of the worker; the interpreter and its libraries take 100 MiB of it.
        body: of a request.
    """

    size: str
    make: Callable[[int], Iterable[tuple[str, bytes]]]
    models: int
    memory: str
    body: bytes


@dataclass(frozen=True)
class Cold:
    """First calls of models that a full worker does not hold, one after the other."""

    kind: str
    models: int
    calls: int
    unloaded: int  # models that the worker unloaded meanwhile
    cold_ms: float  # median of the calls
    load_ms: float  # median of what the worker says that their loads took
    run_ms: float  # median of the next call of each
    ratio: float  # median of call / (load + next call)
    ratio_p90: float  # 90th percentile of that


def measure_cold(folder: Path, kind: str) -> Cold:
    """Measure first calls among models of which only a part fits in the memory of the worker."""
    model = COLD_MODELS[kind]
    repository = write_repository(folder / f"repository-cold-{kind}", model.make(model.models))
    arguments = ["--triton-repository", str(repository), "--memory", model.memory]
    spans: list[tuple[float, float, float]] = []  # of a first call, the next one, and the load, in seconds
    with millstream_up(folder, f"cold-{kind}", arguments) as server, connection_to(server) as connection:
        await_served(connection, model.models)
        _fill(connection, model)
        before = _unloaded(connection)
        while len(spans) < COLD_CALLS:
            standby = _on_standby(connection)[: COLD_CALLS - len(spans)]
            spans.extend((*_call_twice(connection, name, model), _load_s(connection, name)) for name in standby)
        unloaded = _unloaded(connection) - before
    ratios = sorted(first / (load + second) for first, second, load in spans)
    median, p90 = (ratios[len(ratios) * percent // 100] for percent in (50, 90))
    cold_ms, run_ms, load_ms = (statistics.median(found) * 1e3 for found in zip(*spans, strict=True))
    return Cold(kind, model.models, len(spans), unloaded, cold_ms, load_ms, run_ms, median, p90)


def _fill(connection: HTTPConnection, model: ColdModel) -> None:
    """Call models until the worker has unloaded one: a worker fills only a part of its memory without calls.

    Raises LoadError if all models fit.
    """
    for name in _on_standby(connection):
        _get(connection, "POST", f"/v2/models/{name}/infer", model.body)
        if _unloaded(connection):
            return
    raise LoadError(f"{model.memory} hold all {model.models} models: none was unloaded")


def _unloaded(connection: HTTPConnection) -> int:
    """Return how many models were unloaded to make room."""
    page = Page(_get(connection, "GET", "/metrics").decode())
    return round(page.value("millstream_evictions_total"))


def _call_twice(connection: HTTPConnection, name: str, model: ColdModel) -> tuple[float, float]:
    """Return the seconds of two calls of a model, the first of which loads it."""
    spans = []
    for _ in range(2):
        began = time.perf_counter()
        _get(connection, "POST", f"/v2/models/{name}/infer", model.body)
        spans.append(time.perf_counter() - began)
    return spans[0], spans[1]


def _on_standby(connection: HTTPConnection) -> list[str]:
    listed = orjson.loads(_get(connection, "POST", "/v2/repository/index", b"{}"))
    return [entry["name"] for entry in listed if "standby" in entry.get("reason", "")]


def _load_s(connection: HTTPConnection, model: str) -> float:
    """Return the seconds that a worker measured for a load, once its record says so: the first answer may come before.

    Raises LoadError after READY_S_MAX.
    """
    deadline = time.monotonic() + READY_S_MAX
    while time.monotonic() < deadline:
        for one in _instances(connection, model):
            if one["load_s"]:
                return float(one["load_s"])
        time.sleep(0.01)
    raise LoadError(f"no worker says that it has loaded {model}")


def _instances(connection: HTTPConnection, model: str) -> list[dict[str, Any]]:
    document = orjson.loads(_get(connection, "GET", f"/admin/v1/placement?model={model}"))
    return [instance for worker in document["workers"] for instance in worker["instances"]]


def _request(name: str, columns: int) -> bytes:
    """Return the body of a request with one row for the input `name`."""
    return orjson.dumps(
        {"inputs": [{"name": name, "shape": [1, columns], "datatype": "FP32", "data": [0.5] * columns}]}
    )


COLD_MODELS = {
    "mlp": ColdModel("340 KB", many_mlps, 400, "256MiB", _request("input", 64)),
    "heavy": ColdModel("20 MB", partial(many_heavy, size_bytes=20_000_000), 40, "512MiB", _request("x", 1024)),
}


def run(sizes: Sequence[int], status: Callable[[str], None]) -> Iterator[Idle | Calls | Cold]:
    """Make all measurements and yield each."""
    with TemporaryDirectory(prefix="millstream-many-") as name:
        folder = Path(name)
        for models in sizes:
            yield from measure(folder, models, status, hot=models == max(sizes))
        for kind in COLD_MODELS:
            status(f"cold calls of {kind}")
            yield measure_cold(folder, kind)


def tables(found: Sequence[Any]) -> Iterator[Table]:
    """Yield a table for each kind of measurement: a row for each field, a column for each measurement."""
    for kind in dict.fromkeys(type(one) for one in found):
        rows = [one for one in found if type(one) is kind]
        table = Table(title=re.split(r"[.,]", kind.__doc__ or "")[0])
        table.add_column("")
        for _ in rows:
            table.add_column(justify="right")
        for field in fields(kind):
            table.add_row(field.name, *(_shown(getattr(one, field.name)) for one in rows))
        yield table


def _shown(value: object) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.4g}" if value < 10 else f"{value:,.0f}"
