"""services/ingest/importers: which importer takes a file or folder, by its content."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.plugins.functions.importer import FunctionImporter
from millstream.services.ingest.importers import SOURCE, Source, find_importer

FUNCTION = "def predict(text: str) -> str:\n    return text\n"


@pytest.mark.parametrize(("content", "found"), [
    (FUNCTION, True), ("import os\n\n\nclass Model:\n    pass\n", True), ("async def f(): ...", True),
    ("x = 1\n", False), ('{"def": 1}', False), ("def means to define\n", False), ("", False), ("def f(:\n", False),
    ("\0def f(): ...\n", False), ("class of an animal\n", False),
])  # fmt: skip
def test_a_file_of_python_is_known_by_what_it_defines(tmp_path: Path, content: str, found: bool) -> None:
    path = tmp_path / "upload"  # an upload has no name
    path.write_text(content)
    importer = find_importer(Source(tmp_path, path))
    assert isinstance(importer, FunctionImporter) == found


def test_a_folder_is_one_by_its_service_and_is_sent_without_caches(tmp_path: Path) -> None:
    folder = tmp_path / SOURCE
    for name in ("service.py", "words.txt", "more/data.bin", "__pycache__/service.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(FUNCTION)
    importer = find_importer(Source(tmp_path, folder))
    assert isinstance(importer, FunctionImporter)
    assert sorted(importer.members(folder).patterns) == ["more", "more/data.bin", "service.py", "words.txt"]
    (folder / "service.py").rename(folder / "train.py")
    assert find_importer(Source(tmp_path, folder)) is None, "a script beside a model is no model"
