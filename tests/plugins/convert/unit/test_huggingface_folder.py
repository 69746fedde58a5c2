"""What a folder of Hugging Face says, and which are refused, without its libraries."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from millstream.plugins.convert.huggingface_folder import (
    Folder,
    check_safetensors,
    is_folder,
    member_patterns,
    read_folder,
)
from millstream.services.errors import Code, Failure
from millstream.services.ingest.importers import ImportOptions

BERT = {"model_type": "bert", "architectures": ["BertModel"]}
TENSORS = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def safetensors(tensors: Any = TENSORS, data: bytes = bytes(24), header: bytes | None = None) -> bytes:
    text = json.dumps(tensors).encode() if header is None else header
    return struct.pack("<Q", len(text)) + text + data


def folder(path: Path, config: Any = BERT, weights: bytes | None = None, **documents: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(safetensors() if weights is None else weights)
    for name, document in documents.items():
        target = path / name.replace("__", "/")
        target.parent.mkdir(exist_ok=True)
        target.with_suffix(".json").write_text(json.dumps(document))
    return path


def refusal(path: Path, **options: bool) -> str:
    with pytest.raises(Failure) as failure:
        read_folder(path, ImportOptions(**options))
    assert failure.value.code is Code.INVALID
    assert "\n" not in failure.value.message
    return failure.value.message


def read(path: Path, **options: bool) -> Folder:
    return read_folder(path, ImportOptions(**options))


def test_folders_are_recognised_by_what_config_json_says(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    assert is_folder(path)
    assert not is_folder(path / "config.json")
    (path / "model.onnx").write_bytes(b"")
    assert is_folder(path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"class_name": "Functional"}')
    assert not is_folder(tmp_path / "other")


def test_the_first_architecture_is_read(tmp_path: Path) -> None:
    for named, said in ((["BertModel", "Other"], "BertModel"), ([], ""), (None, ""), ("BertModel", ""), ([7], "7")):
        found = read(folder(tmp_path, {"model_type": "bert", "architectures": named}))
        assert (found.architecture, found.pipeline) == (said, None)


@pytest.mark.parametrize(
    "pooling", [{"pooling_mode": "mean"}, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}]
)
def test_the_modules_of_sentence_transformers_are_read(tmp_path: Path, pooling: Any) -> None:
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "sentence_transformers.base.modules.normalize.Normalize", "path": "2_Normalize"},
    ]
    path = folder(
        tmp_path,
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        modules=modules,
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": True},
        tokenizer_config={"model_max_length": 512},
        **{"1_Pooling__config": pooling},
    )
    found = read(path)
    assert found.pipeline == (("mean",), (), True)
    assert (found.architecture, found.tokens_max, found.lower_case) == ("BertForMaskedLM", 256, True)


def test_modules_that_are_unknown_are_named(tmp_path: Path) -> None:
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]
    last: dict[str, Any] = {"1_Pooling__config": {"pooling_mode": "lasttoken"}}
    path = folder(tmp_path, modules=modules, **last)
    assert "'lasttoken'" in refusal(path)
    folder(tmp_path, modules=[*modules[:1], {"type": "a.LSTM", "path": "1"}])
    assert "'LSTM'" in refusal(path)
    folder(tmp_path, modules=modules[:1])
    assert "no Pooling" in refusal(path)
    folder(tmp_path, modules=[{"type": "a.Transformer", "path": "../elsewhere"}])
    assert "leads out" in refusal(path)
    folder(tmp_path, modules={})
    assert "modules.json" in refusal(path)


def test_weights_as_pickles_alone_are_refused_unless_allowed(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    said = refusal(path)
    assert "pytorch_model.bin" in said
    assert "--allow-pickle" in said
    assert read(path, allow_pickle=True).pickled
    (path / "pytorch_model.bin").unlink()
    assert "no weights" in refusal(path)


def test_an_adapter_is_not_left_out(tmp_path: Path) -> None:
    path = folder(tmp_path, adapter_config={"peft_type": "LORA"})
    assert "merge_and_unload" in refusal(path)
    assert "adapter_config.json" in member_patterns(path)  # else the client would leave it out


def test_weights_in_several_files(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "model.safetensors").rename(path / "a.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "a.safetensors"}}')
    assert not read(path).pickled
    index.write_text('{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}')
    assert "b.safetensors is missing" in refusal(path)
    index.write_text('{"weight_map": {"a": "../a.safetensors"}}')
    assert "leads out" in refusal(path)


def test_code_of_the_folder_is_noticed(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "configuration_x.XConfig", "AutoModel": "someone/repo--modeling_x.XModel"}
    found = read(folder(tmp_path, {**BERT, "auto_map": auto_map}))
    assert found.code == "configuration_x.py, modeling_x.py"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "header says"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (struct.pack("<Q", 1 << 62) + b"{}", "header says"),
        (safetensors(header=b"not json"), "cannot be read"),
        (safetensors(header=b"[]"), "cannot be read"),
        (safetensors({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 23]}}), "wrong place"),
        (safetensors({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 24]}}), "wrong place"),
        (safetensors({"a": {"dtype": "F32", "shape": [-6], "data_offsets": [0, 24]}}), "cannot be read"),
        (safetensors({"a": {"dtype": "F13", "shape": [6], "data_offsets": [0, 24]}}), "cannot be read"),
        (safetensors({**TENSORS, "b": TENSORS["a"]}, bytes(48)), "wrong place"),
        (safetensors(data=bytes(20)), "cut short"),
        (safetensors(data=bytes(30)), "cut short"),
    ],
)
def test_headers_of_safetensors_that_lie_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(Failure, match=said):
        check_safetensors(path)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 10**9},
        {"n_layers": -(10**9)},
        {"num_labels": 10**9},
        {"vocab_size": 10**12},
        {"text_config": {"encoder": {"num_layers": 5000}}},
        {"hidden_size": 10**400},
    ],
)
def test_sizes_that_no_model_has_are_refused(tmp_path: Path, sizes: dict[str, Any]) -> None:
    said = refusal(folder(tmp_path, {**BERT, **sizes}))
    assert "is it damaged?" in said
    assert len(said) < 300
    assert read(folder(tmp_path, {**BERT, "num_hidden_layers": 96, "vocab_size": 1_000_000, "eps": 1e30})).architecture


def test_documents_that_are_damaged_are_named(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "config.json").write_text("[]")
    assert "config.json is not a JSON object" in refusal(path)
    (path / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal(path)
    (path / "config.json").write_text("[" * 100_000)
    assert "config.json" in refusal(path)
