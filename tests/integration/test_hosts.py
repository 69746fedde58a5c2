"""Two hosts of one installation: each runs `millstream up` with its own home, over one Redis and one repository."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from millstream.services.environment import child_environment
from millstream.services.local_token import token_file
from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress, client
from tests.kit import models, v2
from tests.kit.metrics import Page
from tests.kit.ports import free_port
from tests.kit.redis_server import redis_server
from tests.kit.stack import WAIT_S, Stack, children, descendants, running_stack
from tests.kit.wait import wait_until

NODE = platform.node()
LEASE_S = 2.0
CLI = (sys.executable, "-P", "-m", "millstream.services.cli")
FAR = f"far-0@{NODE}.2"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[RedisAddress]:
    (tmp_path / "redis").mkdir()
    with redis_server(choose_binary(), tmp_path / "redis") as address:
        yield address


def prepared(folder: Path, repository: Path) -> Path:
    """Make the folders of a host that shares `repository`; return that of its shared memory."""
    (folder / "home").mkdir(parents=True)
    repository.mkdir(exist_ok=True)
    (folder / "home" / "repository").symlink_to(repository)
    (folder / "shm").mkdir()
    return folder / "shm"


@contextmanager
def gateway_host(tmp_path: Path, name: str, address: RedisAddress, **settings: object) -> Iterator[Stack]:
    shm_dir = prepared(tmp_path / name, tmp_path / "repository")
    settings |= {"redis_url": address.url, "shm_dir": shm_dir}
    with running_stack(tmp_path / name, settings=settings) as stack:
        stack.redis = client(address)
        yield stack


class WorkersHost:
    """A running `millstream up --gateways 0` with the pool far. `output` is what it said so far."""

    def __init__(self, folder: Path, redis_url: str, **settings: object) -> None:
        self.home = folder / "home"
        self._output = folder / "output"
        variables = {"HOME": self.home, "GATEWAYS": 0, "POOLS": "far=1,threads=1", "SHM_DIR": folder / "shm"}
        variables |= {"REDIS_URL": redis_url} | settings
        self.environment = {f"MILLSTREAM_{name}": str(value) for name, value in variables.items() if value is not None}
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, also again after its end."""
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*CLI, "up"],
                env=child_environment(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return self.process

    @property
    def output(self) -> str:
        return self._output.read_text()

    def until(self, text: str) -> None:
        wait_until(lambda: text in self.output or self.process.poll() is not None, what=f"it says {text!r}")
        assert text in self.output, self.output

    def worker(self) -> int:
        """Return the pid of its worker."""
        return wait_until(lambda: next(iter(children(self.process.pid)), 0), what="its worker runs")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command on this host."""
        return subprocess.run(
            [*CLI, *words],
            env=child_environment(self.environment),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )

    def listening(self) -> set[int]:
        """Return the TCP ports on which a process of this host listens."""
        ports: set[int] = set()
        for pid in (self.process.pid, *descendants(self.process.pid)):
            sockets = {str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()}
            for name in ("tcp", "tcp6"):
                for words in map(str.split, Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]):
                    if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                        ports.add(int(words[1].rpartition(":")[2], 16))
        return ports

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


@contextmanager
def workers_host(tmp_path: Path, name: str, address: RedisAddress, **settings: object) -> Iterator[WorkersHost]:
    """Start a host of workers alone; at the end stop it, and check that it leaves nothing."""
    shm_dir = prepared(tmp_path / name, tmp_path / "repository")
    host = WorkersHost(tmp_path / name, address.url, **settings)
    try:
        yield host
        pids = descendants(host.process.pid)
        assert host.stop() == 0, host.output
        wait_until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], what="no process is left")
        assert list(shm_dir.iterdir()) == []
        assert not [one for one in (host.home / "run").iterdir() if one.is_socket()]
        logs = "".join(path.read_text() for path in (host.home / "logs").glob("*.log"))
        assert "Traceback" not in host.output + logs
    except BaseException:
        print(host.output, *(path.read_text() for path in (host.home / "logs").glob("*.log")))
        raise
    finally:
        for pid in (*descendants(host.process.pid), host.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        host.process.wait(WAIT_S)


def workers(stack: Stack) -> dict[str, dict[str, Any]]:
    """Return the workers that a gateway lists, by name."""
    return {one["id"].rpartition("-")[0]: one for one in stack.http.get("/admin/v1/workers").json()["workers"]}


def until_listed(stack: Stack, names: set[str]) -> None:
    wait_until(lambda: workers(stack).keys() == names, what=f"{names} are listed")


def measured(stack: Stack) -> set[str]:
    """Return the names of workers in the metrics of a host."""
    return wait_until(lambda: stack.metrics().label_values("worker"), what="its worker is measured")


def test_the_names_of_workers_tell_hosts_apart(tmp_path: Path, address: RedisAddress) -> None:
    here_name, there_name = f"cpu-0@{NODE}", f"cpu-0@{NODE}.2"
    with gateway_host(tmp_path, "a", address) as here:
        here.push("scale", models.scale(tmp_path / "scale.onnx"))
        with gateway_host(tmp_path, "b", address) as there:
            until_listed(here, {here_name, there_name})
            until_listed(there, {here_name, there_name})
            assert measured(here) == {here_name}
            assert measured(there) == {there_name}
            placement = here.http.get("/admin/v1/placement").json()
            assert {one["id"].rpartition("-")[0] for one in placement["workers"]} == {here_name, there_name}

            before, pid = workers(there)[there_name], there.pids()["cpu-0"]
            os.kill(pid, signal.SIGKILL)
            wait_until(
                lambda: (
                    workers(there).keys() == {here_name, there_name}
                    and workers(there)[there_name]["id"] != before["id"]
                ),
                what="it is started again under its name, and the dead one is not listed",
            )
            there.wait_for_line("cpu-0 was ended by SIGKILL")  # in its own home it needs no host
        check(here, "scale", 1)


def check(stack: Stack, model: str, value: float) -> None:
    body, headers = v2.request({"x": np.full((1, 2), value, np.float32)}, parameters=v2.PATIENT)
    reply = stack.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    [answer] = v2.outputs(reply.content, dict(reply.headers)).values()
    assert answer.tolist() == [[2 * value] * 2]


def push_far(stack: Stack, path: Path) -> None:
    """Upload a model that only the other host's workers may serve."""
    reply = stack.http.post(
        "/admin/v1/models/scale/versions",
        params={"wait": WAIT_S, "config": json.dumps({"pools": ["far"]})},
        content=path.read_bytes(),
    )
    assert (reply.status_code, reply.json()["state"]) == (201, "ready"), reply.text


def test_workers_alone_answer_the_calls_of_another_host(tmp_path: Path, address: RedisAddress) -> None:
    with gateway_host(tmp_path, "a", address) as here:
        with workers_host(tmp_path, "b", address) as there:
            there.until("ready 1 worker")
            until_listed(here, {f"cpu-0@{NODE}", FAR})
            push_far(here, models.scale(tmp_path / "scale.onnx"))
            check(here, "scale", 1)
            assert there.listening() == set()
            assert not (there.home / "run" / "url").exists()
            assert not token_file(there.home).exists()

            before = there.worker()
            os.kill(before, signal.SIGKILL)
            there.until("far-0 was ended by SIGKILL: restarting it")
            check(here, "scale", 2)
            assert there.worker() != before

            before = there.worker()
            restarted = there.run("restart", "--json")
            assert restarted.returncode == 0, restarted.stderr
            assert [one["process"] for one in json.loads(restarted.stdout)["replaced"]] == ["far-0"]
            assert there.worker() != before
            check(here, "scale", 3)
            for name in ("far", "far-0", FAR, "worker"):
                assert "ready: scale version 1" in there.run("logs", name).stdout
            again = there.run("up")
            assert again.returncode == 1
            assert "millstream is already running" in again.stderr
        until_listed(here, {f"cpu-0@{NODE}"})


def test_workers_alone_are_ready_when_they_have_loaded(tmp_path: Path, address: RedisAddress) -> None:
    """Their port says so, and has the metrics, which no gateway there could show."""
    port = free_port()
    with gateway_host(tmp_path, "a", address) as here:
        here.push("scale", models.scale(tmp_path / "scale.onnx"))
        with workers_host(tmp_path, "b", address, METRICS_PORT=port, POOLS="cpu=2") as there:
            seen: set[int] = set()

            def ready() -> bool:
                with suppress(httpx2.TransportError):
                    seen.add(httpx2.get(f"http://127.0.0.1:{port}/ready", trust_env=False).status_code)
                return 200 in seen

            wait_until(ready, what="it is ready")
            assert seen == {503, 200}
            names = {f"cpu-{number}@{NODE}.2" for number in range(2)}
            found = workers(here)
            assert {name for name in names if [one["state"] for one in found[name]["instances"]] == ["ready"]} == names
            page = Page(httpx2.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text)
            assert page.label_values("worker") == names
            there.until("ready 2 workers")
            assert there.listening() == {port}


def used(stack: Stack, name: str) -> bool:
    """Return whether a worker has run a request."""
    placed = stack.http.get("/admin/v1/placement").json()["workers"]
    instances = [one for worker in placed if worker["id"].startswith(f"{name}-") for one in worker["instances"]]
    return any(one["last_used_age_s"] is not None for one in instances)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_no_call_fails_when_a_host_of_workers_ends(
    tmp_path: Path, address: RedisAddress, number: signal.Signals
) -> None:
    """It is stopped, or all its processes end at once, as with its power, while both hosts answer."""
    with gateway_host(tmp_path, "a", address, queue_lease_s=LEASE_S) as here:
        here.push("scale", models.scale(tmp_path / "scale.onnx"))
        with workers_host(tmp_path, "b", address, POOLS="cpu=1", QUEUE_LEASE_S=LEASE_S) as there:
            there.until("ready 1 worker")
            name, stop = f"cpu-0@{NODE}.2", threading.Event()

            def call() -> None:
                while not stop.is_set():
                    check(here, "scale", 1)

            with ThreadPoolExecutor(4) as callers:
                calling = [callers.submit(call) for _ in range(4)]
                try:
                    wait_until(lambda: used(here, name), what="it answers some")
                    if number is signal.SIGKILL:
                        for pid in (there.process.pid, *descendants(there.process.pid)):
                            os.kill(pid, number)
                    else:
                        assert there.stop() == 0
                    until_listed(here, {f"cpu-0@{NODE}"})
                finally:
                    stop.set()
                for one in calling:
                    one.result()
            if number is signal.SIGKILL:
                there.process.wait(WAIT_S)
                there.start()  # it comes back
                there.until("ready 1 worker")
                until_listed(here, {f"cpu-0@{NODE}", name})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"PRELOAD": "scale=scale.onnx"}, "models are loaded through a gateway"),
        ({"TRITON_REPOSITORIES": "."}, "models are loaded through a gateway"),
        ({"REDIS_URL": None}, "name the Redis of the gateways"),
        ({}, "is not the repository of the gateways"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_workers_alone_cannot_do_is_one_clear_line(tmp_path: Path, settings: dict[str, object], said: str) -> None:
    (tmp_path / "scale.onnx").touch()
    settings = {name: f"scale={tmp_path}/scale.onnx" if name == "PRELOAD" else one for name, one in settings.items()}
    host = WorkersHost(tmp_path, f"unix://{tmp_path}/none", **settings)
    assert host.process.wait(WAIT_S) in {1, 2}
    assert said in host.output
    assert "Traceback" not in host.output
    assert not host.home.exists(), "it has changed nothing"
