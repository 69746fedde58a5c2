"""Writes the source of a release that differs from this one only in the protocol number. Standard library only."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "millstream"  # its links become folders of the copy


def write(folder: Path) -> Path:
    """Write the programs of that release to the new folder `folder` and return it."""
    shutil.copytree(PACKAGE, folder / "millstream", ignore=shutil.ignore_patterns("__pycache__"))
    keys = folder / "millstream" / "services" / "queue" / "keys.py"
    text, changed = re.subn(
        r"^PROTOCOL = (\d+)$", lambda found: f"PROTOCOL = {int(found[1]) + 1}", keys.read_text(), flags=re.MULTILINE
    )
    assert changed == 1, f"{keys} has no line that sets PROTOCOL"
    keys.write_text(text)
    return folder
