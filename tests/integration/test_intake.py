"""Every way in takes the same files and folders as the same model, and refuses the same ones for the same reason."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tokenizers
from onnx import TensorProto, helper, numpy_helper

from millstream.client.async_client import AsyncClient
from millstream.client.client import Client
from millstream.services.cli.commands.serve import discover
from millstream.services.cli.preload import FailedModel, ServedModel, load_models, parse_preload
from millstream.services.errors import Failure
from tests.kit import models
from tests.kit.stack import Stack, running_stack

WAIT_S = 240


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    imports = folder / "imports"
    imports.mkdir()
    settings = {"import_dir": imports}
    with running_stack(folder, settings=settings) as running:
        yield running


def external(path: Path) -> None:
    """Write the model as torch.onnx.export does: its weights in a file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    model = onnx.load(models.scale(path.parent / "whole"))
    (path.parent / "whole").unlink()
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)


def inline(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    models.scale(path)


def layout(write: Callable[[Path], None], name: str, *others: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        write(folder / name)
        for other in others:
            path = folder / other
            path.parent.mkdir(parents=True, exist_ok=True)
            if other.endswith(".onnx"):
                models.scale(path, factor=9.0)
            else:
                path.write_bytes(b"no part of the model")

    return make


#: layout -> how it is written, and whether other models are named
SERVED = {
    "one file": layout(inline, "net.onnx", "README.md"),
    "weights beside it": layout(external, "cls.onnx", "train.csv"),
    "a version": layout(inline, "1/model.onnx"),
    "versions": layout(external, "10/model.onnx", "9/model.onnx"),
    "export": layout(external, "export/model.onnx", "notes.txt"),
    "onnx": layout(external, "onnx/model.onnx", "onnx/model_quantized.onnx"),
    "a folder in it": layout(external, "net/model.onnx"),
    "one that is called model": layout(inline, "model.onnx", "other.onnx"),
}
NOTED = {"versions", "onnx", "one that is called model"}


def two(folder: Path) -> None:
    for name in ("decoder.onnx", "encoder.onnx"):
        inline(folder / name)


def missing(folder: Path) -> None:
    external(folder / "model.onnx")
    (folder / "model.onnx.data").unlink()


def short(folder: Path) -> None:
    external(folder / "model.onnx")
    (folder / "model.onnx.data").write_bytes(b"x")


def outside(folder: Path) -> None:
    external(folder / "model.onnx")
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content.replace(b"model.onnx.data", b"../../../passwd"))


def triton(folder: Path) -> None:
    inline(folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text("")


def nothing(folder: Path) -> None:
    (folder / "notes.txt").write_bytes(b"x")


REFUSED = {
    "two": (two, "there are 2 ONNX files (decoder.onnx, encoder.onnx): name the one to serve model.onnx, or push it"),
    "missing": (missing, "the model's weights are in 'model.onnx.data', which is missing beside the model"),
    "short": (short, "'model.onnx.data' has 1 bytes, but the model reads up to byte 4"),
    "outside": (outside, "'../../../passwd', which is not a path below the model's folder"),
    "triton": (triton, "this is a model's folder of a Triton repository (config.pbtxt and numbered versions)"),
    "nothing": (nothing, "nothing in it is known as one (notes.txt)"),
}


def pushed(stack: Stack, name: str, folder: Path) -> dict[str, Any]:
    with Client(stack.url, key=stack.key) as client:
        return dict(client.push(name, folder, wait_s=WAIT_S))


def preloaded(stack: Stack, name: str, folder: Path) -> dict[str, Any]:
    async def load() -> ServedModel | FailedModel:
        async with AsyncClient(stack.url, key=stack.key) as client:
            [outcome] = [one async for one in load_models(client, parse_preload(f"{name}={folder}", example=False))]
            return outcome

    outcome = asyncio.run(load())
    if isinstance(outcome, FailedModel):
        raise Failure(code=None, message=outcome.reason)  # type: ignore[arg-type]
    return document(stack, name)


def served(stack: Stack, name: str, folder: Path) -> dict[str, Any]:
    preload, repository = discover(folder, name)
    assert repository is None
    assert preload is not None
    return preloaded(stack, name, Path(preload.partition("=")[2]))


def zipped(stack: Stack, name: str, folder: Path) -> dict[str, Any]:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder))
    return sent(stack, name, content.getvalue())


def tarred(stack: Stack, name: str, folder: Path) -> dict[str, Any]:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        archive.add(folder, ".")
    return sent(stack, name, content.getvalue())


def sent(stack: Stack, name: str, content: bytes) -> dict[str, Any]:
    reply = stack.http.put(f"/admin/v1/models/{name}/versions/1", params={"wait": WAIT_S}, content=content)
    if not reply.is_success:
        raise Failure(code=None, message=reply.json()["error"])  # type: ignore[arg-type]
    made: dict[str, Any] = reply.json()
    return made


def registered(stack: Stack, name: str, folder: Path) -> dict[str, Any]:
    shutil.copytree(folder, stack.home.parent / "imports" / name)
    reply = stack.http.post("/models", params={"url": name, "model_name": name, "synchronous": "true"})
    if not reply.is_success:
        raise Failure(code=None, message=reply.json()["message"])  # type: ignore[arg-type]
    return document(stack, name)


def document(stack: Stack, name: str) -> dict[str, Any]:
    [version] = stack.http.get(f"/admin/v1/models/{name}").json()["versions"]
    return dict(version)


WAYS = {"push": pushed, "preload": preloaded, "serve": served, "zip": zipped, "tar": tarred, "register": registered}


def files(stack: Stack, name: str) -> list[str]:
    """Return the digests of the files that a version's workers read."""
    manifest = json.loads((stack.home / "repository" / "models" / name / "1" / "manifest.json").read_bytes())
    return sorted(file["sha256"] for file in manifest["files"])


@pytest.mark.parametrize("name", SERVED)
def test_a_layout_is_the_same_model_whichever_way_it_comes(stack: Stack, tmp_path: Path, name: str) -> None:
    (tmp_path / "given").mkdir()
    SERVED[name](tmp_path / "given")
    found = {}
    for way, come in WAYS.items():
        model = f"{way}-{name.replace(' ', '-')}"
        made = come(stack, model, tmp_path / "given")
        assert made["state"] == "ready", (way, made)
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
        reply = stack.http.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]}).json()
        assert reply["outputs"][0]["data"] == [2.0, 4.0], way
        found[way] = (files(stack, model), made["inputs"], made["outputs"], made["batching"])
        if name in NOTED and way in {"push", "zip", "tar"}:
            assert any("is served, not " in note for note in made["notes"]), (way, made["notes"])
        assert stack.http.delete(f"/admin/v1/models/{model}").status_code == 204
    assert all(one == found["push"] for one in found.values()), found


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_is_refused_for_the_same_reason_whichever_way_it_comes(
    stack: Stack, tmp_path: Path, name: str
) -> None:
    (tmp_path / "given").mkdir()
    write, says = REFUSED[name]
    write(tmp_path / "given")
    for way, come in WAYS.items():
        with pytest.raises(Failure) as refusal:
            come(stack, f"bad-{way}-{name}", tmp_path / "given")
        assert says in refusal.value.message, way
        assert "\n" not in refusal.value.message
    assert "bad-" not in stack.http.get("/admin/v1/models").text


def test_a_file_alone_takes_its_weights_along_where_the_client_sees_them(stack: Stack, tmp_path: Path) -> None:
    external(tmp_path / "cls.onnx")
    with pytest.raises(
        Failure, match=r"'cls.onnx.data', which is missing beside the model; `millstream push` takes it"
    ):
        sent(stack, "alone", (tmp_path / "cls.onnx").read_bytes())
    for name, come in (("push-file", pushed), ("preload-file", preloaded)):
        assert come(stack, name, tmp_path / "cls.onnx")["state"] == "ready"
        assert stack.http.delete(f"/admin/v1/models/{name}").status_code == 204


#: tokens of the hub's model
WORDS = {"[UNK]": 0, "the": 1, "mill": 2, "turns": 3, "stream": 4}
TEXTS = ["the mill turns", "stream", "the stream turns the mill"]
TABLE = np.random.default_rng(1).standard_normal((len(WORDS), 4)).astype(np.float32)


def hub(folder: Path, mode: str = "cls") -> Path:
    """Write a folder as the hub has it: an ONNX file and its variants, a tokenizer, and what follows the encoder."""
    names = ("input_ids", "attention_mask")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"]) for name in names]
    states = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "tokens", 4])
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"])]
    graph = helper.make_graph(nodes, "encoder", inputs, [states], [numpy_helper.from_array(TABLE, "table")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "onnx").mkdir(parents=True)
    outside: dict[str, Any] = {"save_as_external_data": True, "location": "model.onnx_data", "size_threshold": 0}
    onnx.save(model, folder / "onnx" / "model_fp16.onnx")
    onnx.save(model, folder / "onnx" / "model.onnx", **outside)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    config = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": len(WORDS)}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4}))
    (folder / "model.safetensors").write_bytes(b"weights that are not sent")
    steps = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": kind} for at, (path, kind) in enumerate(steps.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules).replace('"T', '"sentence_transformers.models.T'))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    return folder


def exported(folder: Path, nodes: list[Any], output: Any) -> None:
    """Replace the ONNX file of a folder of the hub by one that computes `nodes` from the states of the tokens."""
    shutil.rmtree(folder / "onnx")
    (folder / "modules.json").unlink()
    names = ("input_ids", "attention_mask")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"]) for name in names]
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["states"]), *nodes]
    graph = helper.make_graph(nodes, "encoder", inputs, [output], [numpy_helper.from_array(TABLE, "table")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "model.onnx")


def vectors(mode: str) -> np.ndarray[Any, Any]:
    rows = []
    for text in TEXTS:
        states = TABLE[[WORDS[word] for word in text.split()][:4]]  # it has four positions
        vector = {"cls": states[0], "mean": states.mean(0), "max": states.max(0)}[mode]
        rows.append(vector / np.linalg.norm(vector))
    return np.array(rows)


@pytest.mark.parametrize("mode", ["cls", "mean", "max"])
@pytest.mark.parametrize("way", ["push", "zip"])
def test_a_folder_of_the_hub_embeds_texts_as_its_modules_say(stack: Stack, tmp_path: Path, mode: str, way: str) -> None:
    name = f"hub-{mode}-{way}"
    made = WAYS[way](stack, name, hub(tmp_path / "hub", mode))
    assert made["imported"]["importer"] == "Hugging Face ONNX"
    assert [output["name"] for output in made["outputs"]] == ["sentence_embedding"]
    assert made["batching_decided"] == "proven"
    assert any("onnx/model.onnx is served, not onnx/model_fp16.onnx" in note for note in made["notes"])
    reply = stack.http.post("/v1/embeddings", json={"model": name, "input": TEXTS})
    assert reply.status_code == 200, reply.text
    found = [one["embedding"] for one in reply.json()["data"]]
    np.testing.assert_allclose(found, vectors(mode), atol=1e-5)
    assert stack.http.delete(f"/admin/v1/models/{name}").status_code == 204


def test_of_a_folder_of_the_hub_its_weights_for_torch_are_not_sent(stack: Stack, tmp_path: Path) -> None:
    made = pushed(stack, "hub-sent", hub(tmp_path / "hub"))
    source = stack.home / "repository" / "models" / "hub-sent" / str(made["version"]) / "source"
    names = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    belonging = {"1_Pooling/config.json", "config.json", "modules.json", "tokenizer.json"}
    assert names == {*belonging, "onnx/model.onnx", "onnx/model.onnx_data"}
    again = pushed(stack, "hub-sent", tmp_path / "hub")
    assert (again["version"], again["existing"]) == (made["version"], True)
    assert stack.http.delete("/admin/v1/models/hub-sent").status_code == 204


def test_a_classifier_of_the_hub_answers_labels(stack: Stack, tmp_path: Path) -> None:
    folder = hub(tmp_path / "hub")
    first = helper.make_node("Gather", ["states", "zero"], ["logits"], axis=1)
    zero = helper.make_node("Constant", [], ["zero"], value_int=0)
    exported(folder, [zero, first], helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 4]))
    labels = {str(at): f"class {at}" for at in range(4)}
    config = json.loads((folder / "config.json").read_bytes())
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": labels}
    (folder / "config.json").write_text(json.dumps(config))
    pushed(stack, "hub-classes", folder)
    text = {"name": "text", "shape": [3], "datatype": "BYTES", "data": TEXTS}
    reply = stack.http.post("/v2/models/hub-classes/infer", json={"inputs": [text]}).json()
    best = [labels[str(int(TABLE[WORDS[one.split()[0]]].argmax()))] for one in TEXTS]
    assert next(one["data"] for one in reply["outputs"] if one["name"] == "label") == best
    assert stack.http.delete("/admin/v1/models/hub-classes").status_code == 204


def test_an_export_that_ignores_its_mask_embeds_no_texts(stack: Stack, tmp_path: Path) -> None:
    """What torch.onnx.export makes of an example without padding: the mask is an input, and nothing uses it."""
    folder = hub(tmp_path / "hub", "mean")
    modules = (folder / "modules.json").read_text()
    middle = helper.make_node("ReduceMean", ["states"], ["middle"], axes=[1])
    centred = helper.make_node("Sub", ["states", "middle"], ["last_hidden_state"])
    states = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "tokens", 4])
    exported(folder, [middle, centred], states)
    (folder / "modules.json").write_text(modules)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    with pytest.raises(Failure, match="padding changes what the model answers, though its attention mask is 0 there"):
        pushed(stack, "hub-unmasked", folder)
