"""Shows the progress of `millstream up`: what is running, events, and when it is ready. Also loads the models."""

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
from millstream.services.cli.commands.demo import installed_version
from millstream.services.cli.preload import EXAMPLE, FailedModel, ServedModel
from millstream.services.cli.repositories import PreloadPlan, RepositoryModel
from millstream.services.cli.terminal import duration, escape, results
from millstream.services.client.address import ServerAddress
from millstream.services.client.async_client import AsyncClient
from millstream.services.supervisor.plan import Running


class TerminalView:
    """Readable output; warnings of child processes appear in between, one line each."""

    def __init__(self, plan: PreloadPlan, key: str | None) -> None:
        self._plan = plan
        self._key = key
        self._console: Console = results()
        self._served: list[ServedModel] = []

    def show_line(self, line: str) -> None:
        # A closed terminal must not stop the server.
        with contextlib.suppress(OSError):
            self._console.print(f"[yellow]{escape(line)}[/]")

    async def prepare(self, running: Running) -> None:
        self._show(running)
        with self._working("starting"):
            async with AsyncClient(ServerAddress(running.local_url, self._key), retries=0) as client:
                await preload.wait_until_live(client)
                await repositories.load_repositories(client, self._plan.repositories, self._show_loaded)
                async for model in preload.load_models(client, self._plan.models, _pool(running)):
                    if isinstance(model, ServedModel):
                        self._served.append(model)
                        self._show_model(model)
                    else:
                        self._show_failed(model)
                if not await preload.wait_until_ready(client):
                    self.show_line("no model answers yet: `millstream models` shows their states")

    def ready(self, running: Running) -> None:
        console = self._console
        if any(model.name == "digits" for model in self._served):
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
        console.print(f"[bold]Millstream[/] {installed_version()}\n")
        console.print(f"[dim]home[/]       {escape(_short(running.home))}")
        console.print(f"[dim]redis[/]      {escape(running.redis)}")
        console.print(f"[dim]gateway[/]    {running.url}, {gateways}")
        if running.grpc is not None:
            console.print(f"[dim]grpc[/]       {running.grpc}")
        for pool, workers in running.pools.items():
            threads = "1 thread" if running.threads == 1 else f"{running.threads} threads"
            count = "1 worker" if workers == 1 else f"{workers} workers"
            console.print(f"[dim]pool[/]       {escape(pool)}: {count} with {threads}")

    def _show_model(self, model: ServedModel) -> None:
        how = "" if model.pushed else ", already uploaded"
        self._console.print(
            f"[dim]model[/]      {escape(model.name)} version {model.version}{how}, "
            f"answers in {duration(model.seconds)}"
        )

    def _show_failed(self, model: FailedModel) -> None:
        self._console.print(f"[dim]model[/]      {escape(model.name)} [red]is not served[/]: {escape(model.reason)}")

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


class JsonView:
    """Output for scripts: one JSON object per line."""

    def __init__(self, plan: PreloadPlan, key: str | None) -> None:
        self._plan = plan
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
        async with AsyncClient(ServerAddress(running.local_url, self._key), retries=0) as client:
            await preload.wait_until_live(client)
            await repositories.load_repositories(client, self._plan.repositories, self._show_loaded)
            async for model in preload.load_models(client, self._plan.models, _pool(running)):
                if isinstance(model, ServedModel):
                    self._print(
                        {"event": "model", "name": model.name, "version": model.version, "pushed": model.pushed}
                    )
                else:
                    self._print({"event": "model", "name": model.name, "error": model.reason})
            if not await preload.wait_until_ready(client):
                self.show_line("no model answers yet")

    def _show_loaded(self, loaded: RepositoryModel) -> None:
        versions = list(loaded.versions)
        event = {"event": "loaded", "name": loaded.name, "versions": versions, "folder": str(loaded.folder)}
        self._print(event | ({"error": loaded.failure} if loaded.failure is not None else {}))

    def ready(self, running: Running) -> None:
        self._print({"event": "ready", "url": running.url, "grpc": running.grpc, "pid": os.getpid()})

    def stopped(self) -> None:
        self._print({"event": "stopped"})

    def _print(self, document: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            print(json.dumps(document), flush=True)


def _pool(running: Running) -> str:
    """Return the pool that serves preloaded models: cpu if there is one, else the first."""
    return "cpu" if "cpu" in running.pools else next(iter(running.pools))


def _short(path: Path) -> str:
    """Return the path relative to the current folder if it is below that."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _command() -> str:
    """Return how to call this command from here: `make run` starts it without having it on the PATH."""
    started = Path(sys.argv[0])
    return "millstream" if shutil.which("millstream") or started.name != "millstream" else _short(started.absolute())
