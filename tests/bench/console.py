"""Measure what the console costs a gateway with many models, in turns with one that has no console.

python -m tests.bench --console 1000     (make bench ARGS="--console 1000")
two installations, one without the plug-in ─> rounds: without · nobody looks · VIEWERS look · without, with calls · …
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.many import await_served, calling, connection_to
from tests.bench.processes import GATEWAY, memory, process_cpu_s, running_module
from tests.bench.servers import ADMIN, Server, millstream_up
from tests.kit.many_models import many_scales, write_repository

VIEWERS = 10
CALLS_PER_S = 50  # of models in turn, where there are calls
ROUNDS, ROUND_S = 3, 20.0
WITHOUT, IDLE, VIEWED = "without the console", "nobody looks", f"{VIEWERS} consoles open"


def run(models: int, status: Callable[[str], None]) -> dict[str, list[float]]:
    """Return the shares of a core that the gateway took in each round, in percent, and its MiB at the end."""
    found: dict[str, list[float]] = {}
    with TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        repository = write_repository(folder / "repository", many_scales(models))
        names = [name for name, _ in many_scales(models)]
        servers = {}
        for name, plugins in (("without", "-console"), ("with", "all")):
            status(f"starting {models} models {name} the console")
            arguments = ["--triton-repository", str(repository)]
            server = stack.enter_context(
                millstream_up(folder, name, arguments, environment={"MILLSTREAM_PLUGINS": plugins})
            )
            with connection_to(server) as connection:
                await_served(connection, models)
            servers[name] = server
        for number in range(ROUNDS):
            for calls in (False, True):
                for what, name in ((WITHOUT, "without"), (IDLE, "with"), (VIEWED, "with")):
                    title = f"{what}, {CALLS_PER_S} calls a second" if calls else what
                    status(f"round {number + 1} of {ROUNDS}: {title}")
                    with ExitStack() as busy:
                        if what == VIEWED:
                            busy.enter_context(viewers(servers[name], VIEWERS))
                        if calls:
                            busy.enter_context(calling(servers[name], names, CALLS_PER_S))
                        found.setdefault(title, []).append(_gateway_percent(servers[name]))
        for name, server in servers.items():
            [gateway] = running_module(server.pid, GATEWAY)
            found[f"MiB {name} the console"] = [memory(gateway).rss_bytes / (1 << 20)]
    return found


def lines(found: dict[str, list[float]]) -> Iterator[str]:
    """Yield a line for each row: the median, and all values."""
    for title, values in found.items():
        yield f"{title:48} {statistics.median(values):6.2f}   {' '.join(f'{value:.2f}' for value in values)}"


def _gateway_percent(server: Server) -> float:
    [gateway] = running_module(server.pid, GATEWAY)
    time.sleep(2.0)  # what begins is over
    before, began = process_cpu_s(gateway), time.monotonic()
    time.sleep(ROUND_S)
    return 100 * (process_cpu_s(gateway) - before) / (time.monotonic() - began)


@contextmanager
def viewers(server: Server, count: int) -> Iterator[None]:
    """Have consoles read the live figures."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connections = [HTTPConnection(host, int(port)) for _ in range(count)]
    threads = []
    for connection in connections:
        connection.request("GET", "/console/api/events", headers=ADMIN)
        reply = connection.getresponse()
        thread = threading.Thread(target=_read_all, args=(reply.read1,), daemon=True)
        thread.start()
        threads.append(thread)
    try:
        yield
    finally:
        for connection in connections:
            if connection.sock is not None:
                connection.sock.shutdown(2)
            connection.close()
        for thread in threads:
            thread.join()


def _read_all(read: Callable[[int], bytes]) -> None:
    try:
        while read(1 << 20):
            pass
    except (OSError, ValueError, AttributeError, HTTPException):
        return  # it was closed
