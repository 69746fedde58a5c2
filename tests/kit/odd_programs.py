"""Programs of torch.export that are damaged, or that would execute something when PyTorch loads them."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, bytes]], None]
MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
SAMPLES = "data/sample_inputs/model.pt"


class Boom:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        import os

        return os.mkdir, (self.path,)


def rewritten(content: bytes, change: Change, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a program whose members, by name below the root, were changed."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        root = archive.namelist()[0].partition("/")[0]
        members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(members)
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(f"{root}/{name}", data)
    return target.getvalue()


def in_document(change: Callable[[Any], None]) -> Change:
    """Return a change of models/model.json."""

    def apply(members: dict[str, bytes]) -> None:
        document = json.loads(members[MODEL])
        change(document)
        members[MODEL] = json.dumps(document).encode()

    return apply


def _graph(document: Any) -> Any:
    return document["graph_module"]["graph"]


def _call(document: Any) -> Any:
    return document["graph_module"]["module_call_graph"][0]["signature"]


def _rename(document: Any) -> None:
    text = json.dumps(document).replace('{"name": "a"}', '{"name": "a=__import__(0)"}')
    document.clear()
    document.update(json.loads(text))


def _set(members: dict[str, bytes], name: str, data: bytes) -> None:
    members[name] = data


def _sample(path: str) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Boom(path), protocol=2))
        archive.writestr("archive/version", "3")
    return target.getvalue()


def dangerous(path: str) -> dict[str, tuple[Change, str]]:
    """Return programs that would make the folder `path`, or could, by what is wrong; and the refusal of each."""
    code = f"__import__('os').mkdir({path!r})"
    pickled = json.dumps({"config": {"w": {"path_name": "weight_0", "use_pickle": True}}}).encode()
    tree = '[1, {"type": "builtins.tuple", "context": "null", "children_spec": [{"type": "antigravity.x", '
    tree += (
        '"context": "null", "children_spec": []}, {"type": "builtins.dict", "context": "[]", "children_spec": []}]}]'
    )
    size = {"as_expr": {"expr_str": code, "hint": {"as_int": 3}}}
    return {
        "operator": (
            in_document(lambda one: _graph(one)["nodes"][0].update(target="torch.os.mkdir")),
            "the operator 'torch.os.mkdir' is not one of ATen's",
        ),
        "file operator": (
            in_document(lambda one: _graph(one)["nodes"][0].update(target="torch.ops.aten.from_file.default")),
            "the operator 'torch.ops.aten.from_file.default' is not one of ATen's",
        ),
        "size": (
            in_document(lambda one: _graph(one)["tensor_values"]["a"]["sizes"].__setitem__(0, size)),
            "a symbolic size of the program is not served",
        ),
        "guard": (in_document(lambda one: one.update(guards_code=[code])), "a guard of the program is not served"),
        "name": (in_document(_rename), "is no name of a tensor"),
        "tree": (in_document(lambda one: _call(one).update(in_spec=tree)), "the program takes or returns a"),
        "pickled weight": (lambda one: _set(one, WEIGHTS, pickled), "is a pickle, which could execute anything"),
        "pickled weights of old": (
            lambda one: _set(one, "data/weights/model.pt", _sample(path)),
            "is a pickle, which could execute anything",
        ),
        "pickled samples": (lambda one: _set(one, SAMPLES, _sample(path)), "the pickle of the sample inputs names"),
        "plain pickle": (
            lambda one: _set(one, SAMPLES, pickle.dumps(Boom(path))),
            "sample inputs are not a file of torch.save",
        ),
        "machine code": (
            lambda one: _set(one, "data/aotinductor/model/x.so", b"\x7fELF"),
            "the program has machine code of AOTInductor",
        ),
        "objects": (
            lambda one: _set(one, "data/constants/opaque_obj_0", pickle.dumps(Boom(path))),
            "is a pickle, which could execute anything",
        ),
    }


def damaged(content: bytes) -> dict[str, tuple[bytes, str]]:
    """Return damaged programs by what is wrong, and the refusal of each."""
    nested = b'{"graph_module":' * 100_000
    return {
        "compressed": (rewritten(content, lambda _: None, zipfile.ZIP_DEFLATED), "compressed or encrypted"),
        "bomb": (
            rewritten(content, lambda one: _set(one, "data/weights/weight_0", bytes(1 << 24)), zipfile.ZIP_DEFLATED),
            "compressed or encrypted",
        ),
        "no samples": (rewritten(content, lambda one: one.__delitem__(SAMPLES)), f"it has no {SAMPLES}"),
        "other version": (
            rewritten(content, lambda one: _set(one, "archive_version", b"9")),
            "the program was saved by another PyTorch",
        ),
        "two programs": (
            rewritten(content, lambda one: _set(one, "models/other.json", b"{}")),
            "the archive has the model 'models/other.json'",
        ),
        "no JSON": (rewritten(content, lambda one: _set(one, MODEL, b"{")), "models/model.json is not JSON"),
        "nested": (rewritten(content, lambda one: _set(one, MODEL, nested)), "models/model.json is not JSON"),
        "empty document": (rewritten(content, lambda one: _set(one, MODEL, b"{}")), "the program cannot be read"),
        "foreign file": (
            rewritten(content, lambda one: _set(one, "run.sh", b"")),
            "'run.sh' is no file of a program of torch.export",
        ),
        "prefixed": (b"PK\x03\x04" + content, "bytes precede"),
        "continued": (content + b"more", "bytes precede or follow"),
    }
