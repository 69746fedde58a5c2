"""Trace settings, global and of single models, which hold in all gateways of the machine.

POST …/trace/setting (REST), TraceSetting (gRPC) ─> update ─> shared document ─> every gateway's Traces
Source: Triton's trace extension, "Trace Setting".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from millstream.gateway.access.principal import shown
from millstream.gateway.catalog.snapshot import name_excerpt
from millstream.plugins.compat.triton.shared_settings import SharedDocument
from millstream.plugins.compat.triton.trace_file import TraceFile
from millstream.plugins.compat.triton.trace_settings import DEFAULTS, TraceValues, parsed
from millstream.plugins.compat.triton.traces import KEPT_BYTES_MAX, KEPT_MAX, Sampler, Trace, Traces, text_bytes_max
from millstream.services.errors import Failure, invalid
from millstream.services.nearest_names import did_you_mean
from millstream.services.process.audit import audit

log = logging.getLogger("millstream.trace")

CLAIM_S_MAX = 0.1  # for the lock of a trace count, which blocks the event loop; beyond, the traces are left out


class SharedTraceSettings:
    """The trace settings of one gateway, and the writing of its traces.

    Args:
        document: The settings that clients changed.
        traces: The traces that the lanes of this gateway record.
        file: The file that traces are written to.
        models: Returns the names of all models.
    """

    def __init__(
        self,
        document: SharedDocument,
        traces: Traces,
        file: Path,
        models: Callable[[], Collection[str]],
    ) -> None:
        self.document = document
        self._traces = traces
        self._file = file
        self._out = TraceFile(file)
        self._models = models
        self._content: Mapping[str, Any] = {}  # the document as it was last applied
        self._samplers: dict[str, Sampler | None] = {}
        self._waiting: dict[int, list[Trace]] = {}  # by log frequency: traces that are too few for a file yet
        self._write_all = False  # write the waiting traces, too
        self._writing: asyncio.Future[None] | None = None
        self._seen: dict[str, int] = {}  # requests that each sampler had counted when the settings changed
        traces.sampler = self._sampler
        self.apply()

    def get(self, model: str | None) -> TraceValues:
        """Return the settings in force: trace_level as a list, the others as strings. Raises Failure(INVALID)."""
        self._check(model)
        if self.document.changed():
            self.apply()
        return self._in_force(self._content, model) | {"trace_file": str(self._file), "trace_mode": "triton"}

    def update(self, model: str | None, values: Mapping[str, Any]) -> TraceValues:
        """Change some settings; None clears one. Returns those in force. Raises Failure: INVALID, UNSUPPORTED."""
        self._check(model)
        new = {name: None if value is None else parsed(name, value) for name, value in values.items()}
        if new:
            self.document.update(lambda content: self._change(content, model, new))
            self.apply()
            audit("trace settings changed", model, **new)
        return self.get(model)

    def _check(self, model: str | None) -> None:
        if model is not None and model not in self._models():
            raise invalid(
                f"Request for unknown model : {name_excerpt(model)}{did_you_mean(model, shown(self._models()))}"
            )

    def _change(self, content: dict[str, Any], model: str | None, new: Mapping[str, Any]) -> None:
        models: dict[str, dict[str, Any]] = content.setdefault("models", {})
        for removed in models.keys() - set(self._models()):
            del models[removed]
        own = content.setdefault("global", {}) if model is None else models.setdefault(model, {})
        own.update(new)
        for name in [name for name, value in own.items() if value is None]:
            del own[name]

    def _in_force(self, content: Mapping[str, Any], model: str | None) -> TraceValues:
        own = {} if model is None else content.get("models", {}).get(model, {})
        values: TraceValues = DEFAULTS | content.get("global", {}) | own
        return values

    def apply(self) -> None:
        """Apply the document after a change, by this gateway or another."""
        before, self._content = self._content, self.document.read()
        content = self._content
        # Each trace lowers a count, which is no reason to write traces that are too few for a file. Other changes are.
        if _without_counts(before) != _without_counts(content) and (self._traces.kept or self._waiting):
            self._write_all = True
        self._seen = {model: sampler.seen for model, sampler in self._samplers.items() if sampler is not None}
        self._samplers.clear()
        everything = [None, *content.get("models", {})]
        self._traces.on = any(self._in_force(content, model)["trace_level"] != ["OFF"] for model in everything)

    def _sampler(self, model: str) -> Sampler | None:
        if model not in self._samplers:
            values = self._in_force(self._content, model)
            off = values["trace_level"] == ["OFF"] or values["trace_count"] == "0"
            tensors = "TENSORS" in values["trace_level"]
            self._samplers[model] = (
                None
                if off
                else Sampler(
                    int(str(values["trace_rate"])), tensors, lambda n: self._claim(model, n), self._seen.get(model, 0)
                )
            )
        return self._samplers[model]

    def _claim(self, model: str, requested: int) -> int:
        """Take up to `requested` traces from the trace count, which gateways share. Returns how many are allowed."""
        if self._in_force(self._content, model)["trace_count"] == "-1":
            return requested

        def take(content: dict[str, Any]) -> tuple[int, int]:
            own = content.get("models", {}).get(model, {})
            owner = own if "trace_count" in own else content.setdefault("global", {})
            count = int(owner.get("trace_count", DEFAULTS["trace_count"]))
            granted = requested if count < 0 else min(requested, count)
            if count >= 0:
                owner["trace_count"] = str(count - granted)
            return granted, count - granted

        try:
            granted, remaining = self.document.update(take, CLAIM_S_MAX)
        except Failure as failure:
            log.warning("%d traces are left out: %s", requested, failure.message)
            return 0
        if not remaining:
            self.apply()  # the count is used up: no more requests are sampled
            self._write_all = True
        return granted

    def flush(self) -> None:
        """Write recorded traces in a thread. Call it regularly, in the event loop."""
        if self._writing is not None and not self._writing.done():
            return
        if self._traces.kept or (self._write_all and self._waiting):
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, self._take(), self._write_all))
            self._write_all = False

    async def close(self) -> None:
        """Write all traces, because the gateway stops."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        await asyncio.to_thread(self._write, self._take(), True)

    def _take(self) -> dict[int, list[Trace]]:
        kept = self._traces.take()
        if self._traces.lost:
            log.warning("%d traces were dropped: they came faster than they could be written", self._traces.lost)
            self._traces.lost = 0
        content = self._content
        taken, self._waiting = self._waiting, {}
        for model, trace in kept:
            taken.setdefault(int(str(self._in_force(content, model)["log_frequency"])), []).append(trace)
        return taken

    def _write(self, taken: Mapping[int, list[Trace]], last: bool) -> None:
        for frequency, traces in taken.items():
            unwritten = self._out.write(traces, frequency, last=last)
            if unwritten:
                self._waiting.setdefault(frequency, [])[:0] = unwritten
        if _too_many(self._waiting):  # many models may each have too few traces to reach their log frequency
            for frequency, traces in self._waiting.items():
                self._out.write(traces, frequency, last=True)
            self._waiting.clear()


def _too_many(waiting: Mapping[int, Sequence[Trace]]) -> bool:
    traces = [trace for group in waiting.values() for trace in group]
    return len(traces) > KEPT_MAX or sum(map(text_bytes_max, traces)) > KEPT_BYTES_MAX


def _without_counts(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings without trace_count."""
    parts = [content.get("global", {}), *content.get("models", {}).values()]
    return [{name: value for name, value in part.items() if name != "trace_count"} for part in parts]
