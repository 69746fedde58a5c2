"""Recognises the text of a graph, and reads it into a Graph.

our YAML or JSON │ Triton's config.pbtxt with ensemble_scheduling │ KServe's InferenceGraph ─> Graph

Recognising takes the standard library alone. Reading YAML takes PyYAML, and Triton's text protobuf.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from millstream.plugins.graphs.document import Graph
from millstream.plugins.graphs.ensemble import read_ensemble
from millstream.plugins.graphs.inference_graph import RouterNode, RouteStep, read_inference_graph
from millstream.services.errors import invalid
from millstream.services.nearest_names import unknown_key
from millstream.services.plugin.registry import is_on

FORMAT = "graph"
BYTES_MAX = 256 << 10
DEPTH_MAX = 12  # of nested values; a graph has fewer
_STEPS, _OUTPUTS = re.compile(r"^steps\s*:", re.MULTILINE), re.compile(r"^outputs\s*:", re.MULTILINE)
_ENSEMBLE = re.compile(r"^ensemble_scheduling\s*\{", re.MULTILINE)
_KSERVE = re.compile(r"""(?:^|[{,]\s*)["']?kind["']?\s*:\s*["']?InferenceGraph\b""", re.MULTILINE)
_JSON = re.compile(r"\s*\{")
_JSON_STEPS, _JSON_OUTPUTS = re.compile(r'"steps"\s*:'), re.compile(r'"outputs"\s*:')


def is_graph_file(path: Path) -> bool:
    """Return whether the file at `path` is the text of a graph. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(BYTES_MAX)
    if b"\0" in head:
        return False
    text = head.decode("utf-8", "replace")
    return _is_ours(text) or bool(_ENSEMBLE.search(text) or _KSERVE.search(text))


def _is_ours(text: str) -> bool:
    if _JSON.match(text):
        return bool(_JSON_STEPS.search(text) and _JSON_OUTPUTS.search(text))
    return bool(_STEPS.search(text) and _OUTPUTS.search(text))


def read_graph(path: Path) -> Graph:
    """Return the graph in the file at `path`. Raises Failure(INVALID), OSError."""
    with path.open("rb") as file:
        content = file.read(BYTES_MAX + 1)
    if len(content) > BYTES_MAX:
        raise invalid(f"the graph is larger than {BYTES_MAX} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise invalid(f"the graph is not UTF-8: {error.reason} at byte {error.start}") from None
    if _ENSEMBLE.search(text):
        return read_ensemble(_config(text))
    document = _json(text) if _JSON.match(text) else _yaml(text)
    if isinstance(document, dict) and document.get("kind") == "InferenceGraph":
        return _validated(lambda: read_inference_graph(document), "the InferenceGraph")
    return parse(document)


def _config(text: str) -> dict[str, Any]:
    """Return Triton's configuration in its JSON form. Raises Failure(INVALID)."""
    if not is_on("triton"):
        raise invalid("an ensemble of Triton is read by the plug-in triton, which is off")
    from millstream.plugins.compat.triton.config.config import from_text

    return from_text(text).document()


def parse(document: Any) -> Graph:
    """Return the graph of a document. Raises Failure(INVALID) that names the field."""
    return _validated(lambda: Graph.model_validate(document), "the graph")


def _validated(read: Callable[[], Graph], what: str) -> Graph:
    try:
        return read()
    except ValidationError as error:
        raise invalid(f"{what}: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    """Return the first error in a sentence, an unknown member before others."""
    errors = error.errors(include_url=False, include_context=False)
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    place = [str(part) for part in first["loc"] if part != "[key]"]
    where = ".".join(place)[:200]
    if first["type"] == "extra_forbidden":
        *parents, name = place
        above = f"{'.'.join(parents)[:200]}: " if parents else ""
        return f"{above}{unknown_key(name[:80], _members(first['loc'][:-1]))}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _members(location: tuple[int | str, ...]) -> list[str]:
    """Return the names that are known at a location of the document."""
    of: type[BaseModel] = Graph
    if location[:1] == ("nodes",):
        of = RouteStep if "steps" in location else RouterNode
    for part in location:
        field = of.model_fields.get(str(part))
        if field is None:  # the name of a step, or of a tensor
            continue
        found = [one for one in _types(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
        of = found[0] if found else of
    return [field.alias or name for name, field in of.model_fields.items()]


def _types(annotation: Any) -> list[Any]:
    inner = get_args(annotation)
    return [annotation] if not inner else [found for one in inner for found in _types(one)]


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the graph is not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


def _yaml(text: str) -> Any:
    """Return a YAML document of plain values: an anchor could make a short text a large document."""
    try:
        import yaml
    except ImportError:
        raise invalid(
            "a graph in YAML needs PyYAML where the gateway runs: install millstream[graphs], or write it as JSON"
        ) from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=yaml.SafeLoader)):
            raise invalid("the graph: YAML's aliases (*name) are not taken")
        if node is None:
            raise invalid("the graph is empty")
        _check_node(node, 0)
        return yaml.load(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where is not None else ""
        raise invalid(f"the graph is not YAML: {getattr(error, 'problem', None) or error}{line}") from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"the graph is not YAML: {error}") from None


def _check_node(node: Any, depth: int) -> None:
    """Raise Failure(INVALID) for a name that occurs twice in a mapping, of which YAML would take the last."""
    if depth > DEPTH_MAX:
        raise invalid(f"the graph is nested more than {DEPTH_MAX} levels deep")
    if node.id == "mapping":
        names = [key.value for key, _ in node.value if key.id == "scalar"]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise invalid(f"the graph: {twice[:80]!r} occurs twice (line {node.start_mark.line + 1} and below)")
        for _, value in node.value:
            _check_node(value, depth + 1)
    elif node.id == "sequence":
        for one in node.value:
            _check_node(one, depth + 1)
