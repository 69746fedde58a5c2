"""Shows the progress of `millstream up`: what is running, events, and when it is ready. Also loads the models.

With JSON logs, what happens is on standard output already, as log records: the view shows nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO, cast

from millstream.client.address import ServerAddress
from millstream.client.async_client import AsyncClient
from millstream.client.cli.demo import version_text
from millstream.client.cli.terminal import duration, escape, results
from millstream.services.cli import preload
from millstream.services.cli.preload import (
    EXAMPLE,
    LOAD_S_MAX,
    MODELS_S_MAX,
    FailedModel,
    LoadedModel,
    PreloadPlan,
    ServedModel,
)
from millstream.services.errors import Code, Failure
from millstream.services.local_token import read_token
from millstream.services.plugin.registry import is_on
from millstream.services.process.logs import about, descriptor_writer
from millstream.services.supervisor.listener import PRELOADS_S_MAX
from millstream.services.supervisor.own_log import LOGGER, LineWriter
from millstream.services.supervisor.plan import Running

log = logging.getLogger(LOGGER)

_NOT_READY = "no model answers yet: `millstream models` shows their states"


class StartupView:
    """Loads the models of `plan` when the installation has started, and logs it. Subclasses show what it does, too."""

    def __init__(self, plan: PreloadPlan, key: str | None) -> None:
        self._plan = plan
        self._key = key
        #: longest time for which models that load keep the installation from being ready
        self.load_s_max = math.inf if plan.required else PRELOADS_S_MAX
        self._failed: dict[str, str] = {}  # name -> reason
        self._others = 0  # models that serve, or were unloaded by a user
        self._has_digits = False

    async def load_models(self, running: Running) -> None:
        """Load the models of the plan. A model that cannot be served is shown and stops nothing.

        Raises Failure if the plan requires models, and none can be served.
        """
        wait_s = LOAD_S_MAX if self._plan.required else MODELS_S_MAX
        self._show_started(running)
        if not running.gateways:
            return  # nothing can be loaded here
        with self._working("starting"):
            async with self._client(running) as client:
                await preload.wait_until_live(client)
                for other in self._plan.others:
                    await other.load(client, self._on_loaded, wait_s)
                async for model in preload.load_models(client, self._plan.models, wait_s):
                    self._on_model(model)
        if self._plan.required and not self._others:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._failed.items())
            raise Failure(Code.MODEL, f"none of its models can be served: {reasons or 'there are none'}")

    async def wait_until_ready(self, running: Running) -> None:
        """Return when the server is ready, or has workers of which none answers yet."""
        with self._working("starting"):
            async with self._client(running) as client:
                if not await preload.wait_until_ready(client):
                    log.warning(_NOT_READY)
                    self.show_line(_NOT_READY)

    def _client(self, running: Running) -> AsyncClient:
        key = self._key or read_token(running.home)
        return AsyncClient(ServerAddress(running.local_url, key, running.trust), retries=0)

    def show_line(self, line: str) -> None:
        """Show an event, which the supervisor has logged."""
        self._show({"event": "message", "line": line}, f"[yellow]{escape(line)}[/]")

    def ready(self, running: Running) -> None:
        """Show that the installation serves."""
        event = {"event": "ready", "url": running.url or None, "grpc": running.grpc, "pid": os.getpid()}
        self._show(
            event, *self._ready_lines(running), "[dim]stop[/]       Ctrl-C\n", f"[bold green]ready {running.serves}[/]"
        )

    def stopped(self) -> None:
        """Show that a requested stop is complete."""
        self._show({"event": "stopped"}, "[yellow]stopped[/]")

    def close(self) -> None:
        """Wait for a moment until all is shown."""

    def _show(self, event: dict[str, Any], *lines: str) -> None:
        """Show what happened: as an event for scripts, or as lines with markup."""

    def _working(self, text: str) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def _on_model(self, model: ServedModel | FailedModel) -> None:
        event: dict[str, Any] = {"event": "model", "name": model.name}
        if isinstance(model, FailedModel):
            self._failed[model.name] = model.reason
            log.error("model %s is not served: %s", model.name, model.reason, extra=about(model.name))
            self._show(event | {"error": model.reason}, _model_line(model.name, _not_served(model.reason)))
            return
        how = "uploaded" if model.pushed else "already uploaded"
        values = about(model.name, version=model.version)
        self._others += 1
        self._has_digits |= model.name == "digits"
        log.info("model %s version %d: %s, answers", model.name, model.version, how, extra=values)
        known = "" if model.pushed else ", already uploaded"
        state = "on standby" if model.seconds is None else f"answers in {duration(model.seconds)}"
        event |= {"version": model.version, "pushed": model.pushed}
        self._show(event, _model_line(model.name, f"version {model.version}{known}, {state}"))

    def _on_loaded(self, loaded: LoadedModel) -> None:
        folder, numbers = str(loaded.folder), ", ".join(map(str, loaded.versions))
        event = {"event": "loaded", "name": loaded.name, "versions": list(loaded.versions), "folder": folder}
        if loaded.failure is not None:
            self._failed[loaded.name] = loaded.failure
            log.error("model %s is not served: %s", loaded.name, loaded.failure, extra=about(loaded.name))
            self._show(event | {"error": loaded.failure}, _model_line(loaded.name, _not_served(loaded.failure)))
            return
        self._others += 1
        values = about(loaded.name, folder=loaded.folder)
        what = numbers or "stays unloaded"
        log.info("model %s of the repository %s: %s", loaded.name, loaded.folder, what, extra=values)
        place = f"version {numbers}, in place in {escape(_short(loaded.folder))}"
        self._show(event, _model_line(loaded.name, "stays unloaded" if loaded.unloaded else place))

    def _show_started(self, running: Running) -> None:
        event = {
            "event": "started",
            "url": running.url or None,
            "grpc": running.grpc,
            "home": str(running.home),
            "redis": running.redis,
            "gateways": running.gateways,
            "pools": {pool: spec.initial for pool, spec in running.pools.items()},
            "threads": dict(running.threads),
        }
        gateways = "1 process" if running.gateways == 1 else f"{running.gateways} processes"
        lines = [f"[bold]Millstream[/] {version_text()}\n", f"[dim]home[/]       {escape(_short(running.home))}"]
        lines.append(f"[dim]redis[/]      {escape(running.redis)}")
        if running.gateways:
            lines.append(f"[dim]gateway[/]    {running.url}, {gateways}")
        if running.grpc is not None:
            lines.append(f"[dim]grpc[/]       {running.grpc}")
        for pool, spec in running.pools.items():
            threads = "1 thread" if running.threads[pool] == 1 else f"{running.threads[pool]} threads"
            count = "1 worker" if spec.size == "1" else f"{spec.size.replace(':', ' to ')} workers"
            lines.append(f"[dim]pool[/]       {escape(pool)}: {count} with {threads}")
        self._show(event, *lines)

    def _ready_lines(self, running: Running) -> list[str]:
        """Return what to try with the gateways; nothing without them."""
        if not running.gateways:
            return []
        lines = [f"\n[dim]try[/]        {_command()} push NAME FILE.onnx"]
        if self._has_digits:
            curl = f"curl -s{_curl_option(running)} {running.local_url}"
            request = _short(EXAMPLE / "request.json")
            call = f"{curl}/v2/models/digits/infer -d @{request}"
            lines = [f"\n[dim]try[/]        {call}", f"           {_command()} demo"]
        if is_on("console"):
            lines.append(f"[dim]console[/]    {_command()} console --open")
        return [*lines, f"[dim]pages[/]      {running.local_url}/docs"]


class TerminalView(StartupView):
    """Readable output; warnings of child processes appear in between, one line each."""

    def __init__(self, plan: PreloadPlan, key: str | None) -> None:
        super().__init__(plan, key)
        self._output = ThreadedOutput(lambda lines: f"{lines} lines were not shown: they were not read in time\n")
        self._console = results(cast("TextIO", self._output))

    def close(self) -> None:
        self._output.close()

    def _show(self, event: dict[str, Any], *lines: str) -> None:
        for line in lines:
            self._console.print(line)

    def _working(self, text: str) -> AbstractContextManager[object]:
        return self._console.status(f"[dim]{text}[/]") if self._console.is_interactive else contextlib.nullcontext()


class JsonView(StartupView):
    """Output for scripts: one JSON object per line."""

    def __init__(self, plan: PreloadPlan, key: str | None) -> None:
        super().__init__(plan, key)
        self._output = ThreadedOutput(lambda lines: _event({"event": "lost", "lines": lines}))

    def close(self) -> None:
        self._output.close()

    def _show(self, event: dict[str, Any], *lines: str) -> None:
        self._output.write(_event(event))


def _model_line(name: str, what: str) -> str:
    return f"[dim]model[/]      {escape(name)} {what}"


def _not_served(reason: str) -> str:
    return f"[red]is not served[/]: {escape(reason)}"


def _event(document: dict[str, Any]) -> str:
    return json.dumps(document) + "\n"


def _short(path: Path) -> str:
    """Return the path relative to the current folder if it is below that."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _curl_option(running: Running) -> str:
    """Return what lets curl trust a certificate that may be for another name than that of this machine."""
    return "k" if running.local_url.startswith("https://") else ""


def _command() -> str:
    """Return how to call this command from here: `make run` starts it without having it on the PATH."""
    started = Path(sys.argv[0])
    return "millstream" if shutil.which("millstream") or started.name != "millstream" else _short(started.absolute())


class ThreadedOutput(io.TextIOBase):
    """A text stream that stands for standard output. Writing never waits, and raises nothing.

    Args:
        lost: makes the text that says how many pieces of text were lost, because they were not read in time.
    """

    def __init__(self, lost: Callable[[int], str]) -> None:
        super().__init__()
        self._lines = LineWriter(descriptor_writer(1), lost=lambda count: lost(count).encode())
        self._encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        self._terminal = sys.stdout is not None and sys.stdout.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        """Write text later, in the order of the calls."""
        if text:
            self._lines.write(text.encode(self._encoding, "backslashreplace"))
        return len(text)

    def close(self) -> None:
        """Wait for a moment until all is written."""
        if not self.closed:
            self._lines.close()
        super().close()
