"""Imports JAX for the CPU, for workers and the model check: the only module that does."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from millstream.services.environment import set_xla_threads


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
