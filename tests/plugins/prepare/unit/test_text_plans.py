"""Which requests give texts in place of token ids, and the limits on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import orjson
import pytest

from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.prepared import PreparedPlans, gives_prepared, prepared_for
from millstream.gateway.v2.decode import V2Decoder
from millstream.gateway.v2.schemas import model_metadata, usage_parameters
from millstream.plugins.prepare.gateway.text_plans import (
    PADDED_TOKENS_MAX,
    TEXT_BYTES_MAX,
    TEXTS_BYTES_MAX,
    TEXTS_MAX,
    TOKENS_MAX,
    TOKENS_TOTAL_MAX,
    check_bytes,
    check_tokens,
    rows_padded_max,
    strings_of,
    token_inputs,
)
from millstream.plugins.prepare.gateway.tokenizers import Tokenizers
from millstream.services.errors import Failure
from millstream.services.model.datatypes import encode_elements
from millstream.services.model.manifest import Manifest, ModelConfig, SourceFile
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.model.usage import takes_texts

if TYPE_CHECKING:
    from millstream.services.repository.folder import FolderRepository

IDS, MASK = ("input_ids", "INT64", (-1, -1)), ("attention_mask", "INT64", (-1, -1))


def manifest(*inputs: tuple[str, str, tuple[int, ...]], tokenizer: str | None = "source/tokenizer.json") -> Manifest:
    paths = ["source/model.onnx", *([tokenizer] if tokenizer else [])]
    specs = tuple(TensorSpec(name=name, datatype=datatype, shape=shape) for name, datatype, shape in inputs)
    return Manifest(
        model="m",
        version=1,
        created=1.0,
        digest="0" * 64,
        served=paths[0],
        files=tuple(SourceFile(path=path, size_bytes=1, sha256="0" * 64) for path in paths),
        signature=Signature(
            inputs=specs, outputs=(TensorSpec(name="logits", datatype="FP32", shape=(-1, 3)),), batching=True
        ),
        config=ModelConfig(),
        opset=17,
        ir_version=8,
    )


def plans(of: Manifest) -> InputPlans:
    made = InputPlans(of.model, of.signature, 8)
    made.prepared = text_plans(of)
    return made


def text_plans(of: Manifest) -> PreparedPlans | None:
    return Tokenizers(cast("FolderRepository", None)).plans(of, InputPlans(of.model, of.signature, 8))


def raw(*texts: bytes) -> InputTensor:
    data = encode_elements(list(texts))
    return InputTensor((len(texts),), data, len(data))


@pytest.mark.parametrize(
    ("of", "takes"),
    [
        (manifest(IDS, MASK), True),
        (manifest(IDS, MASK, ("token_type_ids", "INT64", (-1, -1)), tokenizer="imported/tokenizer.json"), True),
        (manifest(("ids", "INT32", (-1, 16))), True),
        (manifest(IDS, MASK, tokenizer=None), False),
        (manifest(IDS, MASK, tokenizer="source/other.json"), False),
        (manifest(IDS, ("pixels", "FP32", (-1, 4))), False),
        (manifest(("text", "INT64", (-1, -1)), MASK), False),  # an input of its own has the name
        (manifest(("input_ids", "INT64", (-1,))), False),
    ],
)
def test_versions_that_take_texts(of: Manifest, takes: bool) -> None:
    assert takes_texts(of) is takes
    assert (text_plans(of) is not None) is takes
    assert ("text_input" in usage_parameters(of).get("parameters", {})) is takes
    assert [spec["name"] for spec in model_metadata(of, [1])["inputs"]] == [spec.name for spec in of.signature.inputs]


def test_only_a_request_that_names_text_is_read_as_texts() -> None:
    with_texts = plans(manifest(IDS, MASK))
    for name, reads in (("text", True), ("text_pair", True), ("texts", False)):
        with pytest.raises(Failure) as unknown:
            with_texts.named(name)
        assert (prepared_for(with_texts, unknown.value) is with_texts.prepared) is reads
        assert "the one BYTES input 'text' to /v2/models/" in unknown.value.message
        assert prepared_for(plans(manifest(IDS, MASK, tokenizer=None)), unknown.value) is None
    assert prepared_for(with_texts, Failure(unknown.value.code, "unexpected inference input 'text'")) is None


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ([("text", "BYTES", [2], ["a", "b"])], ""),
        ([("text", "BYTES", [9], ["a"] * 9)], "batch-size must be <= 8"),
        ([("text", "BYTES", [1, 1], ["a"])], r"Expected \[-1\], got \[1,1\]"),
        ([("text", "FP32", [1], [1.0])], "expects 'BYTES'"),
        ([("text", "BYTES", [1], ["a"]), ("text_pair", "BYTES", [1], ["b"])], "pairs of texts are not tokenized here"),
        ([("text_pair", "BYTES", [1], ["a"])], "pairs of texts are not tokenized here"),
        ([("text", "BYTES", [1], ["a"]), ("input_ids", "INT64", [1, 1], [1])], "leave out 'input_ids'"),
    ],
)
def test_requests_with_texts(inputs: list[tuple[str, str, list[int], list[Any]]], error: str) -> None:
    items = [{"name": n, "datatype": kind, "shape": shape, "data": data} for n, kind, shape, data in inputs]
    decoder = V2Decoder(plans(manifest(IDS, MASK)), 1 << 20).prepared
    assert decoder is not None
    body = orjson.dumps({"inputs": items})
    if error:
        with pytest.raises(Failure, match=error):
            decoder.decode(body, None)
    else:
        call = decoder.decode(body, None)
        assert call.options.rows == 2
        assert strings_of(call.inputs[0]) == ["a", "b"]


def test_rows_of_strings_name_no_input() -> None:
    def are_strings(document: Any) -> bool:
        return gives_prepared(plans(manifest(IDS, MASK)), document)

    assert are_strings({"instances": ["a", "b"]})
    assert are_strings({"inputs": ["a"]})
    assert are_strings({"inputs": "a"})
    others: list[dict[str, Any]] = [{"instances": []}, {"instances": ["a", 1]}, {"inputs": [1]}, {"inputs": {}}, {}]
    for document in others:
        assert not are_strings(document)


def test_limits_of_texts() -> None:
    assert strings_of(raw("Grüße".encode(), b"")) == ["Grüße", ""]
    with pytest.raises(Failure, match=r"'text\[1\]' is not UTF-8"):
        strings_of(raw(b"a", b"\xff"))
    with pytest.raises(Failure, match=rf"'text\[0\]' has {TEXT_BYTES_MAX + 1} bytes"):
        strings_of(raw(b"a" * (TEXT_BYTES_MAX + 1)))
    with pytest.raises(Failure, match="has 0 texts"):
        strings_of(raw())
    with pytest.raises(Failure, match=f"at most {TEXTS_MAX}"):
        strings_of(raw(*[b"a"] * (TEXTS_MAX + 1)))
    with pytest.raises(Failure, match=f"at most {TEXTS_BYTES_MAX} in a request"):
        strings_of(raw(*[b"a" * TEXT_BYTES_MAX] * 17))
    strings_of(raw(*[b"a" * TEXT_BYTES_MAX] * 16))


def test_limits_of_tokens() -> None:
    check_tokens("text", [1, TOKENS_MAX])
    with pytest.raises(Failure, match=r"'text\[1\]' has no token"):
        check_tokens("text", [1, 0])
    with pytest.raises(Failure, match=f"at most {TOKENS_MAX}"):
        check_tokens("text", [TOKENS_MAX + 1])
    with pytest.raises(Failure, match=f"at most {TOKENS_TOTAL_MAX} in a request"):
        check_tokens("text", [TOKENS_MAX] * 37)


def test_token_ids_become_all_inputs() -> None:
    made, mask = token_inputs(plans(manifest(IDS, MASK)), [[5, 6], [7]])
    assert [np.asarray(tensor.data).tolist() for tensor in made.tensors] == [[[5, 6], [7, 0]], [[1, 1], [1, 0]]]
    assert mask.tolist() == [[1, 1], [1, 0]]
    assert made.rows == 2


def test_strings_are_bounded_in_bytes_not_in_characters() -> None:
    check_bytes("input", ["a" * TEXT_BYTES_MAX] * 16)
    with pytest.raises(Failure, match=rf"'input\[1\]' has {TEXT_BYTES_MAX + 2} bytes: at most {TEXT_BYTES_MAX}"):
        check_bytes("input", ["a", "é" * (TEXT_BYTES_MAX // 2 + 1)])
    with pytest.raises(Failure, match=f"'input' has {17 * TEXT_BYTES_MAX} bytes: at most {TEXTS_BYTES_MAX}"):
        check_bytes("input", ["a" * TEXT_BYTES_MAX] * 17)


def test_padding_is_bounded_before_it_is_made() -> None:
    """One long text would pad all others to its length: a request of some megabytes would take hundreds."""
    of = InputPlans("m", manifest(IDS, MASK).signature, 256)
    entries = [[1] * TOKENS_MAX, *[[1]] * (PADDED_TOKENS_MAX // TOKENS_MAX)]
    with pytest.raises(Failure, match=r"129 texts padded to the 8192 tokens of the longest .* at most 1048576"):
        token_inputs(of, entries)
    assert rows_padded_max(of, entries) == 128
    token_inputs(of, entries[:128])
    assert rows_padded_max(of, [[1]]) == PADDED_TOKENS_MAX
