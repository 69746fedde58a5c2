"""plugins/compile/race/samples.py: samples that a user sends, and those that are drawn."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.plugins.compile.race.samples import draw, rows_of, split, write_samples
from millstream.services.errors import Failure
from millstream.services.model import samples
from millstream.services.model.samples import Samples, read_inputs, read_samples, stored
from tests.kit.races import signature

BOTH = signature([("x", "FP32", (-1, 3)), ("ids", "INT64", (-1, -1))], [("y", "FP32", (-1, 2))])
X = np.arange(12, dtype=np.float32).reshape(4, 3)
IDS = np.arange(8).reshape(4, 2)


def saved(folder: Path, **arrays: Any) -> Path:
    path = folder / "samples.npz"
    np.savez(path, **arrays)
    return path


def test_arrays_are_named_with_or_without_a_prefix_and_outputs_are_ignored(tmp_path: Path) -> None:
    found = read_inputs(saved(tmp_path, **{"input/x": X, "ids": IDS, "output/y": X}), BOTH)
    assert set(found) == {"x", "ids"}
    assert np.array_equal(found["x"], X)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": X}, "the input 'ids' is missing"),
        ({"x": X, "ids": IDS, "z": X}, "there is no array 'z'"),
        ({"x": X[:, :2], "ids": IDS}, r"'x' has the shape \[4, 2\] instead of \[-1, 3\]"),
        ({"x": X[0], "ids": IDS}, r"'x' has the shape \[3\]"),
        ({"x": X.astype("U"), "ids": IDS}, r"datatype <U\d+ instead of FP32: x.astype\('float32'\)"),
        ({"x": X, "ids": IDS.astype(np.float32)}, r"ids.astype\('int64'\)"),
        ({"x": X.astype(np.float64) * 1e38, "ids": IDS}, "that float32 cannot hold, the largest 1.1e"),
        ({"x": X[:3], "ids": IDS}, "same number of rows"),
        ({"x": X[:0], "ids": IDS[:0]}, "there are no rows"),
        ({"x": np.zeros((70_000, 3)), "ids": np.zeros((70_000, 1), int)}, "70000 rows are more than 65536"),
        ({"x": X.astype(object), "ids": IDS}, "text arrays need the datatype S or U"),
    ],
)
def test_wrong_samples_name_the_line_to_fix(tmp_path: Path, arrays: dict[str, Any], said: str) -> None:
    with pytest.raises(Failure, match=said):
        read_inputs(saved(tmp_path, **arrays), BOTH)


def test_outputs_are_checked_where_they_are_kept(tmp_path: Path) -> None:
    path = saved(tmp_path, **{"input/x": X, "ids": IDS, "output/y": X[:, :2]})
    found = read_samples(path, BOTH)
    assert (list(found.inputs), list(found.outputs)) == (["x", "ids"], ["y"])
    with pytest.raises(Failure, match=r"'y' has the shape \[4, 3\]"):
        read_samples(saved(tmp_path, x=X, ids=IDS, **{"output/y": X}), BOTH)
    with pytest.raises(Failure, match="there is no array 'output/z'"):
        read_samples(saved(tmp_path, x=X, ids=IDS, **{"output/z": X}), BOTH)


def test_numbers_of_the_same_kind_are_converted_if_they_fit(tmp_path: Path) -> None:
    small = signature([("n", "INT8", (-1,))], [("y", "FP32", (-1,))])
    assert read_inputs(saved(tmp_path, n=np.array([-128, 127])), small)["n"].dtype == np.int8
    with pytest.raises(Failure, match="'n' has numbers that int8 cannot hold, the largest 300"):
        read_inputs(saved(tmp_path, n=np.array([1, 300])), small)
    assert read_inputs(saved(tmp_path, x=X.astype(np.float64), ids=IDS), BOTH)["x"].dtype == np.float32


def test_arrays_of_another_byte_order_are_converted(tmp_path: Path) -> None:
    found = read_inputs(saved(tmp_path, x=X.astype(">f4"), ids=IDS.astype(">i8")), BOTH)
    assert np.array_equal(found["x"], X)
    assert found["x"].dtype == np.dtype("<f4")


def test_a_scalar_stays_a_scalar(tmp_path: Path) -> None:
    of = signature([("x", "FP32", ())], [("y", "FP32", ())], batching=False)
    drawn = draw(of, 1, 0, 1, 10)
    assert drawn["x"].shape == ()
    write_samples(tmp_path / "samples.npz", drawn)
    assert read_inputs(tmp_path / "samples.npz", of)["x"].shape == ()


@pytest.mark.parametrize("content", [b"", b"not a file of numpy", b"PK\x03\x04" + bytes(100)])
def test_what_is_no_npz_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "samples.npz").write_bytes(content)
    with pytest.raises(Failure, match="this is not an"):
        read_inputs(tmp_path / "samples.npz", BOTH)


def test_every_truncation_is_refused_and_nothing_else_is_raised(tmp_path: Path) -> None:
    content = saved(tmp_path, x=X, ids=IDS).read_bytes()
    for length in range(0, len(content) - 1, 7):
        (tmp_path / "cut.npz").write_bytes(content[:length])
        with pytest.raises(Failure):
            read_inputs(tmp_path / "cut.npz", BOTH)


def test_a_plain_npy_file_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "samples.npy", X)
    with pytest.raises(Failure, match="this is not an"):
        read_inputs(tmp_path / "samples.npy", BOTH)


def test_a_pickle_in_an_archive_is_not_loaded(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "samples.npz", "w") as archive:
        archive.writestr("x.npy", b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(Failure):
        read_inputs(tmp_path / "samples.npz", BOTH)


def test_an_archive_that_unpacks_to_too_much_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "SAMPLES_BYTES_MAX", 1000)
    path = tmp_path / "samples.npz"
    np.savez_compressed(path, x=np.zeros((10_000, 3), np.float32))
    with pytest.raises(Failure, match="send fewer rows"):
        read_inputs(path, BOTH)


def test_text_and_bf16_survive_the_file(tmp_path: Path) -> None:
    odd = signature([("t", "BYTES", (-1,)), ("b", "BF16", (-1,))], [("y", "FP32", (-1,))])
    text = np.array([b"a", "bä".encode(), b""], dtype=object)
    write_samples(tmp_path / "s.npz", {"t": text, "b": np.array([1, 2, 3], np.uint16)})
    found = read_inputs(tmp_path / "s.npz", odd)
    assert found["t"].tolist() == text.tolist()
    assert found["b"].tolist() == [1, 2, 3]
    unicode = saved(tmp_path, t=np.array(["a", "bä", ""]), b=np.zeros(3, np.uint16))
    assert read_inputs(unicode, odd)["t"].tolist() == text.tolist()


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_calibration_and_judged_samples_are_disjoint(rows: int) -> None:
    parts = split({"x": X[:rows], "ids": IDS[:rows]}, BOTH, judged_max=100)
    assert parts.disjoint
    [judged] = parts.judged
    seen = {tuple(row) for row in parts.calibration["x"]} & {tuple(row) for row in judged["x"]}
    assert not seen
    assert len(parts.calibration["x"]) + len(judged["x"]) == rows


def test_a_single_sample_is_in_both_parts_and_said_to_be() -> None:
    assert not split({"x": X[:1], "ids": IDS[:1]}, BOTH, judged_max=100).disjoint


def test_judged_samples_are_bounded() -> None:
    assert len(split({"x": X, "ids": IDS}, BOTH, judged_max=1).judged[0]["x"]) == 1


def test_rows_are_taken_in_a_ring() -> None:
    assert rows_of({"x": X}, 3, 3)["x"][:, 0].tolist() == [9.0, 0.0, 3.0]
    assert len(rows_of({"x": X}, 10)["x"]) == 10


def test_drawn_samples_fit_the_signature_and_are_equal_for_equal_seeds() -> None:
    odd = signature(
        [
            ("input_ids", "INT32", (-1, -1)),
            ("attention_mask", "INT64", (-1, -1)),
            ("token_type_ids", "INT64", (-1, -1)),
            ("x", "FP16", (-1, 2)),
            ("b", "BF16", (-1,)),
            ("flag", "BOOL", (-1,)),
            ("small", "INT8", (-1,)),
            ("t", "BYTES", (-1,)),
        ],
        [("y", "FP32", (-1,))],
    )
    drawn = draw(odd, 50, seed=1, size=7, integers_max=1000)
    file = io.BytesIO()
    np.savez(file, **stored(Samples(drawn, {})))  # type: ignore[arg-type]
    checked = read_inputs(file, odd)
    assert checked["input_ids"].shape == (50, 7)
    assert 100 < checked["input_ids"].max() < 1000
    assert (checked["attention_mask"] == 1).all()
    assert (checked["token_type_ids"] == 0).all()
    assert checked["small"].min() >= 0
    again = draw(odd, 50, seed=1, size=7, integers_max=1000)
    assert all(np.array_equal(drawn[name], again[name]) for name in drawn)
    assert not np.array_equal(drawn["x"], draw(odd, 50, seed=2, size=7, integers_max=1000)["x"])
