"""What the check makes of a function that its importer tried already: nothing is run here."""

from __future__ import annotations

from pathlib import Path

from millstream.plugins.functions.document import FORMAT, FunctionDocument, is_document, read_document
from millstream.services.errors import invalid
from millstream.services.ingest.report import CheckedModel, CheckTask
from millstream.services.model.manifest import ImportRecord

__all__ = ["inspect", "is_document"]


def inspect(task: CheckTask, path: Path) -> CheckedModel:
    """Return how the function is served. Raises Failure(INVALID)."""
    try:
        document = read_document(path)
    except (OSError, ValueError) as error:
        raise invalid(f"the function cannot be read: {error}") from error
    served = str(path.relative_to(task.folder))
    return CheckedModel(
        served=served,
        files=(served, document.file, *([document.lock] if document.lock else [])),
        sources=(document.file,),
        signature=document.signature,
        opset=0,
        ir_version=0,
        producer=document.producer,
        batching=document.batching,
        notes=document.notes,
        trial=document.trial,
        source_format=FORMAT,
        streams=document.streams,
        imported=_record(document) if document.adapter else None,
    )


def _record(document: FunctionDocument) -> ImportRecord:
    """Return what says where a version comes from. Nothing was converted, so no rows were compared."""
    return ImportRecord(
        importer=document.importer,
        producer=document.producer,
        columns=document.columns,
        rtol=0,
        atol=0,
        rows=0,
        output="",
        difference=0,
    )
