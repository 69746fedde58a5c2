"""Inspects a function that jax.export serialized: first what its file says, without JAX, then trial runs.

header ─> refuse what may not run ─> inputs and outputs ─> trials (ingest.inspection)

Imported by the checker process only. It needs JAX where the gateway runs, as programs of PyTorch need PyTorch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from millstream.plugins.engines.jax.document import FORMAT, read_header
from millstream.plugins.engines.jax.jax_program import JaxProgram, Library, load_library
from millstream.services.errors import invalid
from millstream.services.ingest.inspection import inspect_program
from millstream.services.ingest.model_io import ModelTensor
from millstream.services.ingest.report import CheckedModel, CheckTask
from millstream.services.ingest.trial_session import TrialProgram


def inspect(task: CheckTask, path: Path) -> CheckedModel:
    """Check the function at `path` and return how it is served. Raises Failure(INVALID)."""
    header = read_header(path)
    library = _import_jax(task.folder)
    function = JaxProgram(library, path)
    program = TrialProgram(
        kind="the function",
        inputs=[ModelTensor(*tensor) for tensor in function.inputs],
        outputs=[ModelTensor(*tensor) for tensor in function.outputs],
        run=function.run,
        unproven="programs of StableHLO are not analysed",
        source_format=FORMAT,
        producer=f"jax.export, read by JAX {library.version}",
        version=header.version,
    )
    return inspect_program(task, path, program)


def _import_jax(folder: Path) -> Library:
    """Return JAX, imported inside the sandbox. Raises Failure(INVALID) with what to install if it is not there."""
    tempfile.tempdir = str(folder)
    try:
        return load_library(1)
    except ImportError as error:
        raise invalid(
            f"an exported function is checked with JAX, which the gateway does not have ({error}): install "
            "millstream[jax] where the gateway runs"
        ) from error
