"""services/model/samples.py: every broken file of numpy is one kind of error, whichever layer finds it."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from millstream.services.model.samples import NpzError, TooLargeError, read_npz


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def zipped(entries: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file.getvalue()


def header(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def damaged(content: bytes, local: int, central: int, value: int) -> bytes:
    """Return an archive with a byte of its two headers changed."""
    changed = bytearray(content)
    changed[content.find(b"PK\x03\x04") + local] = value
    changed[content.find(b"PK\x01\x02") + central] = value
    return bytes(changed)


NUMBERS = npy(np.random.default_rng(0).random((4, 64)))
GOOD = zipped({"x.npy": NUMBERS})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        GOOD[:-30],
        GOOD[:80] + b"\xff" * 120 + GOOD[200:],  # zlib's error
        (lzma := zipped({"x.npy": NUMBERS}, zipfile.ZIP_LZMA))[:60] + b"\0" * 30 + lzma[90:],
        damaged(GOOD, 6, 8, 1),  # encrypted: RuntimeError
        damaged(GOOD, 8, 10, 99),  # a method that nobody has
        zipped({"x": b"no array"}),  # numpy returns the bytes
        zipped({"x.npy": header(b"(" * 9000)}),  # an error of Python's tokenizer
        zipped({"x.npy": header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 64)}\n")}),
        zipped({"x.npy": header(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n")}),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(NpzError, match=r"."):
        read_npz(io.BytesIO(content), 1 << 20, 16)
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(NpzError, match=r"."):
        read_npz(tmp_path / "x.npz", 1 << 20, 16)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    with pytest.raises(TooLargeError, match="1 MiB"):
        read_npz(io.BytesIO(zipped({"x.npy": bytes(2 << 20)})), 1 << 20, 16)
    with pytest.raises(TooLargeError, match="17 arrays"):
        read_npz(io.BytesIO(zipped({f"{at}.npy": NUMBERS for at in range(17)})), 1 << 20, 16)


def test_arrays_are_read_by_name() -> None:
    content = io.BytesIO(zipped({"x.npy": NUMBERS, "y.npy": NUMBERS}))
    assert read_npz(content, 1 << 20, 16).keys() == {"x", "y"}
    assert read_npz(content, 1 << 20, 16, lambda name: name == "y").keys() == {"y"}
    with pytest.raises(FileNotFoundError):
        read_npz(Path("/nonexistent/x.npz"), 1, 1)
