"""Runs a session with inputs and outputs in memory of its device, which is kept from run to run.

numpy ─> device buffers (kept for each shape) ─> run_with_iobinding ─> output buffers (kept) ─> numpy

Without it ONNX Runtime allocates device memory for every input and output of every run. With CUDA graphs it is needed:
a graph is recorded with addresses. For devices only: on a CPU the copies would be pure loss.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from millstream.services.model.datatypes import NUMPY
from millstream.services.model.signature import Signature
from millstream.workers.backends.base import Array

SHAPES_MAX = 16  # combinations of input shapes whose buffers are kept; beyond, the one used longest ago is freed

Shapes = tuple[tuple[int, ...], ...]


class Buffers(NamedTuple):
    """Memory on the device for one combination of input shapes."""

    binding: Any
    inputs: dict[str, Any]
    outputs: list[Any]  # empty until the first run, whose outputs show their shapes
    graph: int  # its CUDA graph


class DeviceBuffers:
    """The buffers of one session. Not thread-safe.

    Args:
        kind: "cuda", or "cpu" in tests.
        graphs: whether the session records CUDA graphs, one for each combination of shapes.
    """

    def __init__(
        self, runtime: Any, session: Any, signature: Signature, kind: str, number: int, *, graphs: bool = False
    ) -> None:
        self._runtime = runtime
        self._session = session
        self._kind, self._number = kind, number
        self._graphs = graphs
        self._graph_next = 1  # 0 is the default graph, -1 none
        self._chosen: tuple[Any, int] | None = None  # the options of the last run, and the graph that they name
        self._inputs = [(spec.name, NUMPY[spec.datatype]) for spec in signature.inputs]
        self._outputs = [spec.name for spec in signature.outputs]
        fixed_from = 1 if signature.batching else 0
        #: Else the shapes of outputs may depend on values, and their memory is allocated for each run.
        self._keep_outputs = all(-1 not in spec.shape[fixed_from:] for spec in signature.outputs)
        self._known: OrderedDict[Shapes, Buffers] = OrderedDict()

    def takes(self, inputs: Mapping[str, Array]) -> bool:
        """Return whether a run can use buffers: no input is left out, unknown, empty or of another datatype."""
        return len(inputs) == len(self._inputs) and all(
            name in inputs and inputs[name].size and inputs[name].dtype == dtype for name, dtype in self._inputs
        )

    def run(self, inputs: Mapping[str, Array], options: Any) -> Sequence[Array]:
        """Run once with inputs that `takes` accepts. Raises what the library raises."""
        shapes = tuple(inputs[name].shape for name, _ in self._inputs)
        buffers = self._known.get(shapes)
        if buffers is None:
            buffers = self._allocate(shapes)
        else:
            self._known.move_to_end(shapes)
        for name, value in buffers.inputs.items():
            value.update_inplace(np.ascontiguousarray(inputs[name]))
        options = options or self._runtime.RunOptions()
        if self._graphs:
            self._choose_graph(options, buffers.graph if buffers.outputs else -1)
        if not buffers.outputs:
            return self._run_first(buffers, options)
        self._session.run_with_iobinding(buffers.binding, options)
        buffers.binding.synchronize_outputs()
        return [np.array(value.numpy()) for value in buffers.outputs]

    def _choose_graph(self, options: Any, graph: int) -> None:
        """Let the next run record or replay a graph. ONNX Runtime logs a line whenever an entry is written again."""
        if self._chosen != (options, graph):
            options.add_run_config_entry("gpu_graph_id", str(graph))
            self._chosen = (options, graph)

    def _allocate(self, shapes: Shapes) -> Buffers:
        binding = self._session.io_binding()
        inputs = {}
        for (name, dtype), shape in zip(self._inputs, shapes, strict=True):
            value = self._runtime.OrtValue.ortvalue_from_shape_and_type(shape, dtype, self._kind, self._number)
            binding.bind_ortvalue_input(name, value)
            inputs[name] = value
        self._bind_outputs(binding)
        buffers = Buffers(binding, inputs, [], self._graph_next)
        self._graph_next += 1
        self._known[shapes] = buffers
        if len(self._known) > SHAPES_MAX:
            self._known.popitem(last=False)
        return buffers

    def _bind_outputs(self, binding: Any) -> None:
        """Let the library allocate the outputs of the next run on the device."""
        for name in self._outputs:
            binding.bind_output(name, self._kind, self._number)

    def _run_first(self, buffers: Buffers, options: Any) -> list[Array]:
        """Run with outputs that the library allocates, and keep these for the next runs of the same shapes.

        No graph (-1) is recorded: the addresses are not yet final.
        """
        self._session.run_with_iobinding(buffers.binding, options)
        buffers.binding.synchronize_outputs()
        values = buffers.binding.get_outputs()
        found = [np.array(value.numpy()) for value in values]
        if not self._keep_outputs:
            # Else the binding keeps these outputs, and a run whose outputs have other shapes fails.
            buffers.binding.clear_binding_outputs()
            self._bind_outputs(buffers.binding)
            return found
        buffers.outputs.extend(values)
        for name, value in zip(self._outputs, values, strict=True):
            buffers.binding.bind_ortvalue_output(name, value)
        return found

    def close(self) -> None:
        """Free all buffers."""
        self._known.clear()
