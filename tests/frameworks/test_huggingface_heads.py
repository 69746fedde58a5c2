"""What the heads of Hugging Face's models answer, and that none is left out: small models that transformers saves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from millstream.client.client import Client
from tests.frameworks.test_huggingface import fast_tokenizer, refusal, small
from tests.kit.stack import Stack, running_stack

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TEXTS = ["a good film", "the film was bad, bad, bad", "unheard words here", "good"]
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "pad_token_id": 98, "bos_token_id": 1}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    torch.manual_seed(1)
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, key=stack.key) as client:
        yield client


def edit(folder: Path, **changes: Any) -> None:
    """Change members of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def predictions(stack: Stack, name: str) -> Any:
    reply = stack.http.post(f"/v1/models/{name}:predict", json={"instances": TEXTS})
    assert reply.status_code == 200, reply.text
    return reply.json()["predictions"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("GPT2LMHeadModel", GPT2),
        ("BertForMaskedLM", {}),
        ("BertForQuestionAnswering", {}),
        ("BertForNextSentencePrediction", {}),
        ("BertLMHeadModel", {"is_decoder": True}),
        ("GPT2DoubleHeadsModel", GPT2),
        ("BartModel", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}),
    ],
)
def test_heads_that_are_not_served_are_refused(client: Client, tmp_path: Path, name: str, more: Any) -> None:
    small(tmp_path / "model", name, **more)
    said = refusal(client, tmp_path / "model")
    assert repr(name) in said
    assert "AutoModelForSequenceClassification" in said


def test_a_head_is_not_left_out_by_another_name(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    small(folder, "GPT2LMHeadModel", tie_word_embeddings=False, **GPT2)
    edit(folder, architectures=["GPT2Model"])
    assert "'lm_head.weight' among them" in refusal(client, folder)
    small(folder, "BertForSequenceClassification")
    for architectures in (["BertModel"], None):
        edit(folder, architectures=architectures)
        assert "has no place for" in refusal(client, folder)
    edit(folder, architectures=["RobertaForSequenceClassification"])
    assert "which is of another model_type" in refusal(client, folder)


def test_weights_that_nothing_uses_are_refused(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    small(folder, "BertModel")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "adapter.weight": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    assert "'adapter.weight' among them" in refusal(client, folder)


def test_weights_that_a_head_needs_are_never_random(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    small(folder, "DebertaV2ForSequenceClassification", pos_att_type=["c2p"], relative_attention=True)
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("pooler.")}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    assert "'pooler.dense.bias' is missing" in refusal(client, folder)


def test_tied_weights_are_no_missing_ones(client: Client, tmp_path: Path) -> None:
    model = small(tmp_path / "model", "GPT2Model", **GPT2)
    client.push("states", tmp_path / "model", wait_s=300)
    ids = np.array([[5, 6, 7]])
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids)).last_hidden_state.numpy()
    found = client.predict("states", {"input_ids": ids, "attention_mask": np.ones_like(ids)})["last_hidden_state"]
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_the_encoder_of_a_model_with_a_decoder_embeds(client: Client, tmp_path: Path) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = small(tmp_path / "model", "T5EncoderModel", **sizes)
    client.push("encoder", tmp_path / "model", wait_s=300)
    ids = np.array([[5, 6, 7]])
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids)).last_hidden_state.numpy()
    found = client.predict("encoder", {"input_ids": ids, "attention_mask": np.ones_like(ids)})["last_hidden_state"]
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-4)
    small(tmp_path / "whole", "T5Model", **sizes)
    assert "'T5Model', an encoder with a decoder" in refusal(client, tmp_path / "whole")


def test_code_of_a_known_model_type_is_refused_unless_allowed(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    small(folder, "BertModel")
    edit(folder, architectures=["MineModel"], auto_map={"AutoModel": "code.MineModel"})
    (folder / "code.py").write_text("raise SystemError('it ran')\n")
    assert "--allow-code" in refusal(client, folder)
    edit(folder, architectures=["MineLM"], auto_map={"AutoModelForCausalLM": "code.MineLM"})
    assert "'MineLM'" in refusal(client, folder, allow_code=True)


@pytest.mark.parametrize(
    ("id2label", "said"),
    [
        ({"0": "bad", "2": "good"}, "has no label for class 1"),
        ({"0": "bad", "1": "go\nod"}, "'go\\nod', is no line of text"),
        ({"0": "bad", "1": " "}, "is no line of text"),
        ({"0": "bad", "1": None}, "is no line of text"),
        ({"0": "bad", "1": {"name": "good"}}, "is no line of text"),
        ({"0": "bad", "1": "\ud800"}, "is no line of text"),
        ({"0": "bad", "1": "g" * 513}, "has 513 characters"),
        ({"0": "bad", "1": "good", "2": "more"}, "weights are not those"),
        ({"zero": "bad", "1": "good"}, "cannot load the model"),
        ({}, "not those|labels|classes"),
    ],
)
def test_labels_that_do_not_fit_are_refused(client: Client, tmp_path: Path, id2label: Any, said: str) -> None:
    small(tmp_path / "model", "BertForSequenceClassification")
    edit(tmp_path / "model", id2label=id2label, label2id=None)
    found = refusal(client, tmp_path / "model")
    assert any(part in found for part in said.split("|")), found


def test_labels_that_are_odd_are_answered(stack: Stack, client: Client, tmp_path: Path) -> None:
    """Equal labels, numbers, letters of other scripts, quotes and markup are text."""
    names = {"0": "same", "1": "same", "2": 7, "3": "größer 👨\u200d👩", "4": '<b>"quoted"\\</b>', "5": "LABEL_0"}
    folder = tmp_path / "model"
    model = small(folder, "BertForSequenceClassification", num_labels=6)
    edit(folder, id2label=names, label2id=None)
    fast_tokenizer("WordLevel", TEXTS).save_pretrained(folder)
    with torch.no_grad():  # so that every class wins for some text
        model.classifier.weight.mul_(40)
    model.config.id2label = {int(at): name for at, name in names.items()}
    weights = load_file(folder / "model.safetensors")
    weights["classifier.weight"] = model.classifier.weight.detach()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    client.push("odd", folder, wait_s=300)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    judge = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, truncation=True)
    for found, expected in zip(predictions(stack, "odd"), judge(TEXTS), strict=True):
        assert found["label"] == str(expected["label"])
        assert np.isclose(found["score"], expected["score"], atol=1e-4)


def test_every_label_of_a_text_with_several(stack: Stack, client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = small(folder, "BertForSequenceClassification", num_labels=4, problem_type="multi_label_classification")
    tokenizer = fast_tokenizer("WordLevel", TEXTS)
    tokenizer.save_pretrained(folder)
    version = client.push("several", folder, wait_s=300)
    assert version["batching_decided"] == "proven"
    assert [spec["shape"] for spec in version["outputs"]] == [[-1, 4]] * 3
    judge = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)
    for found, expected in zip(predictions(stack, "several"), judge(TEXTS), strict=True):
        assert found["label"] == [one["label"] for one in expected]
        assert np.allclose(found["score"], [one["score"] for one in expected], atol=1e-4)


@pytest.mark.parametrize("more", [{"num_labels": 1}, {"num_labels": 2, "problem_type": "regression"}])
def test_a_regression_stays_a_number(stack: Stack, client: Client, tmp_path: Path, more: Any) -> None:
    folder = tmp_path / "model"
    model = small(folder, "BertForSequenceClassification", **more)
    tokenizer = fast_tokenizer("WordLevel", TEXTS)
    tokenizer.save_pretrained(folder)
    version = client.push("number", folder, wait_s=300)
    assert [spec["name"] for spec in version["outputs"]] == ["logits"]
    with torch.inference_mode():
        expected = [model(**tokenizer(text, return_tensors="pt")).logits[0].numpy() for text in TEXTS]
    assert np.allclose(predictions(stack, "number"), expected, atol=1e-4)


def test_a_label_for_each_token(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = small(folder, "BertForTokenClassification", num_labels=3, problem_type="multi_label_classification")
    version = client.push("tokens", folder, wait_s=300)
    assert version["batching_decided"] == "proven"
    assert [spec["shape"] for spec in version["outputs"]] == [[-1, -1], [-1, -1], [-1, -1, 3]]
    ids = np.random.default_rng(1).integers(5, 90, (2, 7))
    mask = np.ones_like(ids)
    with torch.inference_mode():
        logits = model(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    found = client.predict("tokens", given)
    assert set(found) == {"label", "score"}
    scores, best = logits.softmax(-1).max(-1)
    assert np.allclose(found["score"], scores.numpy(), atol=1e-4)
    assert [[str(one) for one in row] for row in _text(found["label"])] == [
        [f"LABEL_{at}" for at in row] for row in best.tolist()
    ]


def test_padding_is_that_of_the_model(stack: Stack, client: Client, tmp_path: Path) -> None:
    """A head that finds the last token by the padding token answers texts of one request as each alone."""
    folder = tmp_path / "model"
    model = small(folder, "GPT2ForSequenceClassification", num_labels=3, **GPT2)
    tokenizer = fast_tokenizer("WordLevel", TEXTS)
    tokenizer.save_pretrained(folder)
    client.push("last", folder, wait_s=300)
    judge = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    alone = [judge(text)[0] for text in TEXTS]
    for found, expected in zip(predictions(stack, "last"), alone, strict=True):
        assert found["label"] == expected["label"]
        assert np.isclose(found["score"], expected["score"], atol=1e-4)


def test_labels_over_every_protocol(stack: Stack, client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    small(folder, "BertForSequenceClassification", id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    fast_tokenizer("WordLevel", TEXTS).save_pretrained(folder)
    client.push("film", folder, wait_s=300)
    assert client.push("film", folder, wait_s=300)["version"] == 1  # the same files, though the import added labels
    document = stack.http.get("/v2/models/film").json()
    assert [spec["name"] for spec in document["outputs"]] == ["label", "score", "logits"]
    expected = predictions(stack, "film")
    assert {one["label"] for one in expected} <= {"bad", "good"}
    rows = stack.http.post("/invocations", json={"instances": TEXTS}, headers={"X-Amzn-SageMaker-Target-Model": "film"})
    assert rows.json()["predictions"] == expected
    columns = stack.http.post("/v1/models/film:predict", json={"inputs": TEXTS}).json()["outputs"]
    assert columns == {name: [one[name] for one in expected] for name in ("label", "score")}
    one = stack.http.post("/predictions/film", json={"text": TEXTS[0]}).json()
    assert one == expected[0]
    generated = stack.http.post("/v2/models/film/generate", json={"text": TEXTS[0]}).json()
    assert generated["label"] == expected[0]["label"]
    classified = stack.http.post("/v1/models/film:classify", json={"examples": [{"text": TEXTS[0]}]}).json()
    assert [label for label, _ in classified["result"][0]] == ["bad", "good"]
    given = {"name": "text", "datatype": "BYTES", "shape": [1], "data": TEXTS[:1]}
    best = {"name": "logits", "parameters": {"classification": 1}}
    reply = stack.http.post("/v2/models/film/infer", json={"inputs": [given], "outputs": [best]}).json()
    assert reply["outputs"][0]["data"][0].endswith(expected[0]["label"])
    assert len(reply["outputs"]) == 1


def _text(array: Any) -> Any:
    return np.vectorize(lambda one: one.decode() if isinstance(one, bytes) else one, otypes=[object])(array)
