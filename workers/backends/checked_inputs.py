"""Checks the inputs of a run against the signature, for libraries that would convert them or use those of the last run.

A batch is checked by its gateway already; this is what keeps a defect from becoming a wrong answer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES, NUMPY
from millstream.services.model.signature import Signature, TensorSpec
from millstream.workers.backends.base import Array

_OBJECT = np.dtype(object)


class CheckedInputs:
    """The inputs of a signature. `library` begins the messages."""

    def __init__(self, library: str, signature: Signature) -> None:
        self._library = library
        self._specs = {spec.name: spec for spec in signature.inputs}
        self._dtypes = {
            spec.name: _OBJECT if spec.datatype == BYTES else NUMPY[spec.datatype] for spec in signature.inputs
        }
        self._required = [spec.name for spec in signature.inputs if not spec.optional]

    def check(self, inputs: Mapping[str, Array]) -> None:
        """Raise Failure(MODEL) if an input is missing, unknown, or has another datatype, rank or fixed dimension."""
        missing = [name for name in self._required if name not in inputs]
        if missing:
            raise Failure(Code.MODEL, f"{self._library}: required inputs {missing} are missing")
        for name, array in inputs.items():
            spec = self._specs.get(name)
            if spec is None:
                raise Failure(Code.MODEL, f"{self._library}: the model has no input {name!r}")
            if array.dtype != self._dtypes[name] or not _fits(spec, array):
                raise Failure(
                    Code.MODEL,
                    f"{self._library}: input {name!r} is {spec.datatype} {list(spec.shape)}, not {array.dtype} "
                    f"{list(array.shape)}",
                )


def _fits(spec: TensorSpec, array: Array) -> bool:
    if spec.model_shape is not None:  # the caller has reshaped it for the model
        return True
    return array.ndim == len(spec.shape) and all(
        dim in {-1, size} for dim, size in zip(spec.shape, array.shape, strict=True)
    )
