"""Examples of `predict --example`: JSON that says what was sent, binary where JSON cannot, and a limit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.client.cli.inputs import ELEMENTS_MAX, example_of
from millstream.services.errors import Failure
from millstream.services.model.datatypes import BINARY_ONLY, DATATYPES


def metadata(*specs: tuple[str, list[int]], output: str = "FP32") -> Any:
    inputs = [
        {"name": f"i{number}", "datatype": datatype, "shape": shape} for number, (datatype, shape) in enumerate(specs)
    ]
    return {"name": "m", "inputs": inputs, "outputs": [{"name": "o", "datatype": output, "shape": [-1]}]}


SPECS = st.tuples(st.sampled_from(sorted(DATATYPES)), st.lists(st.sampled_from([-1, 0, 1, 2, 3]), max_size=4))


@given(st.lists(SPECS, min_size=1, max_size=4), st.booleans())
def test_an_example_fits_every_signature(specs, binary_outputs):
    example = example_of(metadata(*specs), binary_outputs=binary_outputs)
    header = json.loads(example.request.body[: example.request.header_bytes])
    assert [tensor["shape"] for tensor in header["inputs"]] == [
        [(1 if at == 0 else 16) if size < 0 else size for at, size in enumerate(shape)] for _, shape in specs
    ]
    binary = any(datatype in BINARY_ONLY for datatype, _ in specs)
    if binary:
        assert example.document is None
    if example.document is not None:
        assert header == example.document
        for tensor, array in zip(header["inputs"], example.arrays.values(), strict=True):
            assert len(tensor["data"]) == array.size


def test_values_are_short_and_the_same_each_time():
    said = metadata(("FP32", [-1, 3]), ("BOOL", [2]), ("BYTES", [-1]), ("INT8", []))
    first = example_of(said, binary_outputs=False).document
    assert first == example_of(said, binary_outputs=True).document
    assert first is not None
    data = [tensor["data"] for tensor in first["inputs"]]
    assert all(len(str(value)) <= 5 for value in data[0])
    assert all(isinstance(value, bool) for value in data[1])
    assert data[2] == ["millstream"]
    assert data[3] in ([0], [1])


@pytest.mark.parametrize(
    "said", [metadata(("FP32", [-1, 5000])), metadata(("FP16", [2])), metadata(("FP32", [2]), output="BF16")]
)
def test_binary_where_json_is_large_or_has_no_form(said):
    example = example_of(said, binary_outputs=False)
    assert example.document is None
    assert example.request.header_bytes is not None


def test_an_example_that_would_be_huge_is_refused():
    with pytest.raises(Failure, match="send one of your own"):
        example_of(metadata(("FP32", [1 << 20, ELEMENTS_MAX])), binary_outputs=True)
