"""Bodies of TorchServe's predictions, pages of models, and files that may be registered."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.gateway.admin.upload import content, locate
from millstream.gateway.catalog.snapshot import ModelView, Snapshot
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.plugins.compat.torchserve.documents import find, page
from millstream.plugins.compat.torchserve.predictions import PARTS_MAX, parts_of, read, write
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import decode_elements
from millstream.services.model.signature import Signature, TensorSpec


def plans(*inputs: tuple[str, str, tuple[int, ...]]) -> InputPlans:
    specs = tuple(TensorSpec(name=name, datatype=datatype, shape=shape) for name, datatype, shape in inputs)
    return InputPlans("m", Signature(inputs=specs, outputs=specs, batching=True), 8)


NUMBERS = plans(("x", "FP32", (-1, 2)))
TEXT = plans(("x", "BYTES", (-1, 1)))
TWO = plans(("a", "FP32", (-1, 1)), ("b", "FP32", (-1, 1)))


def form(**parts: bytes) -> tuple[str, bytes]:
    body = b"".join(
        b'--B\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), part)
        for name, part in parts.items()
    )
    return "multipart/form-data; boundary=B", body + b"--B--\r\n"


def npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content_type", "body", "rows", "single"),
    [
        ("application/json", b"[1, 2]", 1, True),
        ("application/json", b"[[1, 2]]", 1, False),
        ("application/json", b"[[1, 2], [3, 4]]", 2, False),
        ("application/json", b'{"data": [1, 2]}', 1, True),
        ("application/json", b'{"body": [[1, 2]]}', 1, False),
        ("application/json", b'{"x": [1, 2]}', 1, True),
        ("application/json", b'{"instances": [[1, 2]]}', 1, False),
        ("application/json", b'{"inputs": [[1, 2]]}', 1, False),
        ("", b" [1, 2]", 1, True),
        ("application/x-www-form-urlencoded", b"[[1, 2]]", 1, False),
        ("application/octet-stream", np.array([1, 2], np.float32).tobytes(), 1, True),
        ("application/octet-stream", npy(np.array([[1.0, 2.0]])), 1, False),
        ("application/x-npy", npy(np.array([[1.0, 2.0]])), 1, False),
        ("text/csv", b"1,2\n3,4", 2, False),
        (*form(data=b"[1, 2]"), 1, True),
        (*form(x=b"[[1, 2]]"), 1, False),
        (*form(data=npy(np.array([1.0, 2.0]))), 1, True),
    ],
)
def test_one_input_in_every_form(content_type: str, body: bytes, rows: int, single: bool) -> None:
    found = read(NUMBERS, content_type, body)
    assert (found.inputs.rows, found.single) == (rows, single)
    tensor = found.inputs.tensors[0]
    raw = tensor.data.tobytes() if isinstance(tensor.data, np.ndarray) else bytes(tensor.data)
    assert np.frombuffer(raw, np.float32)[:2].tolist() == [1.0, 2.0]


def strings(content_type: str, body: bytes) -> list[bytes]:
    return decode_elements(bytes(read(TEXT, content_type, body).inputs.tensors[0].data))


def test_bytes_are_taken_as_they_are() -> None:
    picture = b"\x89PNG\r\n\x1a\n\x00"
    for content_type in ("", "image/png", "application/octet-stream", "text/plain"):
        assert strings(content_type, picture) == [picture]
    assert strings(*form(data=picture)) == [picture]
    assert strings("", b"[1]") == [b"[1]"]
    assert strings("application/json", b'["a"]') == [b"a"]
    assert strings("application/json", b'{"data": "a"}') == [b"a"]
    assert strings("application/json", b'{"b64": "YQ=="}') == [b"a"]


def test_several_inputs() -> None:
    for content_type, body in (
        ("application/json", b'{"a": 1, "b": 2}'),
        form(a=np.array([1], np.float32).tobytes(), b=np.array([2], np.float32).tobytes()),
    ):
        found = read(TWO, content_type, body)
        assert found.single
        assert [tensor.shape for tensor in found.inputs.tensors] == [(1, 1), (1, 1)]
    for body in (b'{"a": [[1], [2]], "b": [[3], [4]]}', b'{"a": [1, 2], "b": [3, 4]}', b'{"a": [1], "b": [3]}'):
        assert not read(TWO, "application/json", body).single, "a list of single elements is a column, of any length"


@pytest.mark.parametrize(
    ("of", "content_type", "body", "error"),
    [
        (NUMBERS, "application/json", b"{", "failed to parse"),
        (NUMBERS, "application/json", b'{"other": 1}', "'x' or 'data'"),
        (NUMBERS, "application/json", b'{"x": 1, "y": 1}', "'x' or 'data'"),
        (NUMBERS, "application/json", b"{}", "missing required input"),
        (NUMBERS, "application/json", b"[1, 2, 3]", "unexpected shape"),
        (NUMBERS, "", b"abc", "byte size mismatch"),
        (NUMBERS, "image/png", b"abc", "'image/png' is not taken"),
        (TWO, "", b"abc", "takes 2 inputs"),
        (TWO, "application/json", b"[1]", "takes 2 inputs"),
        (TWO, *form(a=b"[1]"), "missing required input"),
        (TWO, *form(c=b"[1]"), "unexpected inference input 'c'"),
        (NUMBERS, "multipart/form-data", b"", "without a boundary"),
        (NUMBERS, form()[0], form(data=b"1")[1][:-9], "ends before"),
        (NUMBERS, form()[0], b"junk", "multipart body"),
        (NUMBERS, form()[0], form(data=b"1")[1][:-7] + form(data=b"1")[1], "more than one part 'data'"),
    ],
)
def test_what_is_wrong_is_said(of: InputPlans, content_type: str, body: bytes, error: str) -> None:
    with pytest.raises(Failure, match=error):
        read(of, content_type, body)


def test_forms_are_bounded() -> None:
    with pytest.raises(Failure, match="more than 64 parts"):
        parts_of(*form(**{f"p{index}": b"" for index in range(PARTS_MAX + 1)}))
    with pytest.raises(Failure, match="header size"):
        parts_of(*form(**{"a" * 5000: b""}))


def test_a_row_alone_is_answered_alone() -> None:
    output = OutputTensor("FP32", (1, 2), np.array([[1, 2]], np.float32))
    assert write(NUMBERS.signature, [output], single=True) == b"[1.0,2.0]"
    assert write(NUMBERS.signature, [output], single=False) == b"[[1.0,2.0]]"
    assert write(TWO.signature, [output, output], single=True) == b'{"a":[1.0,2.0],"b":[1.0,2.0]}'


def test_pages_of_models() -> None:
    snapshot = Snapshot({name: ModelView(name, None, None, {}) for name in "cab"}, ())
    first = page(snapshot, 2, None)
    assert first == {
        "nextPageToken": "2",
        "models": [{"modelName": name, "modelUrl": name} for name in ("a", "b")],
    }
    assert page(snapshot, 2, "2") == {"models": [{"modelName": "c", "modelUrl": "c"}]}
    for token in ("x", "-1", "9" * 5000):
        with pytest.raises(Failure, match="next_page_token"):
            page(snapshot, 2, token)
    with pytest.raises(Failure, match="Model not found: z"):
        find(snapshot, "z", None)
    with pytest.raises(Failure, match=r"Model version: 2\.0 does not exist for model: a"):
        find(snapshot, "a", "2.0")


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://example.com/m.onnx", Code.UNSUPPORTED),
        ("s3://bucket/m.onnx", Code.UNSUPPORTED),
        ("../secret", Code.INVALID),
        ("/etc/passwd", Code.INVALID),
        ("file:///etc/passwd", Code.INVALID),
        ("link", Code.INVALID),
        ("a\0b", Code.INVALID),
        ("", Code.INVALID),
        ("nope.onnx", Code.NOT_FOUND),
    ],
)
def test_only_what_is_in_the_folder_is_found(tmp_path: Path, url: str, code: Code) -> None:
    (tmp_path / "secret").write_bytes(b"s")
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "m.onnx").write_bytes(b"m")
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(Failure) as refusal:
        locate(folder, url)
    assert refusal.value.code is code
    for right in ("m.onnx", str(folder / "m.onnx"), f"file://{folder}/m.onnx"):
        assert locate(folder, right) == folder / "m.onnx"
    with pytest.raises(Failure, match="MILLSTREAM_IMPORT_DIR"):
        locate(None, "m.onnx")


async def _collected(path: Path) -> bytes:
    return b"".join([piece async for piece in content(path)])


def test_a_folder_goes_as_a_tar(tmp_path: Path) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(bytes(1000))
    (version / "tokenizer.json").write_bytes(b"{}")
    (version / "notes.txt").write_bytes(b"no part of the model")
    for path, below in ((version, ""), (tmp_path / "m", "1/")):
        with tarfile.open(fileobj=io.BytesIO(asyncio.run(_collected(path)))) as packed:
            names = {one.name: one.size for one in packed}
        assert names == {f"{below}model.onnx": 1000, f"{below}tokenizer.json": 2}
    assert asyncio.run(_collected(version / "model.onnx")) == bytes(1000)
    (version / "tokenizer.json").unlink()
    (version / "tokenizer.json").symlink_to("/etc/passwd")
    with pytest.raises(Failure, match=r"tokenizer.json is a link out of the folder"):
        asyncio.run(_collected(version))


def test_numbers_keep_their_json() -> None:
    assert (
        json.loads(write(NUMBERS.signature, [OutputTensor("FP32", (1,), np.array([0.1], np.float32))], single=True))
        == 0.1
    )
