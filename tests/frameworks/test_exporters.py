"""What exporters write at their defaults is taken, and proven where the table of docs/batching.md says so.

Also run by hand for exporters that need an environment of their own: tests/frameworks/exporters.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.exporter_table import decide, rows

EXPORTERS = Path(__file__).parent / "exporters"
PAGE = Path(__file__).parents[2] / "docs" / "batching.md"


@pytest.mark.parametrize("script", ["of_torch", "of_tensorflow", "of_tables", "of_transformers"])
def test_the_page_says_what_is_proven(script: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXPORTERS / f"{script}.py", tmp_path], check=True, capture_output=True)
    page = PAGE.read_text().splitlines()
    found = rows([decide(path) for path in sorted(tmp_path.glob("*; *.onnx"))])
    assert found
    assert [line for line in found if line not in page] == []
