"""Requests for embeddings, and what embedding models take and give."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.plugins.compat.openai import embeddings, request
from millstream.plugins.compat.openai.embedder import embedder, shortened, unit
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import decode_elements
from millstream.services.model.manifest import Pooling
from millstream.services.model.signature import Signature, TensorSpec


def read(**members: Any) -> request.EmbeddingRequest:
    return request.read(json.dumps({"model": "m", "input": "a", **members}).encode())


@pytest.mark.parametrize(
    ("given", "entries"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_four_kinds_of_input(given: Any, entries: Any) -> None:
    assert read(input=given).entries == entries


def test_options() -> None:
    assert read() == request.EmbeddingRequest("m", None, ["a"], False, 0)
    assert read(model="m:3", encoding_format="base64", dimensions=2, user="u") == request.EmbeddingRequest(
        "m", "3", ["a"], True, 2
    )


@pytest.mark.parametrize(
    ("members", "error"),
    [
        ({"model": None}, "provide a model"),
        ({"model": 1}, "provide a model"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"encoding_format": ["float"]}, "encoding_format"),
        ({"encoding_format": {}}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"user": 1}, "user"),
        ({"input": None}, "'input' is a string"),
        ({"input": []}, "not empty"),
        ({"input": ""}, r"'input\[0\]' is an empty string"),
        ({"input": ["a", ""]}, r"'input\[1\]' is an empty string"),
        ({"input": ["a", 1]}, "strings alone"),
        ({"input": [["a"]]}, r"'input\[0\]' is a list of token ids"),
        ({"input": [[1], []]}, r"'input\[1\]' is a list of token ids"),
        ({"input": [[-1]]}, r"'input\[0\]' is a list of token ids"),
        ({"input": [1.5]}, "strings alone"),
        ({"input": ["a"] * 2049}, "2049 entries: at most 2048"),
        ({"input": [[1] * 8193]}, "8193 tokens: at most 8192"),
        ({"input": [[1] * 8000] * 38}, "304000 tokens: at most 300000"),
    ],
)
def test_limits_and_mistakes(members: dict[str, Any], error: str) -> None:
    with pytest.raises(Failure, match=error):
        read(**members)


def spec(name: str, datatype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, shape=shape)


def plans(inputs: list[TensorSpec], outputs: list[TensorSpec]) -> InputPlans:
    return InputPlans("m", Signature(inputs=tuple(inputs), outputs=tuple(outputs), batching=True), 8)


IDS = spec("input_ids", "INT64", -1, -1)
POOLED = spec("y", "FP32", -1, 2)


def arrays(of: InputPlans, entries: Any) -> list[Any]:
    inputs, _ = asyncio.run(embedder(of).inputs(entries))
    return [tensor.data.tolist() for tensor in inputs.tensors if isinstance(tensor.data, np.ndarray)]


def test_tokens_are_padded_to_the_longest() -> None:
    three = plans(
        [
            spec("attention_mask", "INT64", -1, -1),
            spec("ids", "INT32", -1, -1),
            spec("token_type_ids", "INT64", -1, -1),
        ],
        [POOLED],
    )
    assert arrays(three, [[5, 6, 7], [8]]) == [[[1, 1, 1], [1, 0, 0]], [[5, 6, 7], [8, 0, 0]], [[0] * 3, [0] * 3]]
    fixed = plans([spec("input_ids", "INT64", -1, 4)], [POOLED])
    assert arrays(fixed, [[5]]) == [[[5, 0, 0, 0]]]
    with pytest.raises(Failure, match="at most 4 tokens, and an entry has 5"):
        arrays(fixed, [[1] * 5])
    with pytest.raises(Failure, match="out of the range"):
        arrays(fixed, [[2**70]])


@pytest.mark.parametrize(
    ("inputs", "outputs", "error"),
    [
        ([spec("x", "FP32", -1, 4)], [POOLED], "takes no input_ids"),
        ([IDS, spec("other", "INT64", -1, -1)], [POOLED], "takes no input_ids"),
        ([spec("input_ids", "INT64", -1)], [POOLED], "takes no input_ids"),
        ([IDS], [spec("label", "INT64", -1, 1)], r"is not \(rows, dim\)"),
        ([IDS], [spec("y", "FP32", -1)], r"is not \(rows, dim\)"),
        ([IDS], [POOLED, spec("z", "FP32", -1, 2)], "none of its 2 outputs"),
    ],
)
def test_models_that_give_no_embeddings(inputs: list[TensorSpec], outputs: list[TensorSpec], error: str) -> None:
    with pytest.raises(Failure, match=error):
        embedder(plans(inputs, outputs))


def test_the_best_of_several_outputs() -> None:
    outputs = [spec("token_embeddings", "FP32", -1, -1, 2), spec("sentence_embedding", "FP32", -1, 2)]
    assert embedder(plans([IDS], outputs)).output == 1


def test_texts_of_similar_lengths_run_together() -> None:
    how = embedder(plans([IDS, spec("attention_mask", "INT64", -1, -1)], [POOLED]), 512)
    lengths = [3, 100, 5, 98, 40, 4, 33, 97]
    runs = how.runs([[1] * length for length in lengths], 3)
    assert sorted(at for run in runs for at in run) == list(range(8))
    assert [[lengths[at] for at in run] for run in runs] == [[100, 98, 97], [40, 33], [5, 4, 3]]
    assert max(map(len, how.runs([[1] * 500] * 100, 64))) == 32  # tokens are bounded, too
    assert how.runs([[1]] * 5, 2) == [[0, 1], [2, 3], [4]]


def test_rows_are_padded_to_few_lengths_where_that_changes_no_answer() -> None:
    of = plans([IDS, spec("attention_mask", "INT64", -1, -1)], [POOLED])
    for length, width in ((1, 8), (8, 8), (9, 16), (65, 72), (130, 144), (257, 288), (500, 510), (510, 510)):
        inputs, mask = asyncio.run(embedder(of, 510).inputs([[7] * length]))
        assert mask.shape == (1, width)
        assert int(mask.sum()) == length
        assert inputs.tensors[0].shape == (1, width)
    _, mask = asyncio.run(embedder(of).inputs([[7] * 9]))
    assert mask.shape == (1, 9)


def test_pooling() -> None:
    how = embedder(plans([IDS], [spec("last_hidden_state", "FP32", -1, -1, 2)]))
    hidden = np.array([[[1, 0], [0, 1]], [[3, 4], [9, 9]]], np.float32)
    mask = np.array([[1, 1], [1, 0]])
    found = how.vectors([OutputTensor("FP32", hidden.shape, hidden)], mask)
    np.testing.assert_allclose(found, [[0.5**0.5, 0.5**0.5], [0.6, 0.8]], rtol=1e-6)
    plain = np.array([[3, 4], [0, 0]], np.float32)
    own = how.vectors([OutputTensor("FP32", plain.shape, plain)], mask)
    assert own.tolist() == plain.tolist()
    with pytest.raises(Failure, match="no embedding of each entry"):
        how.vectors([OutputTensor("FP32", (1, 2), plain[:1])], mask)
    assert unit(plain).tolist() == [[np.float32(0.6), np.float32(0.8)], [0.0, 0.0]]
    assert shortened(plain, 0) is plain
    assert shortened(plain, 1).tolist() == [[1.0], [0.0]]
    with pytest.raises(Failure, match="'dimensions' is 3"):
        shortened(plain, 3)


@pytest.mark.parametrize(("tokens", "expected"), [("mean", [2, 3]), ("cls", [1, 2]), ("last", [3, 4])])
@pytest.mark.parametrize("normalize", [False, True])
def test_declared_pooling(tokens: Any, expected: list[float], normalize: bool) -> None:
    pooling = Pooling(tokens=tokens, normalize=normalize)
    how = embedder(plans([IDS], [spec("last_hidden_state", "FP32", -1, -1, 2)]), pooling=pooling)
    array = np.array([[[1, 2], [3, 4], [9, 9]]], np.float32)
    found = how.vectors([OutputTensor("FP32", array.shape, array)], np.array([[1, 1, 0]]))
    assert np.allclose(found, np.array([expected]) / (np.linalg.norm(expected) if normalize else 1))
    flat = embedder(plans([IDS], [POOLED]), pooling=pooling)
    array = np.array([[3, 4]], np.float32)
    found = flat.vectors([OutputTensor("FP32", array.shape, array)], np.array([[1]]))
    assert found.tolist() == [[3, 4]] if not normalize else np.allclose(found, [[0.6, 0.8]])


def vectors_with(monkeypatch: pytest.MonkeyPatch, places: int) -> list[float]:
    """Return the first number of the vectors of 20 texts, one a run, by a lane that takes so many runs at once."""
    taken = 0

    async def infer(_caller: Any, _route: Any, inputs: Any) -> list[OutputTensor]:
        nonlocal taken
        if taken == places:
            raise Failure(Code.OVERLOADED, "the lane is full")
        taken += 1
        await asyncio.sleep(0)
        taken -= 1
        text = int(decode_elements(inputs.tensors[0].data)[0])
        return [OutputTensor("FP32", (1, 2), np.array([[text, 0]], np.float32))]

    monkeypatch.setattr(embeddings, "infer_arrays", infer)
    spec = TensorSpec(name="text", datatype="BYTES", shape=(-1,))
    output = TensorSpec(name="embedding", datatype="FP32", shape=(-1, 2))
    plans = InputPlans("m", Signature(inputs=(spec,), outputs=(output,), batching=True), 64)
    manifest = SimpleNamespace(config=SimpleNamespace(rows_max=1))
    route: Any = SimpleNamespace(plans=plans, lane=SimpleNamespace(manifest=manifest))
    caller: Any = SimpleNamespace(count_rejections=lambda *_: nullcontext())
    served = embeddings.Embeddings(caller, cast("Any", None))
    found: list[float] = asyncio.run(served.vectors(route, embedder(plans), list(map(str, range(20)))))[:, 0].tolist()
    return found


def test_runs_that_their_own_request_left_no_room_for_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vectors_with(monkeypatch, 2) == list(range(20))


def test_a_lane_that_others_fill_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failure) as refused:
        vectors_with(monkeypatch, 0)
    assert refused.value.code is Code.OVERLOADED
