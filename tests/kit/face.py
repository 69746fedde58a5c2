"""python -m tests.kit.face: whether plug-ins import of the core only the modules that docs/face.txt lists.

These modules are the face of the core: what others may build upon, and what changes with care. The list only shrinks: a
module that no plug-in imports any more has to leave it (--write does that, and adds nothing), and one is added by hand,
in a commit that says why.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FACE = ROOT / "docs/face.txt"
CORE = ("gateway", "workers", "services")


def imported(source: str, root: Path = ROOT) -> Iterator[str]:
    """Yield the modules of the core that a module's source imports, as `gateway.http.body`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, module = name.partition(".")
            if package == "millstream" and module.partition(".")[0] in CORE:
                yield module if _is_module(root, module) else module.rpartition(".")[0]


def _is_module(root: Path, module: str) -> bool:
    path = root / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def face(root: Path = ROOT) -> set[str]:
    """Return the modules of the core that plug-ins import."""
    return {module for path in root.glob("plugins/**/*.py") for module in imported(path.read_text(), root)}


def main() -> int:
    """Print what is imported and not listed, and what is listed and not imported."""
    listed, used = set(FACE.read_text().split()), face()
    if "--write" in sys.argv:
        FACE.write_text("".join(f"{module}\n" for module in sorted(listed & used)))
        listed &= used
    lines = [f"{module} is not in docs/face.txt: plug-ins do not import it" for module in sorted(used - listed)]
    lines += [f"{module} leaves docs/face.txt: no plug-in imports it" for module in sorted(listed - used)]
    print("\n".join(lines) or f"plug-ins import {len(used)} modules of the core, and those are listed")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
