"""Values of a column of categories -> the codes with which the model was fitted. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.gateway.tensors.json_document import excerpt
from millstream.services.errors import Failure, invalid
from millstream.services.model.manifest import ColumnCategories
from millstream.services.nearest_names import did_you_mean

#: the values of a column: numbers and booleans as an array, or text, in which None is a missing value
Values = np.ndarray[Any, Any] | list[bytes | None]

_EXACT = 2**53  # floating point does not tell all whole numbers beyond it apart
_SHOWN_MAX = 40  # names or categories in a message


class Categories:
    """The categories of a column, as the version's manifest has them.

    Attributes:
        coded: the model takes codes in their place.
        text: they are texts, or not known.
        closed: the model takes the texts, and no other.
        empty_is_missing: an empty text is a missing value.
    """

    def __init__(self, name: str, categories: ColumnCategories) -> None:
        self.coded = categories.coded
        self.closed = categories.unseen == "refused" and not categories.coded
        self.empty_is_missing = categories.empty_is_missing
        self.text = not categories.values or any(isinstance(value, str) for value in categories.values)
        self._name = excerpt(name)
        self._large = any(isinstance(value, int) and abs(value) > _EXACT for value in categories.values)
        self._unseen = categories.unseen
        self._values = categories.values
        self._codes: dict[Any, int] = {
            value.encode() if isinstance(value, str) else value: code for code, value in enumerate(categories.values)
        }

    def codes(self, values: Values) -> np.ndarray[Any, Any]:
        """Return the code of each value, NaN for a missing one. Raises Failure(INVALID)."""
        if not self._values:
            raise invalid(
                f"the model's file does not say the categories of column '{self._name}': send rows without names, in "
                "which categories are numbers, as when it was fitted"
            )
        cells: list[Any] = values if isinstance(values, list) else values.tolist()
        self._check_kind(cells, is_text=isinstance(values, list))
        if self._large and not isinstance(values, list) and values.dtype.kind == "f" and (abs(values) > _EXACT).any():
            raise invalid(
                f"column '{self._name}' has whole numbers beyond 2^53 as floating point: send them as integers"
            )
        codes = [self._codes.get(cell) for cell in cells]
        numbers = [
            code if code is not None else self._missing(cell, at)
            for at, (cell, code) in enumerate(zip(cells, codes, strict=True))
        ]
        return np.array(numbers, np.float64)

    def check(self, texts: Sequence[bytes]) -> None:
        """Raise Failure(INVALID) for a text that is no category."""
        for at, text in enumerate(texts):
            if text not in self._codes and (text or not self.empty_is_missing):
                raise self._no_category(text, at)

    def _check_kind(self, cells: list[Any], *, is_text: bool) -> None:
        """Raise Failure(INVALID) for numbers where all categories are texts, and the other way round."""
        if any(isinstance(value, str) == is_text for value in self._values):
            return
        if any(not _is_missing(cell) for cell in cells):
            has = "text" if is_text else "numbers"
            known = listed([str(value) for value in self._values])
            raise invalid(f"column '{self._name}' takes its categories {known}, and has {has}")

    def _missing(self, cell: Any, at: int) -> float:
        """Return the code of a value that is no category. Raises Failure(INVALID)."""
        if _is_missing(cell) or cell == b"" or self._unseen == "missing":
            return np.nan
        raise self._no_category(cell, at)

    def _no_category(self, cell: Any, at: int) -> Failure:
        text = cell.decode(errors="replace") if isinstance(cell, bytes) else f"{cell:g}"
        known = [str(value) for value in self._values]
        return invalid(
            f"column '{self._name}' has '{excerpt(text)}' in row {at}, a category that the model was not fitted "
            f"with{did_you_mean(text, known)}: it has {listed(known)}"
        )


def _is_missing(cell: Any) -> bool:
    return cell is None or cell != cell  # noqa: PLR0124 - NaN


def listed(names: Sequence[str]) -> str:
    """Return names for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    return excerpt(", ".join(names[:_SHOWN_MAX])) + more
