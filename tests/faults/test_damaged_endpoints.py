"""A damaged endpoint.json hurts its own model: while the server runs, at the next start, and when it is mended."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from millstream import Client
from millstream.services.repository.folder import FolderRepository
from tests.kit import models
from tests.kit.stack import Stack, running_stack, token_of
from tests.kit.wait import wait_until

X = np.ones((2, 4), np.float32)


def _replace(path: Path, name: str) -> None:
    """Put something else in place of the file."""
    path.unlink()
    match name:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "circle":
            path.symlink_to(path)
        case "huge":
            path.touch()
            os.truncate(path, 1 << 40)  # sparse: more than there is memory


#: what becomes of the bytes of the file
BYTES: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda _: os.urandom(300),
    "empty": lambda _: b"",
    "truncated": lambda content: content[:-5],
    "latin": lambda content: content.replace(b"latin", b"l\xe4tin"),
    "foreign": lambda content: content.replace(b"foreign", b"well"),
    "deep": lambda _: b"[" * 1_000_000,
    "newer": lambda _: b'{"model": "newer", "active": 1, "colour": "red"}',
}
DAMAGED = (*BYTES, "folder", "pipe", "circle", "huge")


def test_a_damaged_endpoint_hurts_its_own_model_only(tmp_path: Path) -> None:
    file = models.scale(tmp_path / "scale.onnx", 2.0, 4)
    with running_stack(tmp_path, controller=True) as stack:
        for name in ("well", *DAMAGED):
            stack.push(name, file)
        repository = FolderRepository(stack.home / "repository")
        for name in DAMAGED:
            path = stack.home / "repository" / "models" / name / "endpoint.json"
            if name in BYTES:
                path.write_bytes(BYTES[name](path.read_bytes()))
            else:
                _replace(path, name)
            repository.staged.abort(name)  # a change, which has every process look at the model
        stack.push("new", file)
        _only_these_serve(stack, "well", "new")
    with running_stack(tmp_path, controller=True) as stack:
        _only_these_serve(stack, "well", "new")
        with Client(stack.url, key=token_of(stack.home)) as client:
            for name in DAMAGED:
                assert f"{name}/endpoint.json" in stack.logs(), name
                client.remove(name)
                client.push(name, file)
        _only_these_serve(stack, "well", "new", *DAMAGED)


def _only_these_serve(stack: Stack, *names: str) -> None:
    with Client(stack.url, key=token_of(stack.home)) as client:
        wait_until(lambda: {one["name"] for one in client.models()} == {*names}, what=f"the models are {names}")
        for name in names:
            assert client.predict(name, X)["y"].tolist() == (X * 2).tolist()
