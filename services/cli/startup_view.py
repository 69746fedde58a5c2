"""What `millstream up` shows: what is running, what happens to it, and when it serves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from millstream.services.cli import preload, repositories
from millstream.services.cli.client import Api
from millstream.services.cli.commands.demo import number
from millstream.services.cli.options import ServerAddress
from millstream.services.cli.preload import EXAMPLE, Missing, ServedModel
from millstream.services.cli.repositories import PreloadPlan, RepositoryModel
from millstream.services.cli.terminal import duration, escape, results
from millstream.services.supervisor.plan import Running


class Terminal:
    """For people. What children complain about comes in between, one line each."""

    def __init__(self, wanted: PreloadPlan, key: str | None) -> None:
        self._wanted = wanted
        self._key = key
        self._console: Console = results()
        self._placed: list[ServedModel] = []

    def show_line(self, line: str) -> None:
        # A terminal that was closed is no reason to stop serving.
        with contextlib.suppress(OSError):
            self._console.print(f"[yellow]{escape(line)}[/]")

    async def prepare(self, running: Running) -> None:
        self._show(running)
        with self._working("starting"):
            async with Api(ServerAddress(running.local_url, self._key)) as api:
                await preload.live(api)
                await repositories.place(api, self._wanted.repositories, self._show_loaded)
                async for one in preload.place_all(api, self._wanted.models, _pool(running)):
                    if isinstance(one, ServedModel):
                        self._placed.append(one)
                        self._show_model(one)
                    else:
                        self._show_missing(one)
                if not await preload.ready(api):
                    self.show_line("no model answers yet: `millstream models` shows what becomes of them")

    def ready(self, running: Running) -> None:
        console = self._console
        if any(placed.name == "digits" for placed in self._placed):
            request = _short(EXAMPLE / "request.json")
            console.print(f"\n[dim]try[/]        curl -s {running.local_url}/v2/models/digits/infer -d @{request}")
            console.print(f"           {_command()} demo")
        else:
            console.print(f"\n[dim]try[/]        {_command()} push NAME FILE.onnx")
        console.print(f"[dim]pages[/]      {running.local_url}/docs")
        console.print("[dim]stop[/]       Ctrl-C\n")
        console.print(f"ready {running.url}", style="bold green")

    def stopped(self) -> None:
        self.show_line("stopped")

    def _show(self, running: Running) -> None:
        console = self._console
        gateways = "1 process" if running.gateways == 1 else f"{running.gateways} processes"
        console.print(f"[bold]Millstream[/] {number()}\n")
        console.print(f"[dim]home[/]       {escape(_short(running.home))}")
        console.print(f"[dim]redis[/]      {escape(running.redis)}")
        console.print(f"[dim]gateway[/]    {running.url}, {gateways}")
        if running.grpc is not None:
            console.print(f"[dim]grpc[/]       {running.grpc}")
        for pool, workers in running.pools.items():
            threads = "1 thread" if running.threads == 1 else f"{running.threads} threads"
            count = "1 worker" if workers == 1 else f"{workers} workers"
            console.print(f"[dim]pool[/]       {escape(pool)}: {count} with {threads}")

    def _show_model(self, placed: ServedModel) -> None:
        how = "" if placed.pushed else ", was there"
        self._console.print(
            f"[dim]model[/]      {escape(placed.name)} version {placed.version}{how}, answers in "
            f"{duration(placed.seconds)}"
        )

    def _show_missing(self, missing: Missing) -> None:
        self._console.print(
            f"[dim]model[/]      {escape(missing.name)} [red]is not served[/]: {escape(missing.reason)}"
        )

    def _show_loaded(self, loaded: RepositoryModel) -> None:
        name = escape(loaded.name)
        if loaded.failure is not None:
            self._console.print(f"[dim]model[/]      {name} [red]is not served[/]: {escape(loaded.failure)}")
        elif loaded.unloaded:
            self._console.print(f"[dim]model[/]      {name} stays unloaded")
        else:
            numbers = ", ".join(map(str, loaded.versions))
            self._console.print(
                f"[dim]model[/]      {name} version {numbers}, in place in {escape(_short(loaded.folder))}"
            )

    @contextlib.contextmanager
    def _working(self, text: str) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        with self._console.status(f"[dim]{text}[/]"):
            yield


class Lines:
    """For scripts: one JSON object a line."""

    def __init__(self, wanted: PreloadPlan, key: str | None) -> None:
        self._wanted = wanted
        self._key = key

    def show_line(self, line: str) -> None:
        self._print({"event": "message", "line": line})

    async def prepare(self, running: Running) -> None:
        self._print(
            {
                "event": "started",
                "url": running.url,
                "grpc": running.grpc,
                "home": str(running.home),
                "redis": running.redis,
                "gateways": running.gateways,
                "pools": dict(running.pools),
                "threads": running.threads,
            }
        )
        async with Api(ServerAddress(running.local_url, self._key)) as api:
            await preload.live(api)
            await repositories.place(api, self._wanted.repositories, self._show_loaded)
            async for one in preload.place_all(api, self._wanted.models, _pool(running)):
                if isinstance(one, ServedModel):
                    self._print({"event": "model", "name": one.name, "version": one.version, "pushed": one.pushed})
                else:
                    self._print({"event": "model", "name": one.name, "error": one.reason})
            if not await preload.ready(api):
                self.show_line("no model answers yet")

    def _show_loaded(self, loaded: RepositoryModel) -> None:
        versions = list(loaded.versions)
        said = {"event": "loaded", "name": loaded.name, "versions": versions, "folder": str(loaded.folder)}
        self._print(said | ({"error": loaded.failure} if loaded.failure is not None else {}))

    def ready(self, running: Running) -> None:
        self._print({"event": "ready", "url": running.url, "grpc": running.grpc, "pid": os.getpid()})

    def stopped(self) -> None:
        self._print({"event": "stopped"})

    def _print(self, document: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            print(json.dumps(document), flush=True)


def _pool(running: Running) -> str:
    """The pool that serves what is pushed at start: cpu if there is one."""
    return "cpu" if "cpu" in running.pools else next(iter(running.pools))


def _short(path: Path) -> str:
    """A path as one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _command() -> str:
    """How this command is called from here: `make run` starts it without having it on the PATH."""
    started = Path(sys.argv[0])
    return "millstream" if shutil.which("millstream") or started.name != "millstream" else _short(started.absolute())
