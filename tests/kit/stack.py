"""Runs the whole product as a user does, `millstream up` with all its children, and checks that it leaves nothing.

with running_stack(tmp_path, gateways=2) as stack: ...      the end checks that nothing leaked and nothing is left
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2
import redis

from millstream.client.address import Trust
from millstream.services.environment import child_environment
from millstream.services.installation import installation_name, shm_prefix
from millstream.services.local_token import token_file
from millstream.services.queue.keys import PROTOCOL
from millstream.services.queue.reply_listener import remove_dead_sockets
from millstream.services.queue.reply_protocol import SUFFIX
from millstream.services.queue.server import socket_path
from millstream.services.queue.url import RedisAddress, client
from millstream.services.segments.segment import remove_segments
from millstream.services.settings import Settings, variables
from millstream.services.supervisor.pool_specs import OPTIONS
from tests.kit.disk import Disk
from tests.kit.metrics import Page
from tests.kit.wait import wait_for_none, wait_until

ROOT = Path(__file__).parents[2]
READY = "ready http"
START_S_MAX = 240.0
_UP = (sys.executable, "-P", "-m", "millstream.services.cli", "up", "--http-port", "0", "--grpc-port", "0")
WAIT_S = 240.0
CALL_S_MAX = WAIT_S + 60  # a call that waits for WAIT_S is answered before its client gives up
#: settings of clients over TLS
_CERTIFICATES = ("ca_file", "client_cert_file", "client_key_file")


class Stack:
    """A running `millstream up`. `lines` is its output so far."""

    def __init__(
        self,
        home: Path,
        arguments: list[str],
        settings: Mapping[str, object],
        disk: Disk,
        others: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.named_home = home  # the path that its processes use
        self.home = disk.seen(home)
        self.lines: list[str] = []
        self.exit_code: int | None = None
        self._ended = False  # there will be no more output
        self._installation = settings.get("installation_name")
        self.shm_dir = disk.seen(Path(str(settings.get("shm_dir", "/dev/shm"))))
        self._line_added = threading.Condition()
        known = variables() | {name: f"MILLSTREAM_{name.upper()}" for name in _CERTIFICATES}
        environment = {known[name]: str(value) for name, value in settings.items()} | {**others}
        self.process = subprocess.Popen(
            [*disk.prefix, *_UP, "--home", str(home), *arguments],
            env=child_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, name="stack", daemon=True)
        self._listener.start()
        try:
            self.url = self.wait_for_line(READY, START_S_MAX).removeprefix("ready ").strip()
        except BaseException:
            self.kill()
            raise
        self.redis: redis.Redis = client(RedisAddress.unix(str(self.socket)))
        self.key = str(settings.get("admin_key") or token_of(self.home))
        files = (None if (path := settings.get(name)) is None else Path(str(path)) for name in _CERTIFICATES)
        ca_file, certificate, key = files
        trust = Trust(ca_file, certificate=certificate, key=key)
        self.tls = trust.context() if self.url.startswith("https://") else None
        self.headers = {"Authorization": f"Bearer {self.key}"}
        self._thread = threading.local()
        self._clients: list[httpx2.Client] = []

    @property
    def installation(self) -> str:
        """The name of the installation in Redis and in shared memory."""
        return str(self._installation or installation_name(Settings(home=self.home)))

    @property
    def shm_prefix(self) -> str:
        """The prefix of the names of its shared memory."""
        return shm_prefix(Settings(home=self.named_home, installation_name=self.installation))

    @property
    def http(self) -> httpx2.Client:
        """The client of this thread; a shared one sometimes reads from a connection that another thread closed."""
        known: httpx2.Client | None = getattr(self._thread, "client", None)
        if known is None:
            known = httpx2.Client(
                base_url=self.url, headers=self.headers, timeout=CALL_S_MAX, trust_env=False, verify=self.tls or True
            )
            self._thread.client = known
            self._clients.append(known)
        return known

    def reconnect(self) -> None:
        """Close the connections of this thread, after their server has ended."""
        self.http.close()
        del self._thread.client

    def close_clients(self) -> None:
        for one in self._clients:
            one.close()
        self.redis.close()

    @property
    def socket(self) -> Path:
        """The path of the socket of Redis."""
        return socket_path(self.home / "run")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def grpc(self) -> str:
        """HOST:PORT for gRPC clients."""
        return self.wait_for_line("grpc  ").split()[-1].removeprefix("grpcs://")

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._line_added:
                self.lines.append(line.rstrip("\n"))
                self._line_added.notify_all()
        with self._line_added:
            self._ended = True
            self._line_added.notify_all()

    def wait_for_line(self, text: str, timeout_s: float = WAIT_S) -> str:
        """Wait for an output line that contains `text`, also an earlier one, and return it."""

        def find() -> str | None:
            return next((line for line in self.lines if text in line), None)

        with self._line_added:
            self._line_added.wait_for(lambda: find() or self._ended, timeout_s)
            found = find()
        if found is None:
            raise AssertionError(f"{text!r} is not in the output:\n" + "\n".join([*self.lines, self.logs()]))
        return found

    def pids(self) -> dict[str, int]:
        """Return the pids of running processes by name: gateway-0, cpu-0, redis."""
        found: dict[str, int] = {}
        for pid in children(self.process.pid):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                found[_name(pid)] = pid
        return found

    def push(
        self,
        name: str,
        path: Path,
        *,
        version: int | None = None,
        activate: bool = True,
        config: str | None = None,
        wait_s: float = WAIT_S,
    ) -> dict[str, Any]:
        """Upload a model, wait until it is ready in every worker and known to every gateway; return its document."""
        query: dict[str, Any] = {"wait": wait_s, "activate": activate} | ({"config": config} if config else {})
        where = f"/admin/v1/models/{name}/versions"
        if version is None:
            reply = self.http.post(where, params=query, content=path.read_bytes())
        else:
            reply = self.http.put(f"{where}/{version}", params=query, content=path.read_bytes())
        assert reply.status_code in (200, 201), reply.text  # 200: it is there already
        document: dict[str, Any] = reply.json()
        assert document["state"] == "ready", document
        return self.settled(name, document["version"])

    def settled(self, name: str, version: int) -> dict[str, Any]:
        """Wait until every gateway reports a version ready in every worker of its pools; return its document."""
        running = [process.rpartition("-")[0] for process in self.pids()]

        def ready(gateway: httpx2.Client) -> dict[str, Any] | None:
            reply = gateway.get(f"/admin/v1/models/{name}/versions/{version}")
            document: dict[str, Any] = reply.json()
            instances = document.get("instances", [])
            states = [instance["state"] for instance in instances]
            workers = sum(running.count(pool) for pool in document.get("pools", []))
            return document if states == ["ready"] * workers else None

        document: dict[str, Any] = {}
        for index in range(self.gateways):
            with self.gateway(index) as gateway:
                document = wait_until(partial(ready, gateway), what=f"{name}:{version} ready")
        return document

    @property
    def gateways(self) -> int:
        return sum(1 for name in self.pids() if name.startswith("gateway-"))

    def _with(self, name: str) -> dict[str, int] | None:
        """Return the pids if a process of this name is among them: one that was killed is soon started again."""
        found = self.pids()
        return found if name in found else None

    @contextmanager
    def gateway(self, index: int) -> Iterator[httpx2.Client]:
        """Yield a client with one connection, to this gateway: the others are stopped while it connects."""
        pids = wait_until(lambda: self._with(f"gateway-{index}"), what=f"gateway-{index} runs")
        others = [pid for name, pid in pids.items() if name.startswith("gateway-") and name != f"gateway-{index}"]
        limits = httpx2.Limits(max_connections=1, keepalive_expiry=None)
        with httpx2.Client(
            base_url=self.url,
            headers=self.headers,
            timeout=CALL_S_MAX,
            limits=limits,
            trust_env=False,
            verify=self.tls or True,
        ) as caller:
            with sigstopped(*others):
                assert caller.get("/v2/health/live").status_code == 200
            yield caller

    def send(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> HTTPConnection:
        """Post on a new connection and return it; `getresponse` waits for the reply, `close` disconnects."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=CALL_S_MAX)
        connection.request("POST", path, body, dict(headers or {}))
        return connection

    def metrics(self) -> Page:
        reply = self.http.get("/metrics")
        assert reply.status_code == 200
        return Page(reply.text)

    def logs(self) -> str:
        """Return the logs of all children."""
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted((self.home / "logs").glob("*.log")))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to stop, wait for the end and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.end()

    def end(self) -> int:
        """Wait for the end and return the exit code."""
        self.close_clients()
        return self._end()

    def kill(self) -> None:
        """Kill everything at once, in any state, and remove what it could not remove."""
        for pid in (*descendants(self.process.pid), self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._end()
        remove_segments(self.shm_dir, self.shm_prefix)
        remove_dead_sockets(self.shm_dir, self.installation)

    def _end(self) -> int:
        try:
            self.exit_code = self.process.wait(WAIT_S)
        finally:
            self._listener.join(WAIT_S)
            assert self.process.stdout is not None
            self.process.stdout.close()
        return self.exit_code


def token_of(home: Path) -> str:
    """Return the token of the operator on this machine."""
    return token_file(home).read_text().split()[-1]


@contextmanager
def running_stack(
    tmp_path: Path,
    *,
    gateways: int = 1,
    pools: str = "cpu=1",
    controller: bool = False,
    settings: Mapping[str, object] | None = None,
    models: Mapping[str, Path] | None = None,
    disk: Disk | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Stack]:
    """Start a stack and yield it; at the end check that nothing leaked, stop it, and check that nothing is left.

    Args:
        controller: whether it has a controller, as by default.
        settings: fields of millstream.services.settings.Settings.
        models: models that all workers load, if they can be served.
        disk: the disk of the home, which uploads may fill; None: in `tmp_path`.
        environment: further variables of its processes.
    """
    arguments = ["--no-example", "--gateways", str(gateways)]
    arguments += [] if controller else ["--no-controller"]
    for part in pools.split(","):
        arguments += ["--pool", part]
        if part.partition("=")[0] not in OPTIONS:
            arguments += ["--pool", "threads=1"]
    for name, path in (models or {}).items():
        arguments += ["--preload", f"{name}={path}"]
    settings = settings or {}
    for name in settings.keys() & {"http_port", "grpc_port"}:
        arguments += [f"--{name.replace('_', '-')}", str(settings[name])]  # in place of any free ports
    disk = disk or Disk(tmp_path)
    stack = Stack(disk.folder / "home", arguments, settings, disk, environment)
    try:
        for name in models or {}:
            if not any(f"{name} is not served" in line for line in stack.lines):
                stack.settled(name, 1)  # `up` is ready when one worker is; tests may need all workers
        yield stack
        assert_nothing_left(stack)
    except BaseException:
        print("\n".join(["== output", *stack.lines, stack.logs()]))  # pytest shows the output with the failure
        if stack.exit_code is None:
            stack.close_clients()
            stack.kill()
        raise


def assert_quiet(stack: Stack, timeout_s: float = WAIT_S) -> None:
    """Wait until nothing is in flight, queued or stored. No caller may be sending.

    Memory of a batch that was retried is kept for a minute, and on a busy machine any batch may be retried.
    """
    wait_for_none(lambda: _unquiet(stack), timeout_s)


def assert_nothing_left(stack: Stack) -> None:
    """Check that nothing leaked; stop the stack with exit code 0; no process, socket, shared memory or port remains."""
    if stack.exit_code is None:
        assert_quiet(stack)
        pids = descendants(stack.process.pid)
        assert stack.stop() == 0, stack.lines
        # Some end when they find that their parent has ended, a moment later; a race may just have started one.
        wait_until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], what="no process is left")
        wait_for_none(lambda: _of_home(stack.named_home))
    assert _of_home(stack.named_home) == []
    assert list(stack.shm_dir.glob(f"{stack.shm_prefix}*")) == []
    assert list(stack.shm_dir.glob(f"{stack.installation}.*{SUFFIX}")) == []
    assert not stack.socket.exists()
    assert list((stack.home / "repository" / ".staging").glob("*")) == []
    with suppress(httpx2.ConnectError):
        raise AssertionError(
            f"{stack.url} still answers {httpx2.get(stack.url, trust_env=False, verify=False).status_code}"
        )
    assert "Traceback" not in stack.logs()
    assert not any("Traceback" in line for line in stack.lines)


#: keys that a stack without requests has
_LASTING = {
    *("idle", "lanes", "workers", "record", "instances", "pools", "epoch", "gateways", "blamed", "counted"),
    *("called", "called_long", "long", "console_looked", "console_calls"),  # expire
    *("leader", "leader_token", "fence", "loads", "scale", "scale_changes", "keys_read", "log_levels", "memory_taken"),
}


def _unquiet(stack: Stack) -> dict[str, object]:
    """Return what is in flight, queued or stored. A readiness probe in flight counts, too, so call it repeatedly."""
    page = stack.metrics()
    gauges = ("millstream_requests_in_flight", "millstream_lane_rows", "millstream_stream_entries")
    found: dict[str, object] = {name: page.value(name) for name in (*gauges, "millstream_segment_in_use_bytes")}
    for name in stack.redis.scan_iter("ms:*"):
        key = name.decode()
        kind = key.removeprefix(f"ms:{PROTOCOL}:").partition("}:")[2].partition(":")[0]
        if kind == "stream":
            with suppress(redis.ResponseError):  # it has just been removed
                found[key] = int(stack.redis.xlen(key)) + int(stack.redis.xpending(key, "w")["pending"])
        elif kind not in _LASTING:
            found[key] = "is there"
    return {name: value for name, value in found.items() if value}


@contextmanager
def sigstopped(*pids: int) -> Iterator[None]:
    """Stop processes with SIGSTOP while the block runs."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        for pid in pids:
            wait_until(partial(_sleeps, pid), what=f"{pid} sleeps")
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _sleeps(pid: int) -> bool:
    return _state(pid) == "T"


def _state(pid: int) -> str:
    """Return the kernel's letter for the state: R, S, T (stopped), Z; "" if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def has_answer(connection: HTTPConnection) -> bool:
    """Whether a reply has begun to come, or the connection has ended."""
    return bool(select.select([connection.sock], [], [], 0)[0])


def children(pid: int) -> list[int]:
    """Return the pids of the running children of `pid`."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if _state(child) not in {"Z", ""}]


def descendants(pid: int) -> list[int]:
    """Return the pids of the children of `pid` and of all their descendants."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def _name(pid: int) -> str:
    """Return the name of a process: `gateway-0`, `cpu-1`, `redis`, or the whole command."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    if "--index" in words:
        index = words[words.index("--index") + 1].partition("@")[0]  # without a host, as its log is named
        return f"{words[words.index('--pool') + 1] if '--pool' in words else 'gateway'}-{index}"
    return "redis" if "--unixsocket" in words else " ".join(words)


def _of_home(home: Path) -> list[str]:
    """Return the processes that were started for this home, whatever their parent is now."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                known = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                if os.fsencode(home) + b"\0" in known:
                    found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()!r}")
    return found
