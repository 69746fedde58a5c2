"""Writes the StableHLO of an exported function for other compilers: with variable sizes, or for a number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millstream.plugins.engines.jax.jax_program import JaxProgram
from millstream.services.errors import invalid


def write_stablehlo(program: JaxProgram, path: Path, rows: int | None = None) -> None:
    """Write MLIR that a compiler reads: with `rows` in the first dimension of every input, or as it was exported.

    Raises Failure(INVALID) if other sizes than that of rows are variable.
    """
    exported, jax = program.exported, program.library.jax
    if rows is None:
        path.write_bytes(exported.mlir_module_serialized)
        return
    specs = [jax.ShapeDtypeStruct(_shape(aval.shape, rows), aval.dtype) for aval in exported.in_avals]
    positional, by_name = jax.tree_util.tree_unflatten(exported.in_tree, specs)
    lowered = jax.jit(exported.call).lower(*positional, **by_name)
    path.write_text(program.library.refine(lowered.compiler_ir("stablehlo")))


def _shape(dims: Any, rows: int) -> tuple[int, ...]:
    if any(not isinstance(dim, int) for dim in dims[1:]):
        raise invalid("the function has variable sizes besides the number of rows")
    return (rows, *dims[1:])
