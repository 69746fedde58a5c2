"""Runs `pre` and `post` of a file beside a session of the ONNX file in its folder, in one process without a hop.

inputs ─> pre ─> the model's inputs ─> session: all rows of a run together ─> its outputs ─> post ─> outputs
`pre` and `post` take and answer one row, or all rows of a run where their hints say so, as any function does.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from millstream.plugins.children.confined import ModelError
from millstream.plugins.functions.hints import HintError, Parameter, inputs_of, results_of, takes_rows, value_of
from millstream.services.environment import variables_of

PRE, POST = "pre", "post"
#: of the environment: the threads that an instance may have
THREADS = "OMP_NUM_THREADS"
_MODEL = "model.onnx"
_TENSOR = re.compile(r"tensor\((\w+)\)")
#: names of ONNX Runtime for datatypes that numpy calls otherwise
_NUMPY = {"float": "float32", "double": "float64", "string": "str"}
_NO_MEMORY = re.compile(r"bad_alloc|failed to allocate|out of memory", re.IGNORECASE)
_MESSAGE_CHARACTERS_MAX = 500


def model_beside(path: Path) -> Path | None:
    """Return the ONNX file in the folder of a file: model.onnx, or the only one; None: there is none, or several."""
    found = sorted(path.parent.glob("*.onnx"))
    return next((one for one in found if one.name == _MODEL), found[0] if len(found) == 1 else None)


class _Tensor(NamedTuple):
    """An input or output of a session. `dtype`: "" is no array's. `shape`: -1, or a name, is a size that varies."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(one if isinstance(one, int) else -1 for one in self.shape)

    def parameter(self, *, row: bool) -> Parameter:
        """Return it as an input or output of the version. `row`: its first size counts the rows. Raises HintError."""
        dims = self.dims[1:] if row else self.dims
        if self.dtype == "str" and len(dims) < 2:
            return value_of(self.name, list[list[str]] if dims else list[str])
        if self.dtype in {"", "str"}:
            raise HintError(f"the model's {self.name!r} is nothing that can be answered or taken without {POST!r}")
        return value_of(self.name, Annotated[_numpy().ndarray, (-1, *dims), self.dtype])


class ModelSession:
    """A session of ONNX Runtime that runs rows.

    Raises ModelError if the model cannot be loaded, or has no rows.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        try:
            import onnxruntime
        except ImportError as error:
            raise ModelError(
                f"{path.name} needs onnxruntime and numpy, which have to be among the declared packages: {error}"
            ) from error
        onnxruntime.set_default_logger_severity(4)  # errors are raised
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(variables_of(THREADS).get(THREADS, "1"))  # those of an instance
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # they keep the memory of the largest run
        options.log_severity_level = 4
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise _of_library(self.name, error) from error
        self.inputs = [_tensor(one) for one in self._session.get_inputs()]
        self.outputs = [_tensor(one) for one in self._session.get_outputs()]
        firsts = {one.shape[0] if one.shape else 0 for one in self.inputs}
        without = next((one for one in self.inputs if not one.shape or one.dims[0] not in {-1, 1}), None)
        if without is not None:
            raise ModelError(f"{self.name}: input {without.name!r} {list(without.dims)} has no dimension of rows")
        varies = all(one.dims[0] == -1 for one in self.inputs)
        #: of each output, whether its first size counts the rows of the inputs
        self.of_rows = [bool(one.shape) and one.shape[0] in {-1, 1, *firsts} for one in self.outputs]
        self._together = varies and all(self.of_rows)

    def run(self, columns: Mapping[str, Sequence[Any]], rows: int) -> list[Sequence[Any]]:
        """Return the values of rows for each output.

        Args:
            columns: the values of rows for each input.
            rows: how many there are.
        """
        arrays = {one.name: [self._row(one, value) for value in columns[one.name]] for one in self.inputs}
        if self._together and all(len({value.shape for value in column}) == 1 for column in arrays.values()):
            answered = self._run({name: _numpy().stack(column) for name, column in arrays.items()})
            for one, found in zip(self.outputs, answered, strict=True):
                if len(found) != rows:
                    raise ModelError(f"{self.name} answered {len(found)} rows of {one.name!r} for {rows} rows")
            return answered
        alone = [self._run({name: column[row][None] for name, column in arrays.items()}) for row in range(rows)]
        return [
            [one[at][0] if of_rows and len(one[at]) == 1 else one[at] for one in alone]
            for at, of_rows in enumerate(self.of_rows)
        ]

    def _row(self, spec: _Tensor, value: Any) -> Any:
        """Return the array of one row. Raises ModelError if the model does not take it."""
        numpy = _numpy()
        dtype = object if spec.dtype == "str" else spec.dtype
        try:
            array = numpy.asarray(value)
            if array.dtype != dtype and not (dtype is object or numpy.can_cast(array.dtype, dtype, "same_kind")):
                raise ModelError(f"{spec.name!r} is {array.dtype}, and {self.name} takes {spec.dtype}")
            array = array.astype(dtype, copy=False)
        except (ValueError, TypeError) as error:
            raise ModelError(f"{spec.name!r} is no array for {self.name}: {error}") from error
        if array.ndim == len(spec.dims) and array.shape[0] == 1:
            array = array[0]
        wanted = spec.dims[1:]
        found = array.shape
        if len(found) != len(wanted) or any(want not in {-1, got} for want, got in zip(wanted, found, strict=True)):
            raise ModelError(f"a row of {spec.name!r} has the shape {[*found]}, and {self.name} takes {[*wanted]}")
        return array

    def _run(self, arrays: Mapping[str, Any]) -> list[Any]:
        try:
            return list(self._session.run(None, arrays))
        except Exception as error:
            raise _of_library(self.name, error) from error


class AroundModel:
    """`pre`, a session and `post` as one function of all rows of a run.

    `inputs`: of `pre`, or the model's own. `results`: of `post`, or the model's own outputs, and whether they are a
    tuple.

    Raises HintError.
    """

    def __init__(self, pre: Callable[..., Any] | None, post: Callable[..., Any] | None, session: ModelSession) -> None:
        self._pre, self._post, self._session = pre, post, session
        for one in (pre, post):
            if one is not None and (inspect.iscoroutinefunction(one) or inspect.isgeneratorfunction(one)):
                raise HintError(f"{one.__name__!r} is async or a generator, and has to be a plain function")
        self._pre_of_rows = False
        if pre is None:
            self.inputs = [one.parameter(row=True) for one in session.inputs]
        else:
            inputs = inputs_of(pre)
            self._pre_of_rows = _all_alike(PRE, [one.of_rows for one in inputs])
            self.inputs = [one._replace(of_rows=True) for one in inputs]
        self._post_of_rows = False
        if post is None:
            made = [one.parameter(row=row) for one, row in zip(session.outputs, session.of_rows, strict=True)]
            self.results: tuple[list[Parameter], bool] = (made, True)
        else:
            self._wanted = inspect.signature(post).parameters
            hints = typing.get_type_hints(post, include_extras=True)
            self._lists = {name for name in self._wanted if typing.get_origin(hints.get(name)) in {list, Sequence}}
            self._post_of_rows = any(takes_rows(hints.get(name)) for name in self._wanted)
            outputs, self._tuples = results_of(hints.get("return"), of_row=not self._post_of_rows)
            if self._post_of_rows:
                _all_alike(f"the result of {POST}", [one.of_rows for one in outputs], wanted=True)
            self.results = [one._replace(of_rows=True) for one in outputs], self._tuples

    def __call__(self, **given: Sequence[Any]) -> Any:
        """Return the outputs' values of rows: a tuple, or those of the one output."""
        rows = len(next(iter(given.values()), ()))
        made = self._prepared(given, rows)
        missing = next((one.name for one in self._session.inputs if one.name not in made), None)
        if missing is not None:
            raise ModelError(f"{PRE} returned no {missing!r}, which {self._session.name} takes, but {_shown(made)}")
        answered = self._session.run(made, rows)
        return tuple(answered) if self._post is None else self._finished(answered, made, rows)

    def _prepared(self, given: Mapping[str, Sequence[Any]], rows: int) -> dict[str, Sequence[Any]]:
        """Return what `pre` makes, by name: the values of rows."""
        if self._pre is None:
            return dict(given)
        if self._pre_of_rows:
            made = self._named(self._pre(**given))
            for name, column in made.items():
                if not hasattr(column, "__len__") or len(column) != rows:
                    raise ModelError(f"{PRE} returned {_rows_in(column)} of {name!r} for {rows} rows")
            return made
        each = [self._named(self._pre(**{name: column[row] for name, column in given.items()})) for row in range(rows)]
        if any(one.keys() != each[0].keys() for one in each):
            raise ModelError(f"{PRE} returned other names for one row than for another")
        return {name: [one[name] for one in each] for name in each[0]}

    def _named(self, result: Any) -> dict[str, Any]:
        """Return a result of `pre` by name: a dictionary, a named tuple, or values in the order of the inputs."""
        if isinstance(result, Mapping):
            return dict(result)
        if hasattr(result, "_asdict"):
            return dict(result._asdict())
        names = [one.name for one in self._session.inputs]
        values = result if isinstance(result, tuple) else (result,)
        if len(values) != len(names):
            raise ModelError(f"{PRE} returned {len(values)} values, and {self._session.name} takes {_shown(names)}")
        return dict(zip(names, values, strict=True))

    def _finished(self, answered: Sequence[Sequence[Any]], made: Mapping[str, Sequence[Any]], rows: int) -> Any:
        assert self._post is not None
        columns = self._of_post(answered, made)
        if self._post_of_rows:
            return self._post(**{name: self._whole(name, column) for name, column in columns.items()})
        results = [self._post(**{name: column[row] for name, column in columns.items()}) for row in range(rows)]
        if not self._tuples:
            return results
        wanted = len(self.results[0])
        if any(len(one) != wanted for one in results):
            raise ModelError(f"{POST} returned {len(results[0])} results, and {wanted} were declared")
        return tuple([one[at] for one in results] for at in range(wanted))

    def _of_post(self, answered: Sequence[Any], made: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `post` takes: outputs by name, else in their order, and what `pre` returned beside the inputs."""
        outputs = dict(zip([one.name for one in self._session.outputs], answered, strict=True))
        named = not outputs.keys().isdisjoint(self._wanted)
        left, found = iter(() if named else answered), {}
        for name, parameter in self._wanted.items():
            value = outputs.get(name) if name in outputs else made.get(name)
            if value is None and parameter.default is parameter.empty and (value := next(left, None)) is None:
                raise ModelError(
                    f"{POST} takes {name!r}, which is no output of {self._session.name} ({_shown(outputs)}), and which "
                    f"{PRE} does not return"
                )
            if value is not None:
                found[name] = value
        return found

    def _whole(self, name: str, column: Sequence[Any]) -> Any:
        """Return the values of rows as `post` takes them: a list, or one array."""
        numpy = _numpy()
        if name in self._lists or not isinstance(column[0] if len(column) else None, numpy.ndarray | numpy.generic):
            return list(column)
        try:
            return numpy.asarray(column) if isinstance(column, numpy.ndarray) else numpy.stack(column)
        except ValueError as error:
            raise ModelError(f"rows of {name!r} differ in shape: let {POST} take a list of them") from error


def _tensor(one: Any) -> _Tensor:
    found = _TENSOR.fullmatch(one.type)
    name = found[1] if found is not None else ""
    shape = tuple(size if isinstance(size, int | str) and size != "" else -1 for size in one.shape or ())
    return _Tensor(one.name, _NUMPY.get(name, name), shape)


def _of_library(name: str, error: Exception) -> Exception:
    """Return what says that a session failed: that there is no memory, or what the library says."""
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        return MemoryError()
    text = " ".join(re.sub(r"^\[ONNXRuntimeError\] : \d+ : ", "", str(error)).split())
    return ModelError(f"{name}: {text[:_MESSAGE_CHARACTERS_MAX]}")


def _all_alike(what: str, of_rows: Sequence[bool], *, wanted: bool = False) -> bool:
    """Return whether values have all rows. Raises HintError if some have one, or with `wanted` if any has one."""
    if any(of_rows) != all(of_rows) or (wanted and not all(of_rows)):
        raise HintError(f"{what} has all rows in one place, and one row in another: use list[…] for all, or for none")
    return any(of_rows)


def _rows_in(column: Any) -> str:
    return f"{len(column)} rows" if hasattr(column, "__len__") else type(column).__name__


def _shown(names: Any) -> str:
    return ", ".join(map(repr, names))[:_MESSAGE_CHARACTERS_MAX]


def _numpy() -> Any:
    """Return numpy, which is there where ONNX Runtime is."""
    import numpy as np

    return np
