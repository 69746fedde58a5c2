"""Wraps an instance whose model has other shapes than its clients see: the same elements, in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature, TensorSpec
from millstream.workers.backends.base import Array, Instance


class Reshaped:
    """An instance with the shapes of `signature`. Variable dimensions correspond in their order."""

    def __init__(self, instance: Instance, signature: Signature) -> None:
        self._instance = instance
        self._batching = signature.batching
        self._inputs = {spec.name: spec for spec in signature.inputs if spec.model_shape is not None}
        self._outputs = signature.outputs

    @property
    def size_bytes(self) -> int:
        return self._instance.size_bytes

    @property
    def lost(self) -> str:
        return self._instance.lost

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        feed = {name: self._to_model(self._inputs.get(name), array) for name, array in inputs.items()}
        outputs = self._instance.run(feed)
        return [
            array if spec.model_shape is None else self._to_client(spec, array)
            for spec, array in zip(self._outputs, outputs, strict=True)
        ]

    def _to_model(self, spec: TensorSpec | None, array: Array) -> Array:
        if spec is None or spec.model_shape is None:
            return array
        return _reshape(array, self._client_shape(spec), spec.model_shape, self._batching)

    def _to_client(self, spec: TensorSpec, array: Array) -> Array:
        assert spec.model_shape is not None
        try:
            return _reshape(array, spec.model_shape, self._client_shape(spec), self._batching)
        except (ValueError, IndexError) as error:
            raise Failure(
                Code.MODEL, f"output {spec.name!r} has the shape {list(array.shape)}, which is not {list(spec.shape)}"
            ) from error

    def _client_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Return the shape that clients see, without rows."""
        return spec.shape[1:] if self._batching else spec.shape

    def limit(self, seconds: float) -> None:
        """Pass on the limit of the next run, to an instance that forwards its runs."""
        forwarding: Any = self._instance
        forwarding.limit(seconds)

    def terminate(self) -> None:
        self._instance.terminate()

    def rebuild(self) -> None:
        self._instance.rebuild()

    def close(self) -> None:
        self._instance.close()


def _reshape(array: Array, current: tuple[int, ...], target: tuple[int, ...], batching: bool) -> Array:
    """Reshape from `current` to `target`, which do not include rows and have -1 for variable dimensions.

    Raises ValueError.
    """
    rows = array.shape[:1] if batching else ()
    inner = array.shape[len(rows) :]
    if len(inner) != len(current):
        raise ValueError(f"{len(inner)} dimensions instead of {len(current)}")
    sizes = iter([size for size, dim in zip(inner, current, strict=True) if dim == -1])
    return array.reshape((*rows, *(next(sizes) if dim == -1 else dim for dim in target)))
