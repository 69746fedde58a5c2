"""Models of Triton's Python backend, in repositories in place and in uploads: the plug-in functions runs them.

config.pbtxt, 1/model.py ─> auto_complete_config, in a confined process ─> the completed configuration ─> signature
Recognition runs in the command line, too: with the standard library alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.services.errors import invalid
from millstream.services.ingest.importers import Importer, ImportOptions, Members, Source
from millstream.services.plugin.registry import is_on

if TYPE_CHECKING:
    from millstream.plugins.compat.triton.config.config import ParsedConfig
    from millstream.services.ingest.report import CheckedModel, Recognised, Served
    from millstream.services.model.signature import TensorSpec
    from millstream.services.settings import Settings

FILE = "model.py"
_CONFIG = "config.pbtxt"
_BYTES_MAX = 1 << 20
_BACKEND = re.compile(rb"""^\s*backend\s*:\s*["']python["']""", re.MULTILINE)
_CLASS = re.compile(rb"^class[ \t]+TritonPythonModel\b", re.MULTILINE)


def is_python_model(served: str) -> bool:
    """Return whether the file that a version is served from is of the Python backend."""
    return served.endswith(".py")


async def checked_python(
    folder: Path, served: str, model: str, parsed: ParsedConfig, settings: Settings
) -> tuple[CheckedModel, ParsedConfig]:
    """Return how the file at `served` below `folder` is served, and its configuration, completed by itself.

    Raises Failure: INVALID, UNAVAILABLE if no process can be started.
    """
    from millstream.plugins.compat.triton.config.config import empty_config, from_document
    from millstream.plugins.compat.triton.config.effective_config import complete_document
    from millstream.plugins.compat.triton.config.unsupported_fields import refuse, unsupported
    from millstream.plugins.functions.interface import TRITON_FORMAT, completed
    from millstream.services.ingest.report import CheckedModel
    from millstream.services.model.manifest import Batching
    from millstream.services.model.signature import Signature

    message = empty_config().message
    message.CopyFrom(parsed.message)
    message.name, message.backend = model, "python"
    message.default_model_filename = Path(served).name
    if not message.instance_group:
        message.instance_group.add(name=f"{model}_0", kind=2, count=1)
    refuse(unsupported(message))
    root = (folder / served).parents[1]
    below = root.relative_to(folder)
    found = await completed(root, str(Path(served).relative_to(below)), complete_document(message), settings)
    after = from_document(found.config)
    refuse(unsupported(after.message))
    batching = after.message.max_batch_size > 0
    signature = Signature(
        inputs=tuple(_spec(one, "input", batching=batching) for one in after.message.input),
        outputs=tuple(_spec(one, "output", batching=batching) for one in after.message.output),
        batching=batching,
    )
    if not signature.outputs:
        raise invalid(f"the model has no output: list them in {_CONFIG}, or have auto_complete_config add them")
    checked = CheckedModel(
        served=served,
        files=tuple(str(below / file) for file in found.files),
        sources=(served,),
        signature=signature,
        opset=0,
        ir_version=0,
        producer=found.producer,
        batching=Batching(decided="requested" if batching else "off", reason="the configuration says so"),
        notes=(),
        source_format=TRITON_FORMAT,
    )
    return checked.model_copy(update={"options": found.options}), after


def has_files(folder: Path, served: str, known: Collection[str]) -> bool:
    """Return whether the files of a version are `known` ones. Raises Failure(INVALID), OSError."""
    from millstream.plugins.functions.interface import files_of

    root = (folder / served).parents[1]
    below = root.relative_to(folder)
    return {str(below / file) for file in files_of(root, str(Path(served).relative_to(below)))} <= set(known)


def _spec(tensor: Any, what: str, *, batching: bool) -> TensorSpec:
    """Return a tensor as the file has it: what the configuration says of it is all that is known."""
    from millstream.plugins.compat.triton.config.config import datatype_of
    from millstream.services.model.signature import TensorSpec

    dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
    return TensorSpec(
        name=tensor.name,
        datatype=datatype_of(tensor.data_type, f"{what} {tensor.name[:80]!r}"),
        shape=(*((-1,) if batching else ()), *dims),
        optional=what == "input" and tensor.optional,
    )


class PythonModelImporter(Importer):
    """Serves a model's folder of the Python backend that was uploaded."""

    name = "Triton's Python backend"
    described = True
    runs_code = True
    marks = frozenset({_CONFIG, "1"})

    def recognises(self, source: Source) -> bool:
        path = source.path
        if not (path.is_dir() and is_on("functions")):
            return False
        files = _files(path)
        if (path / _CONFIG).is_file():
            return bool(files) and bool(_BACKEND.search(_head(path / _CONFIG)))
        return any(_CLASS.search(_head(file)) for file in files)

    def members(self, folder: Path) -> Members:
        names = (one.relative_to(folder) for one in folder.rglob("*"))
        others = [file.parent.name for file in _files(folder)[:-1]]
        notes = (f"Version {others[-1]} and those before it are not served: push each by itself.",) if others else ()
        kept = [name for name in names if "__pycache__" not in name.parts and name.parts[0] not in others]
        return Members([escape(str(name)) for name in kept], notes)

    async def run(self, folder: Path, recognised: Recognised, options: ImportOptions, settings: Settings) -> Served:
        from millstream.plugins.compat.triton.config.model_folder import check_config, read_config, referenced_files
        from millstream.plugins.compat.triton.config.to_model_config import to_model_config
        from millstream.plugins.compat.triton.config.to_signature import client_signature
        from millstream.services.ingest.report import Served

        root = folder / recognised.path
        parsed = read_config(root)
        model = parsed.message.name or "model"
        check_config(parsed, model)
        file = _files(root)[-1]
        checked, after = await checked_python(folder, str(file.relative_to(folder)), model, parsed, settings)
        signature = client_signature(after, checked.signature, ())
        translated = to_model_config(after, signature)
        if referenced_files(translated.config):
            raise invalid("labels and files of a warm-up are read in a repository in place alone: serve it there")
        checked = checked.model_copy(update={"signature": signature, "notes": translated.notes})
        return Served(checked, translated.config, parsed.document())


def _files(folder: Path) -> Sequence[Path]:
    """Return the files of the versions in a model's folder, the highest last."""
    found = [path for path in folder.glob(f"*/{FILE}") if path.parent.name.isdecimal() and path.is_file()]
    return sorted(found, key=lambda path: int(path.parent.name))


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_BYTES_MAX)
