"""Measures what a batch costs each process of a running Millstream, and Redis.

counters of /metrics, /proc and Redis before ─> load ─> the same counters after ─> Cost
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from millstream.services.queue.url import RedisAddress, client
from tests.bench import servers
from tests.bench.load import Load, Payload, measure
from tests.bench.processes import GATEWAY, PROC, WORKER, process_cpu_s, running_module, tree
from tests.kit.metrics import Page

PROCESSES = ("gateway", "redis", "worker")
_SERVERS = (b"valkey-server", b"redis-server")


@dataclass(frozen=True)
class Reading:
    """Counters of one stack at an instant. `calls` are commands of Redis, those within scripts included."""

    batches: float
    requests: float
    cpu_s: dict[str, float]
    calls: int
    script_us: float


@dataclass(frozen=True)
class Cost:
    """One measurement; CPU, calls and the time of scripts are per batch."""

    load: Load
    requests: float
    cpu_us: dict[str, float]
    calls: float
    script_us: float


class Stack:
    """A running Millstream whose processes are told apart."""

    def __init__(self, name: str, server: servers.Server, home: Path) -> None:
        self.name = name
        self.server = server
        self._pids = {
            "gateway": running_module(server.pid, GATEWAY),
            "redis": [pid for pid in tree(server.pid) if _program(pid).endswith(_SERVERS)],
            "worker": running_module(server.pid, WORKER),
        }
        self._redis = client(RedisAddress.parse(f"unix://{next(home.rglob('redis.sock'))}"))

    def read(self) -> Reading:
        page = Page(httpx2.get(self.server.url + "/metrics").text)
        stats: dict[str, Any] = self._redis.info("commandstats")
        return Reading(
            page.value("millstream_batches_total"),
            page.value("millstream_requests_total", outcome="ok"),
            {name: sum(map(process_cpu_s, pids)) for name, pids in self._pids.items()},
            sum(found["calls"] for found in stats.values()),
            stats.get("cmdstat_evalsha", {}).get("usec", 0),
        )


def _program(pid: int) -> bytes:
    return (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[0].split(b" ")[0]


def cost(stack: Stack, path: str, payload: Payload, connections: int, seconds: int) -> Cost:
    """Put load on a stack as `measure` does, and return what it cost. Raises LoadError."""
    before = stack.read()
    load = measure(stack.server, path, payload, connections, seconds)
    after = stack.read()
    batches = after.batches - before.batches
    return Cost(
        load,
        (after.requests - before.requests) / batches,
        {name: (after.cpu_s[name] - before.cpu_s[name]) / batches * 1e6 for name in after.cpu_s},
        (after.calls - before.calls) / batches,
        (after.script_us - before.script_us) / batches,
    )
