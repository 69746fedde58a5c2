"""Imports JAX, and loads and runs functions that jax.export serialized, for workers and the model check.

file ─> header ─> jax.export.deserialize ─> operators on the list? ─> inputs and outputs by name
shapes ─> XLA compiles for them, on the CPU ─> kept, up to PROGRAMS_MAX ─> arrays in, arrays out

A serialized function can name code of the process that loads it (custom calls, with addresses): those that do no harm
are on a list, all others are refused before anything is compiled.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from millstream.plugins.engines.jax.document import read_header
from millstream.services.environment import set_xla_threads
from millstream.services.errors import invalid

Array = np.ndarray[Any, Any]

#: programs of one instance that are kept, one for each combination of input shapes; beyond, that used longest ago goes
PROGRAMS_MAX = 32
#: custom calls that XLA itself expands, and those of jaxlib that compute on their operands alone
_HARMLESS = re.compile(
    r"shape_assertion|Sharding|SPMD(?:FullToShard|ShardToFull)Shape|annotate_device_placement|AllocateBuffer"
    r"|stablehlo\.dynamic_(?:reduce_window|rng_bit_generator|top_k|approx_top_k)|ApproxTopK|mhlo\.(?:topk|erf)|TopK"
    r"|Qr|LuDecomposition|Eigh|ProductOfElementaryHouseholderReflectors|lapack_[a-z0-9]+_ffi"
)
#: operators that wait for another process
_REFUSED = frozenset({"stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send", "stablehlo.recv"})
_DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "bfloat16": "BF16", "float32": "FP32",
    "float64": "FP64",
}  # fmt: skip
_ARGUMENT = re.compile(r"loc\(\"([A-Za-z_]\w*)")


class Library(NamedTuple):
    """The parts of JAX that are used: `ir` and `dialects` read StableHLO."""

    jax: Any
    export: Any
    ir: Any
    dialects: tuple[ModuleType, ...]

    def refine(self, module: Any) -> str:
        """Return the text of a module of StableHLO in which all sizes are fixed, as XLA makes it before it compiles.

        JAX has no public function for this. Raises ValueError, and AttributeError in a JAX that does it otherwise.
        """
        from jax._src.interpreters import mlir

        return str(mlir.refine_polymorphic_shapes(module).operation.get_asm(binary=False))

    @property
    def version(self) -> str:
        return str(self.jax.__version__)


def load_library(threads: int | None = None) -> Library:
    """Return JAX. Raises ImportError.

    Args:
        threads: of XLA's thread pool, which the process has one of: the first number counts. None: only import it.
    """
    if threads is not None:
        set_xla_threads(threads)
    return _load()


@cache
def _load() -> Library:
    import jax
    from jax import export
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo

    jax.config.update("jax_platforms", "cpu")  # else it looks for accelerators
    jax.config.update("jax_enable_x64", True)  # else 64-bit inputs become 32-bit ones
    return Library(jax, export, ir, (stablehlo, sdy, chlo, mhlo))


class ProgramTensor(NamedTuple):
    """An input or output. `dims`: a number, or the expression of a variable size."""

    name: str
    datatype: str
    dims: tuple[int | str, ...]


class JaxProgram:
    """A loaded function. `fast_math` lets XLA reorder sums and assume that there is neither NaN nor infinity.

    Raises Failure(INVALID) for a file that is refused, and what JAX raises.
    """

    def __init__(self, library: Library, path: Path, *, fast_math: bool = False) -> None:
        read_header(path)
        try:
            exported = library.export.deserialize(bytearray(path.read_bytes()))
        except (OSError, MemoryError):
            raise
        except Exception as error:  # of FlatBuffers, or of a version that JAX does not know
            raise invalid(
                f"JAX {library.version} cannot read the exported function "
                f"({' '.join(str(error).split())[:300] or type(error).__name__}): export it with this version or one "
                "up to 6 months older"
            ) from error
        self.library = library
        self._jax = library.jax
        self.exported = exported
        arguments = _check_module(library, exported)
        self.inputs = _inputs(library.jax, exported, arguments)
        self.outputs = _outputs(library.jax, exported)
        names = [tensor.name for tensor in self.inputs]
        if len(set(names)) < len(names):
            raise invalid("two inputs of the function have the same name: give its arguments names of their own")
        self._options = {"xla_cpu_enable_fast_math": True} if fast_math else {}
        self._programs: OrderedDict[tuple[tuple[int, ...], ...], Any] = OrderedDict()

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return all outputs, both in order; BF16 is its bits in uint16. Compiles for shapes that are new.

        The arrays that are returned are copies. Raises what JAX raises.
        """
        given = [
            np.asarray(array).view(aval.dtype) if tensor.datatype == "BF16" else np.asarray(array)
            for array, tensor, aval in zip(arrays, self.inputs, self.exported.in_avals, strict=True)
        ]
        program = self._program(tuple(array.shape for array in given))
        positional, by_name = self._jax.tree_util.tree_unflatten(self.exported.in_tree, given)
        found = self._jax.tree_util.tree_leaves(program(*positional, **by_name))
        return [
            np.array(value).view(np.uint16) if tensor.datatype == "BF16" else np.array(value)
            for value, tensor in zip(found, self.outputs, strict=True)
        ]

    def _program(self, shapes: tuple[tuple[int, ...], ...]) -> Any:
        program = self._programs.get(shapes)
        if program is None:
            specs = [
                self._jax.ShapeDtypeStruct(shape, aval.dtype)
                for shape, aval in zip(shapes, self.exported.in_avals, strict=True)
            ]
            positional, by_name = self._jax.tree_util.tree_unflatten(self.exported.in_tree, specs)
            program = self._jax.jit(self.exported.call).lower(*positional, **by_name)
            program = program.compile(compiler_options=self._options)
            self._programs[shapes] = program
            if len(self._programs) > PROGRAMS_MAX:
                self._programs.popitem(last=False)
        self._programs.move_to_end(shapes)
        return program

    def close(self) -> None:
        """Free the programs, also those in JAX's own caches."""
        self._programs.clear()
        self._jax.clear_caches()


def _check_module(library: Library, exported: Any) -> list[str]:
    """Return the names of the program's arguments ("": unknown). Raises Failure(INVALID) for what may not run."""
    ir = library.ir
    stablehlo, sdy, chlo, mhlo = library.dialects
    context = ir.Context()
    for dialect in (stablehlo, sdy, chlo):
        dialect.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    try:
        module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
    except Exception as error:
        raise invalid(
            f"JAX {library.version} cannot read the StableHLO of the function: it is damaged, or was exported with a "
            "JAX that is newer"
        ) from error
    refused: list[str] = []

    def visit(operation: Any) -> Any:
        name = operation.name
        if name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if not _HARMLESS.fullmatch(target):
                refused.append(f"calls {target[:80]!a}, which is not on the list of harmless custom calls")
        elif name in _REFUSED:
            refused.append(f"has the operator {name}, which waits for another process")
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if refused:
        raise invalid(f"the function {refused[0]}: export it without")
    return _argument_names(module, len(exported.module_kept_var_idx))


def _argument_names(module: Any, kept: int) -> list[str]:
    """Return the names of the last `kept` arguments: of the function within, where sizes are variable."""
    functions = {op.name.value: op for op in module.body.operations if op.operation.name == "func.func"}
    function = functions.get("_wrapped_jax_export_main") or functions.get("main")
    if function is None:
        return []
    arguments = list(function.arguments)
    found = [_ARGUMENT.match(str(argument.location)) for argument in arguments[len(arguments) - kept :]]
    return [match[1] if match else "" for match in found]


def _inputs(jax: Any, exported: Any, arguments: Sequence[str]) -> tuple[ProgramTensor, ...]:
    """Return the inputs: named as the function's arguments, and with the keys that lead to a part of one."""
    top_names: dict[int, str] = dict(zip(exported.module_kept_var_idx, arguments, strict=False))
    places = range(len(exported.in_avals))
    tree = jax.tree_util.tree_unflatten(exported.in_tree, list(places))
    paths = [[_key(key) for key in path] for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    alone = len({tuple(path[:2]) for path in paths}) == 1  # one argument, whose parts need no prefix
    names = []
    for place, (kind, top, *keys) in zip(places, paths, strict=True):
        first = top_names.get(place) or f"arg_{top}" if kind == "0" else top
        names.append(".".join(keys if alone and keys else [first, *keys]))
    return tuple(_tensor(name, aval) for name, aval in zip(names, exported.in_avals, strict=True))


def _outputs(jax: Any, exported: Any) -> tuple[ProgramTensor, ...]:
    """Return the outputs: "output_0", … or the keys of the dictionary that the function returns."""
    tree = jax.tree_util.tree_unflatten(exported.out_tree, list(range(len(exported.out_avals))))
    names = []
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = [_key(key) for key in path] or ["0"]
        names.append(".".join([f"output_{keys[0]}" if keys[0].isdigit() else keys[0], *keys[1:]]))
    return tuple(_tensor(name, aval) for name, aval in zip(names, exported.out_avals, strict=True))


def _key(key: Any) -> str:
    return str(key.key if hasattr(key, "key") else key.idx)


def _tensor(name: str, aval: Any) -> ProgramTensor:
    datatype = _DATATYPES.get(str(aval.dtype))
    if datatype is None:
        raise invalid(f"tensor {name[:80]!r} has elements of type {aval.dtype}, which v2 cannot carry")
    return ProgramTensor(name, datatype, tuple(dim if isinstance(dim, int) else str(dim) for dim in aval.shape))
