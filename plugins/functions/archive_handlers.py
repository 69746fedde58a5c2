"""Makes a function of the handler in an unpacked archive of TorchServe: bodies of requests in, bodies of answers out.

MAR-INF/MANIFEST.json ─> handler: a module with `handle(data, context)`, or one class with `initialize` and `handle`
body, content type ─> a row {"body" or the names of a form: value} ─> handle([row, …], context) ─> body, type, status
`ts` is that of the environment; where it has none, its parts that most handlers use stand in (torch_handlers).
Sources: pytorch/serve, ts/model_loader.py, ts/service.py, ts/context.py, ts/protocol/otf_message_handler.py.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from millstream.plugins.children.confined import InputError, ModelError
from millstream.plugins.functions import torch_serve

JSON, BYTES, TEXT = "application/json", "application/octet-stream", "text/plain; charset=utf-8"
_FORM, _URLENCODED = "multipart/form-data", "application/x-www-form-urlencoded"
_PARTS_MAX = 64
_HANDLE = "handle"
_BOUNDARY = re.compile(r'boundary="?([^";]+)"?')
_NAME = re.compile(rb'[; ]name="([^"]*)"')
_TYPE = re.compile(rb"(?im)^content-type:\s*([^\r\n]+)")
_STATUSES = range(200, 600)


class HandlerAnswer(NamedTuple):
    """What a request is answered with."""

    response: bytes
    content_type: str
    status: int


class HandlerAnswers(NamedTuple):
    """What the requests of a run are answered with."""

    response: list[bytes]
    content_type: list[str]
    status: list[int]


def served(path: Path) -> tuple[str, Callable[..., Any]]:
    """Return the name and the function of the handler. `path`: of the manifest. Raises ModelError."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    model = manifest["model"]
    handler = str(model["handler"])
    folder = path.parents[1]
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    if find_spec("ts") is None:
        torch_serve.install()
    context = torch_serve.HandlerContext(str(model.get("modelName", "")), folder, manifest, _configured(folder, model))
    called = _entry(handler, context)
    together = int(context.model_yaml_config.get("batchSize", 1) or 1)
    return handler, _function(called, context, max(1, together))


def _configured(folder: Path, model: Mapping[str, Any]) -> dict[str, Any]:
    name = model.get("configFile")
    if not name:
        return {}
    if find_spec("yaml") is None:
        raise ModelError(f"the archive has {name}, and PyYAML, which reads it, is missing: add it to its requirements")
    import yaml

    found = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _entry(handler: str, context: Any) -> Callable[..., Any]:
    """Return what handles rows, initialized. Raises ModelError."""
    name, _, function = handler.partition(":")
    name = name.rpartition("/")[2].removesuffix(".py")
    own = (Path.cwd() / f"{name}.py").is_file()
    module = importlib.import_module(name if own else f"ts.torch_handler.{name}")
    function = function or _HANDLE
    if callable(getattr(module, function, None)) and not inspect.isclass(getattr(module, function)):
        entry: Callable[..., Any] = getattr(module, function)
        entry(None, context)
        return entry
    classes = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__]
    handlers = [one for one in classes if hasattr(one, _HANDLE) or hasattr(one, "initialize")]
    if len(handlers) != 1:
        raise ModelError(
            f"{name}.py has no function {function}(data, context), and {len(handlers)} classes of handlers: one of "
            "both is served"
        )
    made: Any = handlers[0]()
    if not callable(getattr(made, _HANDLE, None)):
        raise ModelError(f"the class {handlers[0].__name__} of {name}.py has no method handle(data, context)")
    if callable(getattr(made, "initialize", None)):
        made.initialize(context)
    handle: Callable[..., Any] = made.handle
    return handle


def _function(called: Callable[..., Any], context: Any, together: int) -> Callable[..., Any]:
    def run(bodies: Sequence[bytes], types: Sequence[str]) -> list[HandlerAnswer]:
        rows = [row_of(body, kind) for body, kind in zip(bodies, types, strict=True)]
        context.begin(types)
        try:
            answers = called(rows, context)
        except Exception as error:
            if hasattr(error, "error_code") and hasattr(error, "message"):  # PredictionException
                known = InputError if 400 <= int(error.error_code) < 500 else ModelError
                raise known(str(error.message)) from error
            raise
        if not isinstance(answers, list):
            raise ModelError(f"the handler returned {type(answers).__name__}, and a list of answers is expected")
        if len(answers) != len(rows):
            raise ModelError(f"the handler returned {len(answers)} answers for {len(rows)} requests")
        return [_answer(answer, context, at) for at, answer in enumerate(answers)]

    def handle(body: bytes, content_type: str = "") -> HandlerAnswer:
        return run([body], [content_type])[0]

    def handle_rows(body: list[bytes], content_type: list[str] | None = None) -> HandlerAnswers:
        types = content_type or [""] * len(body)
        found: list[HandlerAnswer] = []
        for at in range(0, len(body), together):
            found += run(body[at : at + together], types[at : at + together])
        return HandlerAnswers(*(list(column) for column in zip(*found, strict=True)))

    chosen: Any = handle if together == 1 else handle_rows
    chosen.on_request = frozenset({"content_type", "status"})
    return chosen  # type: ignore[no-any-return]


def row_of(body: bytes, content_type: str) -> dict[str, Any]:
    """Return what a handler gets for a request. Raises InputError for a form that is broken."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == _FORM:
        return _form(body, content_type)
    if kind == _URLENCODED:
        try:
            pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_PARTS_MAX)
        except ValueError as error:
            raise InputError(f"the form cannot be read: {error}") from error
        return {name: bytearray(value.encode()) for name, value in pairs}
    return {"body": _value(body, kind)}


def _value(data: bytes, kind: str) -> Any:
    """Return JSON and text as what they are; other bytes, and what is broken, as they came."""
    try:
        if kind == JSON:
            return json.loads(data)
        if kind.startswith("text"):
            return data.decode()
    except (ValueError, RecursionError):
        pass
    return bytearray(data)


def _form(body: bytes, content_type: str) -> dict[str, Any]:
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        raise InputError("the form has no boundary")
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary[1].encode())[1:]
    if len(parts) < 2 or not parts[-1].startswith(b"--") or len(parts) > _PARTS_MAX + 1:
        raise InputError(f"the form is broken, or has more than {_PARTS_MAX} parts")
    found = {}
    for part in parts[:-1]:
        head, separator, data = part.partition(b"\r\n\r\n")
        name, kind = _NAME.search(head), _TYPE.search(head)
        if not separator or name is None:
            raise InputError("a part of the form has no name")
        found[name[1].decode(errors="replace")] = _value(data, kind[1].decode().lower() if kind else "")
    return found


def _answer(answer: Any, context: Any, at: int) -> HandlerAnswer:
    body, kind = _encoded(answer)
    status = context.get_response_status(at)[0]
    if status not in _STATUSES:
        raise ModelError(f"the handler set the status {status}, which no answer has")
    return HandlerAnswer(body, context.get_response_content_type(at) or kind, int(status))


def _encoded(answer: Any) -> tuple[bytes, str]:
    """Return the bytes of an answer, as TorchServe writes it, and what they are."""
    if isinstance(answer, bytes | bytearray | memoryview):
        return bytes(answer), BYTES
    if isinstance(answer, str):
        return answer.encode(), TEXT
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(answer, torch.Tensor):
        file = io.BytesIO()
        torch.save(answer, file)
        return file.getvalue(), BYTES
    try:
        return json.dumps(answer, indent=2).encode(), JSON
    except (TypeError, ValueError) as error:
        raise ModelError(f"the handler's answer is neither bytes, text nor JSON: {error}") from error
