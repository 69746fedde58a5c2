"""Runs a whole installation on one machine: starts its processes, restarts them, stops them in order.

lock -> listen -> Redis -> workers, gateways -> view.load_models -> gateways become ready -> plug-ins -> view.ready …
without gateways: lock -> Redis -> workers -> workers become ready -> view.ready …
SIGINT, SIGTERM -> drain in order; SIGHUP, or a command on the control socket -> rolling restart
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from millstream.client.address import Trust
from millstream.services.crashes.analyzer import CrashAnalyzer
from millstream.services.crashes.run_marks import runs_dir
from millstream.services.errors import Code, Failure
from millstream.services.installation import installation_name, metrics_dir, shm_prefix
from millstream.services.local_token import keep_token
from millstream.services.process.cancellation import cancel_all
from millstream.services.process.logs import about
from millstream.services.process.machine_share import cpus
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.reply_listener import remove_dead_sockets
from millstream.services.queue.server import (
    check_server,
    choose_binary,
    remove_socket,
    server_command,
    socket_path,
    wait_until_answers,
)
from millstream.services.queue.url import RedisAddress
from millstream.services.segments.segment import remove_segments
from millstream.services.settings import CLIENT_SETTINGS, LOG_LEVELS, Settings
from millstream.services.start_log import log_start
from millstream.services.supervisor import listener, plan
from millstream.services.supervisor.child import Child
from millstream.services.supervisor.control import ControlSocket
from millstream.services.supervisor.deaths import DeathReports, Orphans
from millstream.services.supervisor.listener import PreloadPipe
from millstream.services.supervisor.liveness import Liveness
from millstream.services.supervisor.lock import HomeLock, HostName
from millstream.services.supervisor.log import WriteLine
from millstream.services.supervisor.own_log import LOGGER, NAME, OwnLog
from millstream.services.supervisor.parts import SupervisorPart, SupervisorParts, build_parts
from millstream.services.supervisor.plan import EntryCommands, Program, Running
from millstream.services.supervisor.pool_specs import parse_pools
from millstream.services.supervisor.readiness import wait_until_loaded, wait_until_ready
from millstream.services.supervisor.rolling import Restarts
from millstream.services.supervisor.service_manager import Health, ServiceManager
from millstream.services.supervisor.signals import Signals
from millstream.services.supervisor.start_checks import check_start, make_home

log = logging.getLogger(LOGGER)

REDIS_S_MAX = 10.0
#: deaths in a row of one child during the start, after which the start fails
DEATHS_MAX_AT_START = 5
#: Shares of the drain time after which the gateways and the workers have ended. Workers get less time than gateways:
#: once the gateways are gone, no caller waits for a result.
GATEWAYS_SHARE, WORKERS_SHARE = 0.9, 0.95
SETTLE_S_MIN = 0.5  # for announcing deaths, also when the workers took all the time


class StatusView(Protocol):
    """Shows the user what happens, and loads the models of the start.

    `load_s_max`: longest time for which gateways are not ready because of them.
    """

    load_s_max: float

    def show_line(self, line: str) -> None:
        """Show one line about an event."""

    async def load_models(self, running: Running) -> None:
        """Load the models of the start. Until it returns, gateways are not ready.

        Raises Failure if the installation cannot serve; then everything is stopped.
        """

    async def wait_until_ready(self, running: Running) -> None:
        """Return when the started installation serves. Raises Failure if it cannot; then everything is stopped."""

    def ready(self, running: Running) -> None:
        """Show that the installation serves."""

    def stopped(self) -> None:
        """Show that a requested stop is complete."""


class Supervisor:
    """Runs one installation, once. Create it inside a running event loop.

    Args:
        settings: of the installation.
        view: shows what happens.
        entry: the commands that start gateways and workers.
        forward: takes the lines of all logs, with `log_format` json; None: they are in files only.
        manager: the service manager that is told what happens; None: none.
    """

    def __init__(
        self,
        settings: Settings,
        view: StatusView,
        entry: EntryCommands | None = None,
        forward: WriteLine | None = None,
        manager: ServiceManager | None = None,
    ) -> None:
        self._settings = settings.model_copy(update={"home": settings.home.expanduser().resolve()})
        self._view = view
        self._entry = entry or EntryCommands()
        self._forward = forward
        self._manager = manager or ServiceManager({})
        self._stop_reason = "the start failed"
        self._status = ""  # for the service manager, while it serves
        self._run_dir = self._settings.home / "run"
        self._lock = HomeLock(self._run_dir)
        self._host_name = HostName()
        self._socket: Path | None = None
        self._listener: socket.socket | None = None
        self._grpc_reservation: socket.socket | None = None  # the port for gRPC
        self._preload_pipe: PreloadPipe | None = None
        self._metrics: listener.MetricsPort | None = None  # of workers without gateways
        self._address: RedisAddress | None = None
        self._redis: list[Child] = []
        self._workers: list[Child] = []
        self._gateways: list[Child] = []
        self._leaving: dict[Child, asyncio.Task[None]] = {}  # workers that drain
        self._started: WeakSet[Child] = WeakSet()
        self._orphans = Orphans(lambda: self._started)
        self._listening: asyncio.Task[None] | None = None
        self._liveness = Liveness(lambda: (*self._redis, *self._workers, *self._gateways))
        self._worker_of: Callable[[str, int], Program] | None = None
        self._restarts = self._new_restarts()
        self._parts: tuple[SupervisorPart, ...] = ()
        self._deaths: DeathReports | None = None
        self._control = ControlSocket(self._restarts.on_command)
        self._control_path: Path | None = None
        self._end: asyncio.Future[None] = asyncio.Future()
        self._ready = False
        self._signals = Signals(
            self._stop_for,
            self._kill_all,
            lambda: self._restarts.restart("all", lambda _: None),
            self._run_dir / LOG_LEVELS,
            self._show,
        )

    async def run(self) -> int:
        """Start, serve until SIGINT or SIGTERM, stop; return the exit code.

        The code is 0 after a clean stop, 130 after a second signal. Raises Failure if the start fails; then nothing is
        left running, and a failure before the lock is taken has changed nothing.
        """
        check_start(self._settings)
        make_home(self._settings.home)
        self._lock.take()
        if self._settings.gateways:
            keep_token(self._settings.home)
        own_log = OwnLog(self._settings.home / "logs" / f"{NAME}.log", self._settings.log_format, self._forward)
        own_log.open()
        try:
            return await self._run()
        except Failure as failure:
            log.error("%s", failure.message)  # noqa: TRY400 - the caller shows it
            raise
        finally:
            own_log.close()

    async def _run(self) -> int:
        began = asyncio.get_running_loop().time()
        log_start(self._settings, NAME, supervised=False)
        try:
            self._settings = self._settings.model_copy(update={"installation_name": installation_name(self._settings)})
            self._signals.handle()
            await self._serve()
        finally:
            await self._shut_down()
            self._clear_files()
            self._host_name.release()
            self._lock.release()
            lasted = asyncio.get_running_loop().time() - began
            log.info("stopped: %s, after %.3g s", self._stop_reason, lasted, extra=about(reason=self._stop_reason))
        self._view.stopped()
        return 0 if self._signals.stops < 2 else 130

    def _show(self, event: str) -> None:
        """Log an event, and show it to the user."""
        log.info("%s", event)
        self._view.show_line(event)

    async def _serve(self) -> None:
        start = asyncio.create_task(self._start(), name="start")
        start.add_done_callback(self._on_started)
        try:
            await self._end
        finally:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)

    def _on_started(self, start: asyncio.Task[None]) -> None:
        error = None if start.cancelled() else start.exception()
        if error is not None and not self._end.done():
            self._end.set_exception(error)

    async def _start(self) -> None:
        self._clear_files()
        self._liveness.start()
        self._orphans.start()
        self._control_path = socket_path(self._run_dir, "control.sock")
        await self._control.open(self._control_path)
        self._lock.announce(None, self._control_path)
        metrics_dir(self._settings).mkdir(mode=0o700)
        port, grpc_port = self._listen()
        host = self._settings.host
        certificate = self._settings.tls_cert_file and self._settings.tls_cert_file.expanduser().absolute()
        tls = certificate is not None
        running = Running(
            url=listener.url_of(host, port, tls=tls) if self._listener else "",
            local_url=listener.local_url_of(host, port, tls=tls) if self._listener else "",
            trust=Trust.of_environment(pinned=certificate),
            grpc=listener.address_of(host, grpc_port, tls=tls) if self._listener and grpc_port >= 0 else None,
            home=self._settings.home,
            redis=await self._start_redis(),
            gateways=self._settings.gateways,
            pools=parse_pools(self._settings.pools),
            threads=plan.threads_of_pools(self._settings, cpus()),
        )
        if self._listener is not None:
            self._lock.announce(running.local_url, self._control_path, certificate)
        assert self._address is not None
        crashes = CrashAnalyzer(self._run_dir, self._settings.repository_dir, runs_dir(self._settings))
        self._deaths = DeathReports(crashes, self._address, self._keys())
        settings = plan.settings_of_children(
            self._settings, port=port, grpc_port=grpc_port, redis_url=self._address.url
        )
        await self._start_children(settings, running)
        # Last: nothing waits for them, and the start needs all cores.
        self._parts = build_parts(self._parts_for_plugins(settings))
        for part in self._parts:
            part.start()
        log.info("ready %s (gRPC: %s, Redis: %s)", running.serves, running.grpc or "off", running.redis)
        self._ready = True
        self._view.ready(running)
        self._status = f"serving {running.url}" if running.url else f"{running.serves}, {running.redis}"
        self._manager.ready(self._status)
        health = Health(running.local_url, self._children)

        async def problem() -> str:
            return "" if self._end.done() else await health.problem()  # a stop has a limit of its own

        self._manager.start_watchdog(problem)
        if self._listener is not None:
            restart = partial(self._restarts.restart, "gateways", lambda _: None)
            self._listening = asyncio.create_task(listener.keep_listening(self._listener, restart), name="listener")

    def _listen(self) -> tuple[int, int]:
        """Take the ports of gateways, if there are any; returns those of HTTP and gRPC."""
        host, port, grpc_port = self._settings.host, self._settings.http_port, self._settings.grpc_port
        if not self._settings.gateways:
            if self._settings.metrics_port:
                self._metrics = listener.MetricsPort(self._settings, self._workers_ready)
            return port, grpc_port
        self._listener = listener.listen(host, port)
        if self._settings.serves_grpc and not self._settings.grpc_on_http_port:
            self._grpc_reservation = listener.reserve(host, grpc_port)
            grpc_port = self._grpc_reservation.getsockname()[1]
        return self._listener.getsockname()[1], grpc_port

    async def _start_children(self, settings: Settings, running: Running) -> None:
        """Start workers and gateways, with `settings` for children. Returns when they serve."""
        assert self._address is not None
        # Whoever shares a Redis may have workers of the same pools.
        host = self._host_name.take(installation_name(settings)) if self._settings.redis_url is not None else ""
        self._worker_of = lambda pool, index: plan.worker(settings, self._entry, cpus(), pool, index, host)
        self._workers = self._start_all(plan.workers(settings, self._entry, cpus(), host))
        if self._listener is None:
            await self._view.load_models(running)  # it has none
            await self._until_workers_are_ready(self._address)
            return
        self._preload_pipe = PreloadPipe(self._view.load_s_max)
        self._gateways = self._start_all(
            plan.gateways(settings, self._listener.fileno(), self._preload_pipe.read_fd, self._entry)
        )
        await self._view.load_models(running)
        self._preload_pipe.end_loading()
        await self._view.wait_until_ready(running)

    async def _until_workers_are_ready(self, address: RedisAddress) -> None:
        """Return when all workers have loaded what they should hold, or some still load after the longest wait."""
        try:
            async with asyncio.timeout(self._view.load_s_max):
                await wait_until_loaded(lambda: self._workers, address, self._keys())
        except TimeoutError:
            self._show("workers still load models: what they have is served")

    def _workers_ready(self) -> bool:
        """Return whether workers run that became ready at the start, and no stop was requested."""
        return self._ready and not self._end.done() and any(child.pid for child in self._workers)

    def _children(self) -> Mapping[str, Sequence[Child]]:
        return {"Redis": self._redis, "worker": self._workers, "gateway": self._gateways}

    async def _start_redis(self) -> str:
        """Find or start the server; returns its description."""
        if self._settings.redis_url is not None:
            self._address = RedisAddress.parse(self._settings.redis_url.get_secret_value())
            return f"{self._address}, version {await check_server(self._address)}"
        binary = await asyncio.to_thread(choose_binary)
        self._socket = socket_path(self._run_dir)
        self._address = RedisAddress.unix(str(self._socket))
        command = server_command(binary.path, self._socket, self._run_dir)
        self._redis = self._start_all([plan.redis(command)])
        self._liveness.ping(self._redis[0], self._socket)
        await wait_until_answers(self._address, REDIS_S_MAX)
        return f"{binary}, unix socket"

    def _keys(self) -> InstallationKeys:
        return InstallationKeys(installation_name(self._settings))

    def _parts_for_plugins(self, settings: Settings) -> SupervisorParts:
        assert self._address is not None
        return SupervisorParts(
            settings,
            self._address,
            self._keys(),
            workers=lambda: self._workers,
            draining=lambda: self._leaving,
            start_worker=self._start_worker,
            drain_worker=self._drain_worker,
            may_resize=lambda pool: not (self._end.done() or pool == self._restarts.replaced_pool),
            show=self._show,
        )

    def _start_worker(self, pool: str, index: int) -> None:
        assert self._worker_of is not None
        self._workers.append(self._start_child(self._worker_of(pool, index)))

    def _drain_worker(self, child: Child) -> None:
        self._workers.remove(child)
        task = asyncio.create_task(child.stop(self._settings.drain_s), name=f"drain {child.program.name}")
        self._leaving[child] = task
        task.add_done_callback(lambda _: self._leaving.pop(child, None))

    def _new_restarts(self) -> Restarts:
        def groups() -> dict[str, Sequence[list[Child]]]:
            # Workers first: an older worker might not understand what a newer gateway sends.
            return {
                "workers": [self._workers],
                "gateways": [self._gateways],
                "all": [self._workers, self._gateways],
            }

        def obstacle() -> str:
            if self._end.done():
                return "is being stopped"
            return "" if self._ready else "is still starting"

        def announce(restart: str) -> None:
            if restart:
                self._manager.reloading(restart)
            elif not self._end.done():
                self._manager.ready(self._status)

        async def until_ready(old: Child, new: Child) -> None:
            assert self._address is not None
            await wait_until_ready(old, new, self._address, self._keys())

        start = partial(self._start_child, on_trial=True)
        return Restarts(groups, start, until_ready, self._settings.drain_s, obstacle, self._show, announce)

    def _start_all(self, programs: Sequence[Program]) -> list[Child]:
        return [self._start_child(program) for program in programs]

    def _start_child(self, program: Program, *, on_trial: bool = False) -> Child:
        child = Child(
            program,
            self._settings.home / "logs",
            self._view.show_line,
            self._on_death,
            on_trial=on_trial,
            log_format=self._settings.log_format,
            forward=self._forward,
        )
        child.start()
        self._started.add(child)
        return child

    async def _on_death(self, child: Child, pid: int) -> bool:
        """Report the death of a worker; return whether a model is at fault. During the start, end it after many."""
        model_at_fault = False
        if child.program.worker and pid and self._deaths is not None:
            model_at_fault = await self._deaths.report(child)
        give_up = not model_at_fault and child.backoff.deaths + 1 >= DEATHS_MAX_AT_START
        if not self._ready and give_up and not self._end.done():
            last_line = f": {child.last_line}" if child.last_line else ""
            self._end.set_exception(
                Failure(Code.UNAVAILABLE, f"{child.program.name} does not start (log: {child.log_path}){last_line}")
            )
        return model_at_fault

    async def _shut_down(self) -> None:
        """Stop everything in order and in time; each step's comment gives the reason for its place."""
        await self._announce_end()
        started = asyncio.get_running_loop().time()
        # Nothing new is started, and nothing ordered.
        for part in reversed(self._parts):
            await part.stop()
        await self._liveness.stop()
        if self._listening is not None:
            await cancel_all([self._listening])
        # A command that waits for a restart is told that it was cancelled.
        await self._restarts.cancel()
        await self._control.close()
        if self._listener is not None:
            # Gateways inherited this socket. While our copy is open, the kernel queues connections that none accepts.
            self._listener.close()
        # Gateways first: they accept no new requests and answer those in flight, which needs workers and Redis.
        await self._stop(self._gateways, started + self._settings.drain_s * GATEWAYS_SHARE)
        if self._preload_pipe is not None:
            self._preload_pipe.close()
        # No requests are left: workers finish their runs and remove their records.
        await self._stop([*self._workers, *self._leaving], started + self._settings.drain_s * WORKERS_SHARE)
        if self._deaths is not None:
            left_s = started + self._settings.drain_s - asyncio.get_running_loop().time()
            await self._deaths.settle(max(SETTLE_S_MIN, left_s))
        if self._grpc_reservation is not None:
            self._grpc_reservation.close()
        if self._metrics is not None:
            self._metrics.close()
        # Redis last: gateways and workers write to it when they end.
        await self._stop(self._redis, started + self._settings.drain_s)
        # What they all left behind.
        await self._orphans.stop()
        await self._manager.close()
        log.info("drained in %.3g s", asyncio.get_running_loop().time() - started)

    async def _announce_end(self) -> None:
        """Let gateways be not ready, and serve until load balancers have noticed. Ctrl-C and a failure do not wait."""
        self._manager.stopping(f"stopping: {self._stop_reason}")
        unknown = not self._gateways or not self._ready  # no load balancer knows it
        if self._stop_reason != signal.SIGTERM.name or unknown or not self._settings.drain_delay_s:
            return
        for gateway in self._gateways:
            if gateway.ready.is_set():
                gateway.signal(signal.SIGUSR1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_delay_s):
                await self._signals.again.wait()

    async def _stop(self, children: Sequence[Child], until: float) -> None:
        if self._signals.stops > 1:
            self._kill_all()
        left_s = max(0.0, until - asyncio.get_running_loop().time())
        await asyncio.gather(*(child.stop(left_s) for child in children))

    def _clear_files(self) -> None:
        """Remove the installation's shared memory files and sockets, also those of a predecessor that was killed."""
        if self._settings.installation_name is not None:  # otherwise nothing was started
            for folder in (self._settings.shm_dir, self._run_dir):
                remove_segments(folder, shm_prefix(self._settings))
            remove_dead_sockets(self._settings.shm_dir, installation_name(self._settings))
        for path in (self._control_path, self._socket):
            if path is not None:
                remove_socket(path, self._run_dir)
        for path in (self._run_dir / LOG_LEVELS, *self._run_dir.glob(CLIENT_SETTINGS)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _stop_for(self, signal_name: str) -> None:
        if not self._end.done():
            self._stop_reason = signal_name
            self._end.set_result(None)

    def _kill_all(self) -> None:
        for child in (*self._gateways, *self._workers, *self._leaving, *self._redis):
            child.kill()
