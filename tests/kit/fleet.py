"""Starts gateways and workers one by one over one Redis, like containers that each have their own machine.

with fleet(tmp_path, address) as machines: url = machines.gateway(); machines.worker(ahead_s=31)
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from millstream.services.queue.url import RedisAddress
from millstream.services.settings import settings_class
from tests.kit.stack import token_of
from tests.kit.wait import wait_until

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PROGRAMS = ROOT / "tests" / "integration" / "programs"
WAIT_S = 240.0
CALL_S_MAX = WAIT_S + 60


class Fleet:
    """Processes that share a home, with its repository, and a Redis. `tree` is the source that they run."""

    def __init__(self, folder: Path, address: RedisAddress, tree: Path, settings: dict[str, object]) -> None:
        self.folder = folder
        self._tree = tree
        environment = {"HOME": folder / "home", "REDIS_URL": address.url, "GRPC_PORT": -1} | settings
        assert {name.lower() for name in environment} <= settings_class().model_fields.keys()
        self._environment = {f"MILLSTREAM_{name}": str(value) for name, value in environment.items()}
        self._started: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._ours: list[subprocess.Popen[bytes]] = []  # of this release
        self._clients: list[httpx2.Client] = []

    def gateway(self, ahead_s: float = 0.0, *, newer: bool = False, tree: Path | None = None) -> httpx2.Client:
        """Start a gateway whose clock is `ahead_s` seconds ahead; return a client once it answers.

        With `newer` it is of a release that has one more format (programs/newer.py). `tree`: the source that it runs.
        """
        listener = socket.create_server(("127.0.0.1", 0))
        port, fd = listener.getsockname()[1], listener.fileno()
        words = ("millstream.gateway", "--fd", str(fd), "--index", str(len(self._started)))
        self._start(ahead_s, newer, words, fd, tree)
        listener.close()
        http = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=CALL_S_MAX, trust_env=False)
        self._clients.append(http)
        assert http.get("/v2/health/live").status_code == 200
        if (self.folder / "home/run/token").exists():  # earlier releases know none, and ignore it
            http.headers["Authorization"] = f"Bearer {token_of(self.folder / 'home')}"
        return http

    def worker(
        self,
        ahead_s: float = 0.0,
        *,
        index: str = "host",
        newer: bool = False,
        tree: Path | None = None,
        shm_dir: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a worker of the pool cpu. `tree`: the source that it runs; `shm_dir`: that of its host."""
        words = ("millstream.workers", "--pool", "cpu", "--index", index)
        return self._start(ahead_s, newer, words, tree=tree, shm_dir=shm_dir)

    def _start(
        self,
        ahead_s: float,
        newer: bool,
        words: tuple[str, ...],
        fd: int | None = None,
        tree: Path | None = None,
        shm_dir: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        self.folder.mkdir(exist_ok=True)
        log = self.folder / f"{words[0]}-{len(self._started)}.log"
        launch = [str(PROGRAMS / "newer.py")] if newer else [str(PROGRAMS / "skewed.py"), str(ahead_s)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", *launch, *words],
                env=os.environ
                | self._environment
                | {"PYTHONPATH": str(tree or self._tree)}
                | ({} if shm_dir is None else {"MILLSTREAM_SHM_DIR": str(shm_dir)}),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=() if fd is None else (fd,),
            )
        self._started.append((process, log))
        if (tree or self._tree) == SOURCE:
            self._ours.append(process)
        return process

    def push(self, http: httpx2.Client, name: str, path: Path, config: str = "{}") -> None:
        """Upload a model and return when this gateway reports it ready."""
        query: dict[str, Any] = {"wait": WAIT_S, "config": config}
        reply = http.post(f"/admin/v1/models/{name}/versions", params=query, content=path.read_bytes())
        assert (reply.status_code, reply.json().get("state")) == (201, "ready"), reply.text

    def workers(self, http: httpx2.Client) -> list[dict[str, Any]]:
        """Return the workers that a gateway lists."""
        found: list[dict[str, Any]] = http.get("/admin/v1/workers").json()["workers"]
        return found

    def until_workers(self, http: httpx2.Client, number: int) -> list[dict[str, Any]]:
        """Wait until a gateway lists `number` workers with all models loaded; return them."""

        def all_ready() -> list[dict[str, Any]] | None:
            found = self.workers(http)
            ready = all(one["instances"] and _ready(one) for one in found)
            return found if len(found) == number and ready else None

        return wait_until(all_ready, WAIT_S, f"{number} workers")

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()}" for _, log in self._started)

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        # Releases up to 0.1.0 raised the signal again after a shutdown in order.
        assert process.wait(WAIT_S) in ({0} if process in self._ours else {0, -signal.SIGTERM, 128 + signal.SIGTERM})

    def end(self) -> None:
        """Stop all processes in order, gateways first, and check that each ends by itself."""
        for process, _ in self._started:
            if process.poll() is None:
                self.stop(process)

    def kill(self) -> None:
        for http in self._clients:
            http.close()
        for process, _ in self._started:
            process.kill()
            process.wait(WAIT_S)


def _ready(worker: dict[str, Any]) -> bool:
    return all(instance["state"] == "ready" for instance in worker["instances"])


@contextmanager
def fleet(folder: Path, address: RedisAddress, tree: Path = SOURCE, **settings: object) -> Iterator[Fleet]:
    """Yield a fleet without processes, and stop all at the end. `settings` are MILLSTREAM_… variables, in capitals."""
    running = Fleet(folder, address, tree, settings)
    try:
        yield running
        running.end()
        assert "Traceback" not in running.logs()
    except BaseException:
        print(running.logs())  # pytest shows the output with the failure
        raise
    finally:
        running.kill()
