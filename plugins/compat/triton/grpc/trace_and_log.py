"""trace_and_log: TraceSetting and LogSettings change trace and log settings; without settings they only return them."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.catalog.shared_settings import when_unlocked
from millstream.gateway.tensors.json_document import excerpt
from millstream.plugins.compat.triton.interfaces import LogSettings, TraceSettings
from millstream.services.errors import invalid


class TraceAndLogCalls:
    """Handles unary calls: each method takes a request message and returns the reply message, or raises Failure."""

    def __init__(self, trace: TraceSettings, log: LogSettings) -> None:
        self._trace = trace
        self._log = log

    async def trace_setting(self, request: Any, _: Any) -> Any:
        model = request.model_name or None
        if request.settings:
            changes = {name: _trace_value(value) for name, value in request.settings.items()}
            values = await when_unlocked(lambda: self._trace.update(model, changes))
        else:
            values = self._trace.get(model)
        response = pb.TraceSettingResponse()
        for name, value in values.items():
            response.settings[name].value.extend([value] if isinstance(value, str) else value)
        return response

    async def log_settings(self, request: Any, _: Any) -> Any:
        if request.settings:
            changes = {name: _log_value(name, value) for name, value in request.settings.items()}
            values = await when_unlocked(lambda: self._log.update(changes))
        else:
            values = self._log.get()
        response = pb.LogSettingsResponse()
        for name, value in values.items():
            setattr(response.settings[name], _log_field(value), value)
        return response


def _trace_value(value: Any) -> str | list[str] | None:
    """Return the value of a setting: a single value without a list; None, which clears the setting, for no value."""
    values = list(value.value)
    return values if len(values) > 1 else values[0] if values else None


def _log_value(name: str, value: Any) -> str | int | bool:
    field = value.WhichOneof("parameter_choice")
    if field is None:
        raise invalid(f"the log setting '{excerpt(name)}' has no value")
    setting: str | int | bool = getattr(value, field)
    return setting


def _log_field(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "bool_param"
    return "uint32_param" if isinstance(value, int) else "string_param"
