"""Imports the files of skops.io (scikit-learn models without a pickle), without skops.

zip ─> schema.json: a tree of nodes ─> each built by the rule of its kind, with classes on the list (listed_types)

skops decides by name alone what it trusts, and some of its nodes call what they name: constructors, methods, partial
functions and operators have no rule here. Each object is built where it is checked, so nothing can stand for something
else in between. Source: skops 0.16, skops/io/_general.py, _numpy.py, _scipy.py, _sklearn.py; protocols 0 to 2.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millstream.plugins.convert.base import Imported, Importer
from millstream.plugins.convert.listed_types import Use, bit_generator, find_listed, new_instance, refusal, set_state
from millstream.services.errors import Failure, invalid
from millstream.services.ingest.importers import ImportOptions, Source

SCHEMA = "schema.json"
PROTOCOL_MAX = 2
SCHEMA_BYTES_MAX = 64 << 20
#: bytes of one member after its decompression
MEMBER_BYTES_MAX = 1 << 30
_UNFINISHED = object()

Node = Mapping[str, Any]


class SkopsImporter(Importer):
    """Imports files of skops.io, which name their types and need no pickle."""

    name = "skops"
    extra = "scikit-learn"
    modules = ("sklearn", "skl2onnx")
    rehearsal = "millstream.plugins.convert.scikit_conversion:load_scikit_learn"

    def recognises(self, source: Source) -> bool:
        if not source.path.is_file() or not zipfile.is_zipfile(source.path):
            return False
        schema = _schema(source.path)
        return isinstance(schema, dict) and "__loader__" in schema and "_skops_version" in schema

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        from millstream.plugins.convert.scikit_conversion import check_state, convert_estimator

        return convert_estimator(load_skops(source.path, check_state), source.folder)


def _schema(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            if SCHEMA not in archive.namelist() or archive.getinfo(SCHEMA).file_size > SCHEMA_BYTES_MAX:
                return None
            return json.loads(archive.read(SCHEMA))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, RecursionError):
        return None


def load_skops(path: Path, check: Callable[[Any], None]) -> Any:
    """Return the object in the skops file at `path`.

    Args:
        path: the file.
        check: called with the state of each estimator before it is set; it may raise Failure.

    Raises:
        Failure: INVALID for a file that is broken, or names or does what is not on the list.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            schema = json.loads(_member(archive, SCHEMA))
            if schema.get("protocol") not in range(PROTOCOL_MAX + 1):
                raise invalid(f"the skops file has a protocol that is not known here: up to {PROTOCOL_MAX} is read")
            return _Tree(archive, check).build(schema)
    except (Failure, MemoryError, RecursionError, OSError):
        raise
    except Exception as error:  # a broken file raises anything
        cause = " ".join(str(error).split())[:200]
        raise invalid(f"the skops file is broken or cut short: {type(error).__name__}: {cause}") from error


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > MEMBER_BYTES_MAX:
        raise invalid(f"{name[:80]!a} in the skops file has more than {MEMBER_BYTES_MAX} bytes")
    return archive.read(name)


class _Tree:
    """Builds the objects of a schema's nodes."""

    def __init__(self, archive: zipfile.ZipFile, check: Callable[[Any], None]) -> None:
        self._archive = archive
        self._check = check
        #: number of a node -> its object: nodes with a number that was there before stand for that object
        self._built: dict[Any, Any] = {}
        self._rules: dict[str, Callable[[Node], Any]] = {
            "JsonNode": lambda node: json.loads(node["content"]),
            "BytesNode": lambda node: _member(archive, node["file"]),
            "BytearrayNode": lambda node: bytearray(_member(archive, node["file"])),
            "ListNode": lambda node: self._items(node, list),
            "TupleNode": lambda node: self._items(node, tuple),
            "SetNode": lambda node: self._items(node, set),
            "DictNode": self._dictionary,
            "DefaultDictNode": self._default_dictionary,
            "SliceNode": lambda node: slice(*(node["content"][part] for part in ("start", "stop", "step"))),
            "TypeNode": lambda node: self._named(node, Use.HOLD),
            "FunctionNode": self._function,
            "ObjectNode": self._object,
            "TreeNode": self._called,
            "LossNode": self._called,
            "NdArrayNode": self._array,
            "MaskedArrayNode": self._masked_array,
            "DTypeNode": lambda node: self.build(node["content"]).dtype,
            "RandomGeneratorNode": self._random_generator,
            "RandomStateNode": self._random_state,
            "SparseMatrixNode": self._sparse,
        }

    def build(self, node: Node) -> Any:
        """Return the object of a node."""
        number = node.get("__id__")
        if number in self._built:
            if self._built[number] is _UNFINISHED:
                raise invalid("the skops file has an object that holds itself")
            return self._built[number]
        rule = self._rules.get(node["__loader__"])
        if rule is None:
            raise invalid(
                f"the skops file has a {str(node['__loader__'])[:80]} for {_path(node)}, which calls what it names: it "
                "is refused; save the fitted estimator without it, or export the model to ONNX where it was made"
            )
        if not number:
            return rule(node)
        self._built[number] = _UNFINISHED
        self._built[number] = built = rule(node)
        return built

    def _named(self, node: Node, use: Use) -> Any:
        """Return the class or function that a node names, if the list allows this use of it."""
        module, name = str(node["__module__"]), str(node["__class__"])
        listed = find_listed(module, name)
        if listed is None or listed.use < use:
            raise invalid(refusal(module, name))
        return listed.found

    def _function(self, node: Node) -> Any:
        content = node.get("content")  # of protocol 0
        if isinstance(content, dict):
            node = {"__module__": content["module_path"], "__class__": content["function"]}
        return self._named(node, Use.HOLD)

    def _items(self, node: Node, kind: type) -> Any:
        _expect(node, f"builtins.{kind.__name__}")
        return kind(map(self.build, node["content"]))

    def _dictionary(self, node: Node) -> Any:
        content = self._empty(node)
        types = self.build(node["key_types"])
        if len(types) != len(node["content"]):
            raise ValueError("a dictionary has more or fewer keys than types of keys")
        for kind, (key, value) in zip(types, node["content"].items(), strict=True):
            if not _is_scalar(kind):
                raise invalid("the skops file has a dictionary whose keys are neither text nor numbers")
            content[kind(key)] = self.build(value)
        return content

    def _empty(self, node: Node) -> Any:
        kinds = {"builtins.dict": dict, "collections.OrderedDict": None, "sklearn.utils._bunch.Bunch": None}
        path = _path(node)
        if path not in kinds:
            raise invalid(refusal(str(node["__module__"]), str(node["__class__"])))
        return (kinds[path] or self._named(node, Use.REBUILD))()

    def _default_dictionary(self, node: Node) -> Any:
        make = find_listed("collections", "defaultdict")
        assert make is not None
        made = make.found(self.build(node["content"]["default_factory"]))
        made.update(self.build(node["content"]["main"]))
        return made

    def _object(self, node: Node) -> Any:
        instance = new_instance(self._named(node, Use.REBUILD))
        self._set_state(instance, node.get("content"))
        return instance

    def _called(self, node: Node) -> Any:
        """Build a node that skops calls with arguments: compiled trees and losses, whose arguments are numbers."""
        instance = self._named(node, Use.CALL)(*self.build(node["__reduce__"]["args"]))
        self._set_state(instance, node["content"])
        return instance

    def _set_state(self, instance: Any, node: Node | None) -> None:
        state = None if node is None else self.build(node)
        self._check(state)
        if state:
            set_state(instance, state)

    def _array(self, node: Node) -> Any:
        if node["type"] == "numpy":
            content = np.lib.format.read_array(io.BytesIO(_member(self._archive, node["file"])), allow_pickle=False)
            if _path(node) == "numpy.ndarray":
                return content
            kind = self._named(node, Use.HOLD)
            if not _is_scalar(kind):
                raise invalid(refusal(str(node["__module__"]), str(node["__class__"])))
            return kind(content)
        return self._object_array([self.build(one) for one in node["content"]], self.build(node["shape"]))

    def _object_array(self, items: Sequence[Any], shape: Sequence[int]) -> Any:
        if len(shape) != 1:
            return np.array(items, dtype=object)
        content = np.empty(len(items), dtype=object)
        for at, item in enumerate(items):  # an assignment of all would unpack items that are arrays
            content[at] = item
        return content

    def _masked_array(self, node: Node) -> Any:
        return np.ma.MaskedArray(self.build(node["content"]["data"]), self.build(node["content"]["mask"]))

    def _random_state(self, node: Node) -> Any:
        state = np.random.RandomState()
        state.set_state(self.build(node["content"]))
        return state

    def _random_generator(self, node: Node) -> Any:
        state = self.build(node["content"]["bit_generator"])
        generator = bit_generator(state["bit_generator"])
        generator.state = state
        return np.random.Generator(generator)

    def _sparse(self, node: Node) -> Any:
        from scipy.sparse import load_npz

        return load_npz(io.BytesIO(_member(self._archive, node["file"])))  # reads no pickle in it


def _path(node: Node) -> str:
    return f"{node['__module__']}.{node['__class__']}"[:200]


def _expect(node: Node, path: str) -> None:
    if _path(node) != path:
        raise invalid(refusal(str(node["__module__"]), str(node["__class__"])))


def _is_scalar(kind: Any) -> bool:
    return isinstance(kind, type) and (kind in (str, int, float, bool) or issubclass(kind, np.generic))
