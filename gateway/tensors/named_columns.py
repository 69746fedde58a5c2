"""A table whose columns have names -> the inputs of a version. Every protocol matches names here. Pure.

columns by name ─> none unknown, none missing ─> values: numbers or text ─┬─> the one input, in the model's order
                                                                          └─> an input for each column
A request is read with the version's own inputs first, and as columns only if these refuse it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from types import MappingProxyType
from typing import Any

import numpy as np

from millstream.gateway.tensors.column_categories import Categories, Values, listed
from millstream.gateway.tensors.input_plans import CheckedInput, InputPlans, Inputs, join
from millstream.gateway.tensors.inputs import InputPlan, InputTensor
from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.tensors.nested_lists import from_array, from_lists
from millstream.gateway.tensors.number_list import NumberList
from millstream.gateway.tensors.outputs import OutputTensor, as_numbers
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import BYTES, DATATYPES, FLOATS, NUMPY, decode_elements, encode_elements
from millstream.services.model.manifest import ColumnCategories, Manifest
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.model.usage import column_names, table_input
from millstream.services.nearest_names import did_you_mean

_NUMBERS = {int, float, bool, type(None)}
#: what pandas calls the index of a DataFrame where it is written as a column
_INDEX_NAMES = frozenset({"", "index", "Unnamed: 0", "__index_level_0__"})


class NamedColumns:
    """The columns of a version that takes a table: as one input, or each that the model uses as an input of its own.

    `without_null`: names of those in which no value may be missing; `categories`: of those that have them.
    """

    def __init__(
        self,
        plans: InputPlans,
        names: Sequence[str],
        without_null: Collection[str] = (),
        categories: Mapping[str, ColumnCategories] = MappingProxyType({}),
    ) -> None:
        self.names = tuple(names)
        self._known = frozenset(names)
        self._plans = plans
        table = table_input(plans.signature, names)
        self._one = None if table is None else plans.named(table.name)
        self._without_null = frozenset(without_null)
        self._categories = {name: Categories(name, one) for name, one in categories.items()}
        #: whether some columns take the texts of their categories alone
        self.closed = any(one.closed for one in self._categories.values())
        self._needed = list(names) if self._one else [plan.name for plan in plans if not plan.optional]

    @classmethod
    def of(cls, manifest: Manifest, plans: InputPlans) -> NamedColumns | None:
        """Return the columns of a version; None if it was not made from a model of tables, or they have no names."""
        imported = manifest.imported
        if imported is None or not (names := column_names(manifest)):
            return None
        return cls(plans, names, imported.columns_without_null, imported.categories)

    def any_of(self, names: Collection[Any]) -> bool:
        """Whether one of the names is a column's."""
        return any(type(name) is str and self._own_name(name) in self._known for name in names)

    def _own_name(self, name: str) -> str:
        """Return the name as the model has it, perhaps with underscores for blanks, as LightGBM writes them."""
        return name if name in self._known else name.replace(" ", "_")

    def text_of_names(self) -> str:
        """Return the names of the columns for a message."""
        return listed(self.names)

    def check_names(self, names: Collection[str]) -> None:
        """Raise Failure(INVALID) for a column that is unknown or missing."""
        own = [self._own_name(name) for name in names]
        unknown = next((name for name, known in zip(names, own, strict=True) if known not in self._known), None)
        if unknown is not None:
            index = " (the index of a DataFrame is no column: leave it out)" if unknown in _INDEX_NAMES else ""
            question = did_you_mean(unknown, self.names)
            raise invalid(
                f"column '{excerpt(unknown)}' is unknown{index}{question}: the model's columns are "
                f"{self.text_of_names()}"
            )
        given = set(own)
        if len(given) < len(own):
            (twice, _), *_ = Counter(own).most_common(1)
            raise invalid(f"column '{excerpt(twice)}' is there twice")
        missing = next((name for name in self._needed if name not in given), None)
        if missing is not None:
            raise invalid(f"column '{excerpt(missing)}' is missing: the model's columns are {self.text_of_names()}")

    def are_header(self, cells: Sequence[str]) -> bool:
        """Whether the first line of a CSV has names of columns rather than values."""
        words = [cell for cell in cells if not _is_number(cell)]
        named = sum(self._own_name(cell) in self._known for cell in words)
        no_values = len(words) == len(cells) and all(words) and not any(map(self._takes_text, self.names))
        return no_values or 2 * named >= len(cells)

    def of_texts(self, header: Sequence[str], *lines: Sequence[str]) -> Inputs:
        """Return the inputs in a CSV, whose first line has the names. Raises Failure(INVALID)."""
        self.check_names(header)
        cells = zip(*lines, strict=True) if lines else [()] * len(header)
        return self.inputs({name: self._of_texts(name, texts) for name, texts in zip(header, cells, strict=True)})

    def _of_texts(self, name: str, texts: Sequence[str]) -> Values:
        """Return the values of a column of a CSV; an empty field is a missing value, as for pandas."""
        if self._takes_text(self._own_name(name)):
            return values_of(name, [text or None for text in texts])
        try:
            return values_of(name, [_number(text) for text in texts])
        except ValueError:
            at = next(at for at, text in enumerate(texts) if text.strip() and not _is_number(text))
            raise invalid(
                f"column '{excerpt(name)}' takes numbers, and has '{excerpt(texts[at])}' in row {at}"
            ) from None

    def _takes_text(self, name: str) -> bool:
        categories = self._categories.get(name)
        if categories is not None and categories.coded:
            return categories.text
        plan = self._one or self._plans.by_name.get(name)
        return plan is None or plan.datatype == BYTES

    def inputs(self, columns: Mapping[str, Values], *, named: bool = True) -> Inputs:
        """Return the inputs of the version. Raises Failure(INVALID), with the name of the column at fault.

        `named`: whether the caller named them; numbers in columns without names are the codes of categories.
        """
        self.check_names(columns)
        columns = {self._own_name(name): values for name, values in columns.items()}
        columns = {name: self._coded(name, values, named) for name, values in columns.items()}
        first = next(iter(columns))
        rows = len(columns[first])
        other = next((name for name, values in columns.items() if len(values) != rows), None)
        if other is not None:
            raise invalid(
                f"column '{excerpt(other)}' has {len(columns[other])} rows, and '{excerpt(first)}' has {rows}"
            )
        if self._one is None:
            plans = self._plans.by_name  # the model does not use the other columns
            given = {name: self._input(plans[name], values) for name, values in columns.items() if name in plans}
            return join(self._plans, given)
        ordered = [columns[name] for name in self.names]
        return join(self._plans, {self._one.name: self._table(self._one, ordered, rows)})

    def _coded(self, name: str, values: Values, named: bool) -> Values:
        """Return the codes of the values of a column of categories, else the values."""
        categories = self._categories.get(name)
        if categories is None or not categories.coded or not (named or isinstance(values, list)):
            return values
        return categories.codes(values)

    def check_texts(self, tensors: Sequence[InputTensor | None]) -> None:
        """Raise Failure(INVALID) for a text that is none of the categories of its column, where these are all."""
        for plan, tensor in zip(self._plans, tensors, strict=True):
            if plan.datatype != BYTES or tensor is None:
                continue
            names = self.names if self._one is not None else (plan.name,)
            texts = decode_elements(bytes(tensor.data))
            for at, name in enumerate(names):
                if (categories := self._categories.get(name)) is not None and categories.closed:
                    categories.check(texts[at :: len(names)])

    def _input(self, plan: InputPlan, values: Values) -> CheckedInput:
        shape = (len(values), *plan.shape[1:])
        if plan.datatype == BYTES:
            return _strings(plan, shape, self._texts(plan.name, values))
        return from_array(plan, self._numbers(plan, plan.name, values).reshape(shape))

    def _table(self, plan: InputPlan, columns: Sequence[Values], rows: int) -> CheckedInput:
        shape = (rows, len(columns))
        plan.fit(plan.datatype, shape)  # before the memory of the table is taken
        if plan.datatype == BYTES:
            texts = [self._texts(name, values) for name, values in zip(self.names, columns, strict=True)]
            return _strings(plan, shape, [text for row in zip(*texts, strict=True) for text in row])
        table = np.empty(shape, np.float32 if plan.datatype == "BF16" else NUMPY[plan.datatype])
        with np.errstate(over="ignore"):
            for at, (name, values) in enumerate(zip(self.names, columns, strict=True)):
                table[:, at] = self._numbers(plan, name, values)
        return from_array(plan, table)

    def _texts(self, name: str, values: Values) -> list[bytes]:
        if not isinstance(values, list):
            if not values.size:  # no row
                return []
            if values.dtype.kind == "f" and np.isnan(values).all():
                raise invalid(f"column '{excerpt(name)}' has null in row 0, where text is expected")
            raise invalid(f"column '{excerpt(name)}' takes text, and has {_kind(values)}")
        categories = self._categories.get(name)
        if categories is not None and categories.empty_is_missing:
            return [value or b"" for value in values]
        if None in values:
            raise invalid(f"column '{excerpt(name)}' has null in row {values.index(None)}, where text is expected")
        return [value for value in values if value is not None]

    def _numbers(self, plan: InputPlan, name: str, values: Values) -> np.ndarray[Any, Any]:
        """Return the values of a column as numbers of the kind that the input takes. Raises Failure(INVALID)."""
        if isinstance(values, list):
            raise invalid(f"column '{excerpt(name)}' takes {plan.datatype}, and has text")
        if name in self._without_null and values.dtype.kind == "f" and np.isnan(values).any():
            at = int(np.isnan(values).argmax())
            raise invalid(f"line {at} has null in column '{excerpt(name)}', which is of integers: give a number")
        if plan.datatype in FLOATS:
            return values
        fits = values.dtype.kind == "b" if plan.datatype == "BOOL" else values.dtype.kind in "biu"
        if not fits:
            at = int(np.isnan(values).argmax()) if values.dtype.kind == "f" and np.isnan(values).any() else -1
            has = f"null in row {at}" if at >= 0 else _kind(values)
            raise invalid(f"column '{excerpt(name)}' takes {plan.datatype}, and has {has}")
        if plan.datatype != "BOOL" and values.size:
            limits = np.iinfo(NUMPY[plan.datatype])
            if int(values.min()) < limits.min or int(values.max()) > limits.max:
                raise invalid(f"column '{excerpt(name)}': a number is out of the range of {plan.datatype}")
            return values.astype(NUMPY[plan.datatype])
        return values


def read_named(
    plans: InputPlans, values: Mapping[str, Any], read: Callable[[InputPlan, Any], CheckedInput] = from_lists
) -> Inputs:
    """Return the inputs that a JSON document gives by name: those of the version, or the columns of its table.

    `read`: reads the value of one of the version's own inputs. Raises Failure(INVALID).
    """
    try:
        return join(plans, {name: read(plans.named(name), value) for name, value in values.items()})
    except Failure as failure:
        columns = columns_given(plans, failure, values)
    columns.check_names(values)
    return columns.inputs({name: values_of(name, value) for name, value in values.items()})


def columns_given(plans: InputPlans, failure: Failure, names: Collection[Any]) -> NamedColumns:
    """Return the columns of the version if a request that its own inputs refused names any; else raise `failure`."""
    columns = plans.columns
    if columns is None or failure.code is not Code.INVALID or not columns.any_of(names):
        raise failure
    if any(type(name) is not str for name in names):
        raise failure
    return columns


def plans_of_columns(plans: InputPlans, columns: NamedColumns, given: Sequence[tuple[str, Any, Any]]) -> InputPlans:
    """Return plans for a request that gives each column as a tensor of its own, [n] or [n, 1], of any datatype.

    `given`: name, datatype and shape of each as the request has them; their elements are not checked yet. Raises
    Failure(INVALID): a column is unknown or missing.
    """
    specs = {
        name: TensorSpec(
            name=name,
            datatype=datatype if type(datatype) is str and datatype in DATATYPES else "FP32",
            shape=(-1, 1) if isinstance(shape, Sized) and len(shape) > 1 else (-1,),
        )
        for name, datatype, shape in given
    }
    columns.check_names(specs)
    signature = Signature(inputs=tuple(specs.values()), outputs=(), batching=plans.signature.batching)
    return InputPlans(plans.model, signature, plans.rows_max, plans.json_limits)


def from_columns(columns: NamedColumns, sent: InputPlans, tensors: Sequence[InputTensor]) -> Inputs:
    """Return the inputs of the version from tensors that were read with `plans_of_columns`. Raises Failure(INVALID)."""
    return columns.inputs(
        {plan.name: _values_of_tensor(plan.datatype, tensor) for plan, tensor in zip(sent, tensors, strict=True)}
    )


def _values_of_tensor(datatype: str, tensor: InputTensor) -> Values:
    if datatype == BYTES:
        return list(decode_elements(bytes(tensor.data)))
    array = np.frombuffer(tensor.data, NUMPY[datatype])
    return as_numbers(OutputTensor(datatype, array.shape, array))


def values_of(name: str, cells: object) -> Values:
    """Return the values of a column from JSON: a list of numbers, booleans and nulls, or of strings and nulls.

    Each may be in a list of its own, as in a matrix of one column. Raises Failure(INVALID).
    """
    if type(cells) is NumberList and not cells.leading_ones:
        return np.concatenate([_numbers_of(name, _alone(piece)) for piece in cells.rows()])
    if type(cells) is not list:
        raise invalid(f"column '{excerpt(name)}' is a list with a value for each row")
    cells = _alone(cells)
    if set(map(type, cells)) <= _NUMBERS:
        return _numbers_of(name, cells)
    spec = TensorSpec(name=name, datatype=BYTES, shape=(-1,))
    texts = from_lists(InputPlan("", 0, spec, False, 0), ["" if cell is None else cell for cell in cells])
    elements = decode_elements(bytes(texts.tensor.data))
    return [None if cell is None else element for cell, element in zip(cells, elements, strict=True)]


def _alone(cells: list[Any]) -> list[Any]:
    """Return the cells without the list around each, if every one has a list of its own."""
    return [cell[0] for cell in cells] if all(type(cell) is list and len(cell) == 1 for cell in cells) else cells


def _number(text: str) -> float | None:
    """Return the number or boolean in a field of a CSV, None if it is empty. Raises ValueError."""
    word = text.strip().lower()
    if not word:
        return None
    if word in {"true", "false"}:
        return word == "true"
    if "_" in word:  # an underscore between digits is Python's notation, not CSV's
        raise ValueError
    try:
        return int(word)
    except ValueError:
        return float(word)


def _is_number(text: str) -> bool:
    try:
        return _number(text) is not None
    except ValueError:
        return False


def _numbers_of(name: str, cells: list[Any]) -> np.ndarray[Any, Any]:
    numbers = np.array([np.nan if cell is None else cell for cell in cells]) if None in cells else np.array(cells)
    if numbers.dtype.kind not in "biuf":
        raise invalid(f"column '{excerpt(name)}' has a number that is out of every range")
    return numbers


def _kind(values: Values) -> str:
    if isinstance(values, list):
        return "text"
    return {"b": "booleans", "f": "numbers with fractions"}.get(values.dtype.kind, "whole numbers")


def _strings(plan: InputPlan, shape: tuple[int, ...], texts: list[bytes]) -> CheckedInput:
    raw = encode_elements(texts)
    extent = plan.fit(BYTES, shape)
    return CheckedInput(extent, InputTensor(extent.shape, raw, len(raw)))
