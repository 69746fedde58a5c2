"""The committed OpenAPI document: writes it, and says how it differs from the one that the code makes now.

python -m tests.kit.openapi      writes docs/openapi.json (make openapi)
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millstream.gateway.app import api_document
from millstream.services.version import VERSION

PATH = Path(__file__).parents[2] / "docs" / "openapi.json"
_WIDTH = 118
_LINES_MAX = 30  # of the difference of one operation or component


def current() -> dict[str, Any]:
    """Return the document that the code makes."""
    document: dict[str, Any] = json.loads(json.dumps(api_document(VERSION)))
    return document


def pretty(value: Any, indent: int = 0) -> str:
    """Return `value` as JSON. What fits into a line is one line, so that lists of numbers are short."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or not value or indent + len(line) <= _WIDTH - 40:
        return line
    inner = " " * (indent + 1)
    if isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in value):
        lines = [""]
        for item in (json.dumps(item, ensure_ascii=False) for item in value):
            if len(inner) + len(lines[-1]) + len(item) + 2 > _WIDTH:
                lines.append("")
            lines[-1] += f"{item}, "
        text = "\n".join(f"{inner}{line.rstrip()}" for line in lines).removesuffix(",")
        return f"[\n{text}\n{' ' * indent}]"
    if isinstance(value, list):
        items = [f"{inner}{pretty(item, indent + 1)}" for item in value]
    else:
        items = [f"{inner}{json.dumps(name)}: {pretty(item, indent + 1)}" for name, item in value.items()]
    start, end = "[]" if isinstance(value, list) else "{}"
    text = ",\n".join(items)
    return f"{start}\n{text}\n{' ' * indent}{end}"


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return what changed from `old` to `new`: operations and components by name, each with its lines."""
    before, after = dict(_parts(old)), dict(_parts(new))
    found = [f"removed: {name}" for name in before if name not in after]
    found += [f"added: {name}" for name in after if name not in before]
    for name, value in before.items():
        if name in after and value != after[name]:
            lines = list(difflib.unified_diff(pretty(value).splitlines(), pretty(after[name]).splitlines(), n=2))[2:]
            cut = [f"… {len(lines) - _LINES_MAX} more lines"] if len(lines) > _LINES_MAX else []
            found.append("\n    ".join([f"changed: {name}", *map(str.rstrip, lines[:_LINES_MAX]), *cut]))
    return found


def _parts(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if name == "paths":
            for path, methods in value.items():
                for method, operation in methods.items():
                    yield f"{method.upper()} {path}", operation
        elif name == "components":
            for kind, named in value.items():
                for one, component in named.items():
                    yield f"{kind}.{one}", component
        else:
            yield name, value


def main() -> None:
    PATH.write_text(pretty(current()) + "\n", encoding="utf-8")
    print(f"wrote {PATH}")


if __name__ == "__main__":
    main()
