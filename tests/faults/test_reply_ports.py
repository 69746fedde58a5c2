"""Replies between hosts without a trip through Redis: whatever befalls either end, each request is answered, and right.

A host is a folder of shared memory here: a worker finds no reply socket of a gateway that uses another one.
"""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, Self

import httpx2
import numpy as np
import pytest

from millstream.services.installation import metrics_dir
from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress, client
from millstream.services.settings import Settings
from tests.kit import models, v2
from tests.kit.fleet import SOURCE, Fleet, fleet
from tests.kit.load import Load, constant_load
from tests.kit.metrics import Page
from tests.kit.ports import free_port
from tests.kit.redis_server import redis_server
from tests.kit.scale_model import BODIES, check_answers
from tests.kit.stack import sigstopped
from tests.kit.wait import wait_until

PATH = "/v2/models/scale/infer"
REPLIES = "millstream_batch_replies_total"
WAIT_S = 240


class Hosts:
    """A gateway and a worker on a host each, and the Redis that they reach by TCP."""

    def __init__(self, machines: Fleet, address: RedisAddress, folder: Path) -> None:
        self.machines = machines
        self.redis: Any = client(address)
        self._folder = folder
        self._workers = 0
        self.http = machines.gateway()
        self.worker = self.new_worker()

    def new_worker(self) -> Any:
        """Start a worker on a host of its own."""
        self._workers += 1
        shm_dir = self._folder / f"host-{self._workers}"
        shm_dir.mkdir()
        # The gateway's page also tells what this worker counts.
        metrics_of(self._folder, shm_dir).symlink_to(metrics_of(self._folder, self._folder / "shm"))
        return self.machines.worker(index=str(self._workers), shm_dir=shm_dir)

    @property
    def port(self) -> int:
        return self.http.base_url.port or 0

    def page(self) -> Page:
        return Page(self.http.get("/metrics").text)

    def replies(self, way: str) -> float:
        return self.page().value(REPLIES, way=way)

    def until_more(self, way: str) -> None:
        """Send requests until replies have taken a way more often."""
        before = self.replies(way)

        def more() -> bool:
            check(infer(self.http))
            return self.replies(way) > before

        wait_until(more, WAIT_S, f"replies take the way {way}")

    def entries(self) -> int:
        """Return how many batches are in streams, acknowledged by nobody."""
        return sum(self.redis.xlen(stream) for stream in self.redis.scan_iter("ms:*:stream:*"))


def metrics_of(folder: Path, shm_dir: Path) -> Path:
    return metrics_dir(Settings(home=folder / "fleet" / "home", shm_dir=shm_dir))


@contextmanager
def running(folder: Path, **settings: object) -> Iterator[Hosts]:
    (folder / "redis").mkdir()
    port = free_port()
    options = ("--port", str(port), "--bind", "127.0.0.1")
    with redis_server(choose_binary(""), folder / "redis", *options):
        address = RedisAddress.parse(f"redis://127.0.0.1:{port}/0")
        (folder / "shm").mkdir()
        settings = {"REPLY_PORT": 0, "SHM_DIR": folder / "shm", "CHECK_S_MAX": 600} | settings
        # Without this folder each process has metrics of its own.
        metrics_of(folder, folder / "shm").mkdir()
        with fleet(folder / "fleet", address, SOURCE, **settings) as machines:
            hosts = Hosts(machines, address, folder)
            machines.push(hosts.http, "scale", models.scale(folder / "scale.onnx"))
            try:
                yield hosts
            finally:
                hosts.redis.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with running(tmp_path) as hosts:
        yield hosts


def infer(http: httpx2.Client, value: float = 1.0) -> httpx2.Response:
    body, headers = v2.request({"x": np.full((1, 2), value, np.float32)}, parameters=v2.PATIENT)
    return http.post(PATH, content=body, headers=headers)


def check(reply: httpx2.Response, value: float = 1.0) -> None:
    assert reply.status_code == 200, reply.text
    assert v2.outputs(reply.content, dict(reply.headers))["y"].tolist() == [[2 * value] * 2]


def test_replies_go_to_the_gateway_and_leases_end_soon(hosts):
    hosts.until_more("tcp")
    with constant_load(hosts.port, PATH, BODIES, callers=8) as load:
        load.more(200)
    check_answers(load)
    wait_until(lambda: hosts.entries() == 0, WAIT_S, "all leases are acknowledged")
    through_redis = hosts.replies("redis")
    with constant_load(hosts.port, PATH, BODIES, callers=8) as load:
        load.more(200)
    check_answers(load)
    assert hosts.replies("redis") <= through_redis + 10, "while the connection opens, at most"


def test_a_frozen_gateway_holds_no_worker_and_gets_its_answers(hosts):
    """Another gateway's callers are answered meanwhile; the frozen one's replies wait for it in Redis."""
    other = hosts.machines.gateway()
    wait_until(lambda: infer(other).status_code == 200, WAIT_S, "the other gateway serves")
    hosts.until_more("tcp")
    [gateway] = gateways(hosts, hosts.http)
    with ThreadPoolExecutor(8) as callers:
        waiting = [callers.submit(infer, hosts.http, value) for value in range(8)]
        with sigstopped(gateway):
            for _ in range(20):
                check(infer(other))
        for value, answer in enumerate(waiting):
            check(answer.result(), value)
    wait_until(lambda: hosts.entries() == 0, WAIT_S, "all leases are acknowledged")


def gateways(hosts: Hosts, http: httpx2.Client) -> list[int]:
    """Return the process that answers a client: its name begins with its number and its pid."""
    names = [key.decode().rpartition(":")[2] for key in hosts.redis.scan_iter("ms:*:reply_address:*")]
    pids = {int(name.split("-")[1]) for name in names}
    listening = {pid for pid in pids if _listens(pid, http.base_url.port or 0)}
    return sorted(listening)


def _listens(pid: int, port: int) -> bool:
    """Return whether a process has a listening socket on a port."""
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and int(fields[1].split(":")[1], 16) == port:
            inodes.add(fields[9])
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found = re.fullmatch(r"socket:\[(\d+)\]", str(fd.readlink()))
            if found and found[1] in inodes:
                return True
    return False


def test_a_killed_worker_loses_no_request(hosts):
    hosts.new_worker()
    hosts.machines.until_workers(hosts.http, 2)
    hosts.until_more("tcp")
    with constant_load(hosts.port, PATH, BODIES, callers=8) as load:
        load.more(50)
        hosts.worker.send_signal(signal.SIGKILL)
        load.more(100)
    hosts.worker.wait()
    check_answers(load)
    wait_until(lambda: hosts.entries() == 0, WAIT_S, "all leases are acknowledged")


def test_a_frozen_worker_whose_leases_are_over_answers_nothing_twice(hosts):
    hosts.new_worker()
    hosts.machines.until_workers(hosts.http, 2)
    hosts.until_more("tcp")
    with constant_load(hosts.port, PATH, BODIES, callers=8) as load:
        for _ in range(3):
            load.more(30)
            with sigstopped(hosts.worker.pid):
                load.more(30)
        load.more(30)
    check_answers(load)
    wait_until(lambda: hosts.entries() == 0, WAIT_S, "all leases are acknowledged")


def test_redis_may_stop_while_replies_are_under_way(hosts):
    """A reply needs no Redis; the lease is acknowledged when Redis is back."""
    hosts.until_more("tcp")
    with constant_load(hosts.port, PATH, BODIES, callers=4) as load:
        for _ in range(3):
            load.more(20)
            [redis] = [int(hosts.redis.info("server")["process_id"])]
            with sigstopped(redis):
                threading.Event().wait(0.2)
        load.more(20)
        hosts.redis.flushall()
        load.more(50)
        killed = hosts.redis.client_kill_filter(_type="normal", skipme=True)
        assert killed > 0
        load.more(50)
    check_answers(load)
    hosts.until_more("tcp")
    wait_until(lambda: hosts.entries() == 0, WAIT_S, "all leases are acknowledged")


def test_connections_that_break_again_and_again_lose_no_reply(hosts):
    """A network between the hosts that resets connections: replies are sent again through Redis."""
    [key] = hosts.redis.scan_iter("ms:*:reply_address:*")
    with Proxy(hosts, key) as proxy:
        hosts.new_worker()  # it finds the proxy's address
        hosts.machines.until_workers(hosts.http, 2)
        hosts.machines.stop(hosts.worker)
        with constant_load(hosts.port, PATH, BODIES, callers=4, pause_s=0.001) as load:
            for _ in range(3):
                proxy.until_more(load, 10)
                proxy.cut()
            load.more(50)
    check_answers(load)
    wait_until(lambda: hosts.entries() == 0, WAIT_S, "all leases are acknowledged")


def test_a_reply_on_a_path_that_died_does_not_wait_for_the_next_run_of_the_worker(hosts, tmp_path):
    """A route is lost while a reply is under way, and the worker begins a run of seconds."""
    slow = models.slow(tmp_path / "slow.onnx", rounds=4_000_000)
    [key] = hosts.redis.scan_iter("ms:*:reply_address:*")
    with Proxy(hosts, key) as proxy, ThreadPoolExecutor(2) as callers:
        hosts.new_worker()  # it finds the proxy's address
        hosts.machines.until_workers(hosts.http, 2)
        hosts.machines.stop(hosts.worker)
        hosts.machines.push(hosts.http, "slow", slow, config='{"rows_max": 1}')
        wait_until(lambda: infer(hosts.http).status_code == 200 and proxy.replies > 3, WAIT_S, "replies pass the proxy")
        body, headers = v2.request({"x": np.ones((1, 128), np.float32)}, parameters=v2.PATIENT)
        with proxy.stalled():
            before = proxy.replies
            quick = callers.submit(infer, hosts.http, 3.0)
            # Or it took Redis, if the worker had given up the connection over an earlier reply.
            wait_until(lambda: proxy.replies > before or quick.done(), WAIT_S, "the worker has sent its reply")
            long = callers.submit(hosts.http.post, "/v2/models/slow/infer", content=body, headers=headers)
            check(quick.result(), 3.0)
            with pytest.raises(TimeoutError):  # else both were answered together, after the run
                long.result(0.5)
        assert long.result().status_code == 200
    wait_until(lambda: hosts.entries() == 0, WAIT_S, "all leases are acknowledged")


def test_who_does_not_log_in_is_counted(hosts):
    [key] = hosts.redis.scan_iter("ms:*:reply_address:*")
    _, port, host = hosts.redis.get(key).decode().split(" ")
    refused = "millstream_reply_logins_refused_total"
    before = hosts.page().value(refused)
    with socket.create_connection((host, int(port)), WAIT_S) as link:
        link.sendall(bytes(1000))
        with suppress(ConnectionError):
            while link.recv(100):
                pass
    wait_until(lambda: hosts.page().value(refused) == before + 1, WAIT_S, "the connection is counted")


def test_deaths_and_freezes_at_random_lose_no_request(hosts):
    """Two gateways and three workers, each on a host of its own: workers die, leave and freeze, gateways freeze, and
    Redis closes all connections.
    """
    random = Random(7)
    other = hosts.machines.gateway()
    wait_until(lambda: infer(other).status_code == 200, WAIT_S, "the other gateway serves")
    workers = [hosts.worker, hosts.new_worker(), hosts.new_worker()]
    frozen = [gateways(hosts, http)[0] for http in (hosts.http, other)]

    def replace(number: int) -> None:
        workers[number].send_signal(random.choice([signal.SIGKILL, signal.SIGTERM]))
        workers[number].wait()
        workers[number] = hosts.new_worker()

    def freeze(pid: int) -> None:
        with sigstopped(pid):
            threading.Event().wait(random.choice([0.1, 1.2, 2.5]))

    steps: list[Callable[[], object]] = [
        lambda: replace(random.randrange(3)),
        lambda: freeze(workers[random.randrange(3)].pid),
        lambda: freeze(random.choice(frozen)),
        lambda: hosts.redis.client_kill_filter(_type="normal", skipme=True),
    ]
    with ExitStack() as ends:
        loads = [ends.enter_context(constant_load(port, PATH, BODIES, callers=4)) for port in ports(hosts.http, other)]
        for _ in range(16):
            random.choice(steps)()
            loads[0].more(20)
        for load in loads:
            load.more(50)
    for load in loads:
        check_answers(load)
    wait_until(lambda: hosts.entries() == 0, WAIT_S, "all leases are acknowledged")


def ports(*clients: httpx2.Client) -> list[int]:
    return [client.base_url.port or 0 for client in clients]


class Proxy:
    """Stands between workers and a gateway's reply port, whose address it replaces in Redis."""

    def __init__(self, hosts: Hosts, key: bytes) -> None:
        self._hosts, self._key = hosts, key
        self.replies = 0
        self._links: list[socket.socket] = []
        self._stopping = threading.Event()
        self._passes = threading.Event()
        self._passes.set()
        secret, port, host = hosts.redis.get(key).decode().split(" ")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._value = f"{secret} {self._listener.getsockname()[1]} 127.0.0.1"
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._accept)
        self._start(self._announce)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        for link in (self._listener, *self._links):
            link.close()

    def until_more(self, load: Load, replies: int) -> None:
        """Wait until this many messages have passed from now on."""
        passed = self.replies
        load.until(lambda: self.replies > passed + replies)

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Pass nothing on, and say nothing, as a path that lost its route."""
        self._passes.clear()
        try:
            yield
        finally:
            self._passes.set()

    def cut(self) -> None:
        """Break all connections."""
        for link in self._links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _announce(self) -> None:
        while not self._stopping.wait(0.01):
            self._hosts.redis.set(self._key, self._value)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            with suppress(OSError):
                worker, _ = self._listener.accept()
                gateway = socket.create_connection(self._target)
                self._links += [worker, gateway]
                self._start(self._copy, worker, gateway, True)
                self._start(self._copy, gateway, worker, False)

    def _copy(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                self.replies += counted
                self._passes.wait()
                target.sendall(data)
        for link in (source, target):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)


def test_without_a_reply_port_replies_go_through_redis(tmp_path):
    with running(tmp_path, REPLY_PORT=-1) as hosts:
        for value in range(20):
            check(infer(hosts.http, value), value)
        assert not list(hosts.redis.scan_iter("ms:*:reply_address:*"))
        assert (hosts.replies("tcp"), hosts.replies("redis") > 0) == (0, True)
