"""Calls models that do not fit into memory together, while they are loaded, replaced, deleted and workers die.

callers: random model ─> post ─> right | refused (429 or 503, with a time to retry) | absent (404, deleted) | cut | lost
operations, one after the other: new version, delete and upload again, unload and load, pin, kill a worker, more faults
A call is cut whose gateway was killed: its client calls again.
"""

from __future__ import annotations

import http.client
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from tests.kit import models, v2

COLUMNS = 1024  # of the input of `models.heavy`
CELL_BYTES = 4
ANSWER_S_MAX = 300.0
TIMEOUT_S = 240.0  # of a call: a worker may be paused or restarted for long on a busy machine
REFUSED_S = 0.1
SHOWN_MAX = 20


class Churn:
    """Callers and operations on a running installation.

    Args:
        url: of the gateway.
        folder: for the model files.
        number: how many models there are.
        size_bytes: of the first model; each further one is a little larger, and so has answers of its own.
        workers: returns the pids of the workers.
        faults: further operations; each is called with this churn.

    Attributes:
        counts: outcomes of calls by kind.
        operations: how many operations of each kind were carried out.
        lost: descriptions of calls without a right answer, at most SHOWN_MAX.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        folder: Path,
        number: int,
        size_bytes: int,
        workers: Callable[[], Sequence[int]],
        seed: int,
        faults: Sequence[Callable[[Churn], None]] = (),
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.lost: list[str] = []
        self._url = url
        self._headers = headers
        self._folder = folder
        self._workers = workers
        self._random = random.Random(seed)
        self._seed = seed
        self._width = size_bytes // CELL_BYTES // COLUMNS
        self._next_width = self._width + number
        self._names = [f"churn-{at}" for at in range(number)]
        self._right: dict[str, set[float]] = {name: set() for name in self._names}  # answers of versions so far
        self._absent: set[str] = set()  # deleted or unloaded at some time of a call
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._http = httpx2.Client(base_url=url, headers=headers, timeout=ANSWER_S_MAX, trust_env=False)
        self._kinds: list[Callable[[str], None]] = [
            self._replace,
            self._delete,
            self._unload,
            self._pin,
            self._kill,
        ]
        self._faults = faults
        self._cut_until = float("-inf")  # monotonic; infinity: a gateway is dead. Older connections may be cut

    def upload(self) -> None:
        """Upload the first version of each model."""
        for at, name in enumerate(self._names):
            self._push(name, self._width + at)

    def start(self, callers: int, pause_s: float = 0.0) -> None:
        """Start threads that call random models until `stop`, with a pause after each answer."""
        parameters = {"timeout": round(TIMEOUT_S * 1e6)}
        body, headers = v2.request({"x": np.ones((1, COLUMNS), np.float32)}, parameters=parameters)
        for at in range(callers):
            choose = random.Random(self._seed + at)
            self._threads.append(threading.Thread(target=self._call, args=(choose, body, headers, pause_s)))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._http.close()

    def operate(self, times: int) -> None:
        """Carry out `times` operations on random models, every kind and fault once in random order before any again."""
        ahead: list[Callable[[Any], None]] = []
        for _ in range(times):
            if not ahead:
                ahead = self._random.sample([*self._kinds, *self._faults], len(self._kinds) + len(self._faults))
            kind = ahead.pop()
            kind(self if kind in self._faults else self._random.choice(self._names))
            self.operations[kind.__name__.removeprefix("_")] += 1

    @contextmanager
    def gateway_dies(self) -> Iterator[None]:
        """A gateway is killed in the block, and back at its end: it cuts connections that were used before that."""
        self._cut_until = float("inf")
        yield
        self._cut_until = time.monotonic()
        self._http.close()
        self._http = httpx2.Client(base_url=self._url, headers=self._headers, timeout=ANSWER_S_MAX, trust_env=False)

    def push_without_room(self) -> None:
        """Upload a new version that cannot be stored; the versions before it still answer."""
        self._next_width += 1
        reply = self._upload(self._random.choice(self._names), self._next_width)
        _expect(reply, {500, 503, 507})

    def _push(self, name: str, width: int) -> None:
        _expect(self._upload(name, width), {200, 201, 202})

    def _upload(self, name: str, width: int) -> httpx2.Response:
        path = models.heavy(self._folder / f"{name}-{width}.onnx", width * CELL_BYTES * COLUMNS)
        with self._lock:
            self._right[name].add(answer_of(width))
        reply = self._http.post(
            f"/admin/v1/models/{name}/versions",
            params={"wait": 60},
            content=path.read_bytes(),
            headers={"Content-Type": "application/octet-stream"},
        )
        path.unlink()
        return reply

    def _replace(self, name: str) -> None:
        self._next_width += 1
        self._push(name, self._next_width)

    def _delete(self, name: str) -> None:
        self._leave(name)
        _expect(self._http.delete(f"/admin/v1/models/{name}"), {200, 204})
        self._replace(name)
        self._return(name)

    def _unload(self, name: str) -> None:
        self._leave(name)
        self._ask(f"/v2/repository/models/{name}/unload")
        self._ask(f"/v2/repository/models/{name}/load")
        self._return(name)

    def _ask(self, path: str) -> None:
        """Post until it is done; it may be refused for a while, as when a worker has just died."""
        until = time.monotonic() + ANSWER_S_MAX
        while (reply := self._http.post(path)).status_code == 503 and "retry-after" in reply.headers:
            if time.monotonic() > until:
                break
            time.sleep(REFUSED_S)
        _expect(reply, {200})

    def _pin(self, name: str) -> None:
        for pin in (True, False):
            _expect(self._http.patch(f"/admin/v1/models/{name}", json={"pin": pin}), {200})

    def _kill(self, _name: str) -> None:
        pids = self._workers()
        if pids:
            os.kill(self._random.choice(pids), signal.SIGKILL)

    def _leave(self, name: str) -> None:
        with self._lock:
            self._absent.add(name)

    def _return(self, name: str) -> None:
        with self._lock:
            self._absent.discard(name)

    def _call(self, choose: random.Random, body: bytes, headers: dict[str, str], pause_s: float) -> None:
        address = self._url.removeprefix("http://")
        connection = http.client.HTTPConnection(address, timeout=ANSWER_S_MAX)
        used_at = time.monotonic()  # when the connection was made, or its last answered call began
        while not self._stopping.is_set():
            name = choose.choice(self._names)
            with self._lock:
                absent = name in self._absent
            began = time.monotonic()
            try:
                connection.request("POST", f"/v2/models/{name}/infer", body, headers)
                reply = connection.getresponse()
                kind, why = self._judge(name, absent, reply.status, dict(reply.getheaders()), reply.read())
                used_at = began
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                kind, why = "cut" if used_at < self._cut_until else "lost", repr(error)
                used_at = time.monotonic()
            with self._lock:
                self.counts[kind] += 1
                if kind == "lost" and len(self.lost) < SHOWN_MAX:
                    self.lost.append(f"{name}: {why}")
            time.sleep(REFUSED_S if kind == "refused" else pause_s)
        connection.close()

    def _judge(self, name: str, absent: bool, status: int, headers: dict[str, str], body: bytes) -> tuple[str, str]:
        """Return the kind of an outcome, and what is wrong with it."""
        if status == 200:
            answer = float(v2.outputs(body, headers)["y"].ravel()[0])
            with self._lock:
                right = answer in self._right[name]
            return ("right", "") if right else ("lost", f"{answer} is the answer of no version")
        if status in (429, 503) and "retry-after" in {key.lower() for key in headers}:
            return "refused", ""
        with self._lock:
            absent = absent or name in self._absent
        if status == 404 and absent:
            return "absent", ""
        return "lost", f"{status} {body[:300]!r}"


def answer_of(width: int) -> float:
    """Return what `models.heavy` answers to a row of ones, with a matrix of this width."""
    return COLUMNS * 0.5 * width


def _expect(reply: Any, statuses: set[int]) -> None:
    if reply.status_code not in statuses:
        raise AssertionError(f"{reply.request.method} {reply.request.url}: {reply.status_code} {reply.text[:500]}")
