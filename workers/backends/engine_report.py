"""The report of TensorRT's engines, which ONNX Runtime writes at a load, or at a run of new shapes.

load or unload of an instance ─> files in the folder of its engines ─> report.json beside them, replaced as a whole
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

from millstream.services.errors import Failure
from millstream.services.model.manifest import SourceFile
from millstream.services.model.version_files import describe_file
from millstream.services.repository.variants import FILES_MAX, REPORT, Report, Target

log = logging.getLogger("millstream.variants")


class EngineReport:
    """The report of one folder of engines.

    Args:
        folder: where the engines are.
        model: the file that they are compiled from.
        target: what they are compiled for.
        flags: options of the execution provider.
    """

    def __init__(self, folder: Path, model: Path, target: Target, flags: Mapping[str, object]) -> None:
        self._folder = folder
        self._model = model
        self._target = target
        self._flags = {name: str(value) for name, value in flags.items()}

    def note(self, seconds: float = 0.0) -> None:
        """Write the report if the engines have changed since it was written. Errors are logged: it is only a report.

        Args:
            seconds: that the load took which may have compiled them; 0: unknown.
        """
        try:
            self._note(seconds)
        except (OSError, Failure, ValueError) as error:
            log.warning("the report of the engines in %s cannot be written: %s", self._folder, error)

    def _note(self, seconds: float) -> None:
        names = sorted(one.name for one in self._folder.iterdir() if one.is_file() and one.name != REPORT)[:FILES_MAX]
        path = self._folder / REPORT
        before = _read(path)
        sizes = {name: (self._folder / name).stat().st_size for name in names}
        if not names or (before is not None and {one.path: one.size_bytes for one in before.files} == sizes):
            return
        files: tuple[SourceFile, ...] = tuple(describe_file(self._folder, name) for name in names)
        report = Report(
            digest=describe_file(self._model.parent, self._model.name).sha256,
            target=self._target.name,
            runtime=self._target.runtime,
            device=self._target.device,
            files=files,
            seconds=round(seconds or (before.seconds if before is not None else 0.0), 3),
            flags=self._flags,
        )
        with tempfile.TemporaryDirectory(prefix=".report-", dir=self._folder) as folder:
            new = Path(folder) / REPORT
            new.write_text(report.model_dump_json(indent=1))
            new.replace(path)


def _read(path: Path) -> Report | None:
    try:
        return Report.model_validate_json(path.read_bytes())
    except (OSError, ValueError):  # none, or a damaged one, which is replaced
        return None
