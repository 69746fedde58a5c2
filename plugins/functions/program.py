"""The process of a function: imports the file, finds the function or class, and runs it (children/confined.py).

file ─> its one public function, or class with `predict` ─> hints ─> Signature, in JSON
run: tensors ─> values of parameters ─> the function ─> values of results ─> tensors
A function of single values is called for each row of a run, one of lists once with all of them. Standard library alone.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from millstream.plugins.children.confined import ModelError, Run, located, main
from millstream.plugins.children.message_channel import Message, TensorData
from millstream.plugins.children.streamed import Streaming
from millstream.plugins.functions.around_model import POST, PRE, AroundModel, ModelSession, model_beside
from millstream.plugins.functions.event_loop import PipePolicy
from millstream.plugins.functions.hints import HintCodec, HintError, Parameter, inputs_of, part_of, results_of
from millstream.plugins.functions.lit_api import function_of, is_lit_api

PREDICT = "predict"
_ADAPTERS = "millstream.plugins.functions"
_SHOWN = 5  # names in a message
#: declares how many requests a generator answers at once
STREAMS, STREAMS_MAX = "STREAMS", 1024
ASYNC_STREAMS = 64  # of an asynchronous generator that declares nothing


def load(task: dict[str, Any]) -> tuple[dict[str, Any], Run | Streaming]:
    """Import the file of a task, and return what its function takes and answers, and what runs it.

    Raises ModelError, with the line where it failed.
    """
    path = Path(task["file"])
    asyncio.set_event_loop_policy(PipePolicy())
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    sys.path += task["beneath"]
    folder = path.parent if task["adapter"] != "archive_handlers" else path.parents[1]
    with located(folder):
        if task["adapter"]:
            name, function = importlib.import_module(f"{_ADAPTERS}.{task['adapter']}").served(path)
        else:
            module = _imported(path)
            own = {
                name: value
                for name, value in vars(module).items()
                if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
            }
            name, function = _around(own, path) or _function(own, path)
            name = f"{path.name}: {name}"
            if inspect.isclass(function):
                function = function_of(function) if is_lit_api(function) else _opened(function, loop)
        called = Called(folder, name, function, loop)
    return called.described(), called.streaming() or (lambda message: Message({}, called.run(message.tensors)))


def _imported(path: Path) -> Any:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path.name} is no file of Python")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _around(own: dict[str, Any], path: Path) -> tuple[str, AroundModel] | None:
    """Return `pre` and `post` of a file with the model beside it; None: it has none of them. Raises ModelError."""
    names = [name for name in (PRE, POST) if inspect.isfunction(own.get(name))]
    model = model_beside(path)
    if not names or PREDICT in own or (model is None and len(names) == 1):
        return None
    name = " and ".join(names)
    if model is None:
        raise ModelError(f"{path.name}: {name} are of an ONNX model: put it beside them, as model.onnx")
    session = ModelSession(model)
    try:
        return name, AroundModel(own.get(PRE), own.get(POST), session)
    except (HintError, NameError, TypeError) as error:
        raise ModelError(f"{path.name}: {name}: {error}") from error


def _function(own: dict[str, Any], path: Path) -> tuple[str, Any]:
    """Return the function or class to serve of a file's own: `predict`, or the only public one. Raises ModelError."""
    found = {name: value for name, value in own.items() if _serves(value)}
    if PREDICT in found:
        return PREDICT, found[PREDICT]
    if len(found) == 1:
        return next(iter(found.items()))
    if not found:
        raise ModelError(f"{path.name} has no public function, and no class with a method {PREDICT!r}")
    names = ", ".join(list(found)[:_SHOWN])
    raise ModelError(
        f"{path.name} has {len(found)} public functions ({names}): name the one to serve {PREDICT!r}, or begin the "
        "names of the others with an underscore"
    )


def _serves(value: Any) -> bool:
    return callable(getattr(value, PREDICT, None)) if inspect.isclass(value) else inspect.isfunction(value)


def _opened(kind: type, loop: asyncio.AbstractEventLoop) -> Any:
    """Return `predict` of an object of the class, once its `load` has run."""
    model: Any = kind()
    if callable(getattr(model, "load", None)):
        loaded = model.load()
        if inspect.isawaitable(loaded):
            loop.run_until_complete(loaded)
    return getattr(model, PREDICT)


class Called:
    """A function with its hints.

    Raises ModelError for hints that cannot be served.
    """

    def __init__(self, folder: Path, name: str, function: Callable[..., Any], loop: asyncio.AbstractEventLoop) -> None:
        self._folder = folder
        self._name = name
        self._function = function
        self._loop = loop
        self._yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        self._streams = self._streams_declared() if self._yields else 0
        self._is_async = inspect.iscoroutinefunction(function)
        try:
            self._inputs, (self._outputs, self._tuples) = self._hints()
        except (HintError, NameError, TypeError) as error:
            raise ModelError(f"{self._name}: {error}") from error
        of_rows = [value.of_rows for value in (*self._inputs, *self._outputs)]
        self._by_row = not any(value.of_rows for value in self._inputs)
        #: whether it takes and answers rows; otherwise each request runs alone
        counted = {value.codec.rows for value in (*self._inputs, *self._outputs)} - {""}
        self._batches = (self._by_row or (all(of_rows) and len(counted) <= 1)) and not self._yields

    def _hints(self) -> tuple[list[Parameter], tuple[list[Parameter], bool]]:
        if isinstance(self._function, AroundModel):
            return self._function.inputs, self._function.results
        inputs = inputs_of(self._function)
        of_row = not any(value.of_rows for value in inputs)
        returned = typing.get_type_hints(self._function, include_extras=True).get("return")
        return inputs, results_of(part_of(returned) if self._yields else returned, of_row=of_row)

    def _streams_declared(self) -> int:
        """Return how many requests run at once: STREAMS of the class or the file, else one, or many of a coroutine."""
        owner = getattr(self._function, "__self__", None) or sys.modules.get(self._function.__module__)
        declared = getattr(owner, STREAMS, ASYNC_STREAMS if inspect.isasyncgenfunction(self._function) else 1)
        if not isinstance(declared, int) or not 1 <= declared <= STREAMS_MAX:
            raise ModelError(f"{self._name}: {STREAMS} is a number from 1 to {STREAMS_MAX}, not {declared!r}")
        return declared

    def streaming(self) -> Streaming | None:
        """Return what answers in parts; None: it answers at once."""
        if not self._yields:
            return None
        is_async = inspect.isasyncgenfunction(self._function)
        answers = self._async_parts if is_async else self._parts
        return Streaming(answers, self._streams, self._loop if is_async else None)

    def _parts(self, tensors: Sequence[TensorData]) -> Iterator[Sequence[TensorData]]:
        with located(self._folder):
            for result in self._function(**self._arguments(self._values(tensors))):
                yield self._part(result)

    async def _async_parts(self, tensors: Sequence[TensorData]) -> AsyncIterator[Sequence[TensorData]]:
        with located(self._folder):
            async for result in self._function(**self._arguments(self._values(tensors))):
                yield self._part(result)

    def _part(self, result: Any) -> Sequence[TensorData]:
        found = list(result) if self._tuples else [result]
        if len(found) != len(self._outputs):
            raise ModelError(f"{self._name} yielded {len(found)} results, and {len(self._outputs)} were declared")
        columns = [column if value.of_rows else [column] for value, column in zip(self._outputs, found, strict=True)]
        return [self._tensor(value, column) for value, column in zip(self._outputs, columns, strict=True)]

    def described(self) -> dict[str, Any]:
        """Return the inputs and outputs with their shapes, and whether requests may share a run."""
        return {
            "function": self._name,
            "inputs": [self._spec(value) | {"optional": value.optional} for value in self._inputs],
            "outputs": [self._spec(value) for value in self._outputs],
            "columns": list(getattr(self._function, "columns", ())),
            "kinds": {value.name: value.codec.kind for value in (*self._inputs, *self._outputs)},
            "batches": self._batches,
            "streams": self._streams,
        }

    def _spec(self, value: Parameter) -> dict[str, Any]:
        rows = [-1] if self._batches or value.of_rows else [1]
        spec = {"name": value.name, "datatype": value.codec.datatype, "shape": [*rows, *value.codec.dims]}
        on_request = value.name in getattr(self._function, "on_request", ())
        return spec | ({"document": True} if value.codec.kind == "json" else {}) | {"on_request": on_request}

    def run(self, tensors: Sequence[TensorData]) -> Sequence[TensorData]:
        """Call the function with the rows of tensors. Raises InputError, ModelError."""
        values = self._values(tensors)
        rows = len(next(iter(values.values()), ()))
        with located(self._folder):
            results = self._called(values, rows)
        columns = self._columns(results, rows)
        return [self._tensor(value, column) for value, column in zip(self._outputs, columns, strict=True)]

    def _values(self, tensors: Sequence[TensorData]) -> dict[str, Sequence[Any]]:
        """Return the values of rows, by parameter. Raises InputError."""
        given = {tensor.name: tensor for tensor in tensors}
        return {
            value.name: value.codec.decode(given[value.name].data, given[value.name].shape)
            for value in self._inputs
            if value.name in given
        }

    def _arguments(self, values: dict[str, Sequence[Any]]) -> dict[str, Any]:
        """Return what a function of all rows is called with."""
        of_rows = {value.name: value.of_rows for value in self._inputs}
        return {name: column if of_rows[name] else column[0] for name, column in values.items()}

    def _called(self, values: dict[str, Sequence[Any]], rows: int) -> Any:
        """Return the results: a list of one for each row, or the one of all rows."""
        if self._by_row:
            calls = [{name: column[row] for name, column in values.items()} for row in range(rows)]
            if self._is_async:
                return self._loop.run_until_complete(_all(self._function, calls))
            return [self._function(**arguments) for arguments in calls]
        result = self._function(**self._arguments(values))
        return self._loop.run_until_complete(result) if self._is_async else result

    def _columns(self, results: Any, rows: int) -> list[Any]:
        """Return the values of rows for each output."""
        if self._by_row:
            return [[result[i] for result in results] for i in range(len(self._outputs))] if self._tuples else [results]
        found = list(results) if self._tuples else [results]
        if len(found) != len(self._outputs):
            raise ModelError(f"{self._name} returned {len(found)} results, and {len(self._outputs)} were declared")
        columns = [column if value.of_rows else [column] for value, column in zip(self._outputs, found, strict=True)]
        for value, column in zip(self._outputs, columns, strict=True):
            if not hasattr(column, "__len__"):
                raise ModelError(f"{self._name} returned {type(column).__name__}, and a list was declared")
            if self._batches and len(column) != rows:
                raise ModelError(f"{self._name} returned {len(column)} rows of {value.name!r} for {rows} rows")
        return columns

    def _tensor(self, value: Parameter, column: Any) -> TensorData:
        codec: HintCodec = value.codec
        data, shape = codec.encode(column)
        return TensorData(value.name, codec.datatype, shape, data)


async def _all(function: Callable[..., Any], calls: Sequence[dict[str, Any]]) -> list[Any]:
    return await asyncio.gather(*(function(**arguments) for arguments in calls))


if __name__ == "__main__":
    main(load)
