"""The two backends that run functions of JAX, as cases of the contract of all backends."""

from __future__ import annotations

from millstream.services.model.datatypes import NUMPY
from tests.contract.backend_cases import Case
from tests.kit import jax_models


def _case(name: str) -> Case:
    """Return the case of a backend; none of them ends a run, and their threads, if any, are those of the process."""
    return Case(
        name,
        lambda folder, datatype: jax_models.identity(folder / "identity.jax", datatype),
        tuple(NUMPY),
        weighty=lambda folder, size_bytes: jax_models.weighty(folder / "weighty.jax", size_bytes),
        threads=False,
    )


JAX, IREE = _case("jax"), _case("iree")
