"""Tokenizers that explode, hang or crash: they end their own process, and nobody else's texts."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
import zipfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream.gateway.access.principal import CALLER, Principal
from millstream.plugins.prepare.gateway.tokenizers import ENDS_MAX, PROCESSES_MAX, Tokenizers
from millstream.plugins.prepare.tokenizer_process import Encoded
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.repository.folder import FolderRepository
from tests.kit import models
from tests.kit.stack import Stack, assert_quiet, children
from tests.kit.wait import wait_until

VOCABULARY = {"[UNK]": 0, "[PAD]": 1, "a": 2, "mill": 3, "turns": 4}
SPLIT = {"type": "Whitespace"}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def tokenizer(normalizers: list[dict[str, Any]] | None = None, pre_tokenizer: dict[str, Any] | None = None) -> str:
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": pre_tokenizer or SPLIT,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "[UNK]"},
    }
    return json.dumps(document)


#: more digits than a text of the trial has, so that the upload passes
TRIGGER = "7" * 100
TIMES = [replace({"String": "a"}, "a" * 10)]
EXPLODES = tokenizer([replace({"Regex": r"\d{100}"}, "7" * 1000)] * 12)
ENDED = {Code.INVALID, Code.EXPIRED}  # it took too much memory, or too long before it did


def archive(model: Path, content: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        packed.write(model, "model.onnx")
        packed.writestr("tokenizer.json", content)
    return file.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.embeddings(tmp_path_factory.mktemp("models") / "tokens.onnx", pooled=True, types=True)


def asked(stack: Stack, name: str, text: str) -> tuple[int, str]:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}
    reply = stack.http.post(f"/v2/models/{name}/infer", json={"inputs": [tensor]}, timeout=60)
    return reply.status_code, reply.text


BOMBS = {
    "10^4": TIMES * 4,
    "10^9": TIMES * 9,
    "2^40, slowly": [replace({"Regex": "a"}, "aa")] * 40,
    "of what it looks for": [replace({"String": "\u2603\u2604"}, "\u2603\u2604" * 100)] * 6,
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_upload_whose_normalizer_multiplies_text_is_refused(stack: Stack, model: Path, name: str) -> None:
    content = archive(model, tokenizer(BOMBS[name]))
    reply = stack.http.post("/admin/v1/models/tk-bomb/versions", content=content, timeout=60)
    assert reply.status_code == 400, reply.text
    assert "the normalizer of the tokenizer.json makes" in reply.text or "for texts of a few letters" in reply.text
    assert stack.http.get("/admin/v1/models/tk-bomb").status_code == 404


def test_a_text_that_explodes_is_an_error_beside_good_traffic(stack: Stack, model: Path) -> None:
    for name, content in (("tk-good", tokenizer()), ("tk-evil", EXPLODES)):
        path = model.with_name(f"{name}.zip")
        path.write_bytes(archive(model, content))
        stack.push(name, path)
    gateways = {name: pid for name, pid in stack.pids().items() if name.startswith("gateway")}
    replies: list[tuple[int, str]] = []
    over = threading.Event()

    def good() -> None:
        while not over.is_set():
            replies.append(asked(stack, "tk-good", "the mill turns"))

    thread = threading.Thread(target=good)
    thread.start()
    try:
        assert asked(stack, "tk-evil", "mill")[0] == 200
        status, said = asked(stack, "tk-evil", TRIGGER)
        assert status in {400, 504}, said
        assert "MiB of memory" in said or "s to tokenize" in said
        assert asked(stack, "tk-evil", "mill")[0] == 200
    finally:
        over.set()
        thread.join()
    assert {status for status, _ in replies} == {200}
    assert {name: pid for name, pid in stack.pids().items() if name.startswith("gateway")} == gateways
    for pid in gateways.values():
        assert "/tokenizers/" not in Path(f"/proc/{pid}/maps").read_text()
    assert_quiet(stack)


@pytest.fixture
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """End what takes long after a second: of this process, not of the stack's gateways."""
    monkeypatch.setattr("millstream.plugins.prepare.tokenizer_client.RUN_S_MAX", 1.0)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Callable[[str, str], Manifest]]:
    """Writes the tokenizer of a version, whose manifest it returns; no process is left in the end."""
    before = set(children(os.getpid()))

    def write(name: str, content: str) -> Manifest:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(content)
        return cast("Manifest", SimpleNamespace(model=name, version=1, served="model.onnx", content_id=name))

    yield write
    wait_until(lambda: set(children(os.getpid())) <= before, what="no process of a tokenizer is left")


def run(tmp_path: Path, use: Callable[[Tokenizers], Awaitable[None]], **options: float) -> None:
    files = cast("FolderRepository", SimpleNamespace(local_path=lambda name, _version: tmp_path / name))

    async def main() -> None:
        tokenizers = Tokenizers(files, **options)
        try:
            await use(tokenizers)
        finally:
            await tokenizers.stop()

    asyncio.run(main())


async def failure(asking: Awaitable[object]) -> Failure:
    with pytest.raises(Failure) as caught:
        await asking
    return caught.value


Repositories = Callable[[str, str], Manifest]


@pytest.mark.usefixtures("_short_runs")
def test_requests_of_one_message_get_their_own_answers(tmp_path: Path, repository: Repositories) -> None:
    """The one that explodes gets the error; those that went to the process with it are asked again."""
    evil = repository("evil", EXPLODES)

    async def use(tokenizers: Tokenizers) -> None:
        texts = [["mill"], [TRIGGER], ["a mill", "turns"], []]
        found = await asyncio.gather(*(tokenizers.encode(evil, one) for one in texts), return_exceptions=True)
        assert found[0] == ([1], [[3]])
        assert isinstance(found[1], Failure)
        assert found[1].code in ENDED
        assert found[2] == ([2, 1], [[2, 3], [4]])
        assert found[3] == ([], [])

    run(tmp_path, use)


@pytest.mark.usefixtures("_short_runs")
def test_texts_that_end_the_process_again_and_again_pause_its_version_alone(
    tmp_path: Path, repository: Repositories
) -> None:
    evil, good = repository("evil", EXPLODES), repository("good", tokenizer())

    async def use(tokenizers: Tokenizers) -> None:
        for _ in range(ENDS_MAX):
            assert (await failure(tokenizers.encode(evil, [TRIGGER]))).code in ENDED
        refused = await failure(tokenizers.encode(evil, ["mill"]))
        assert refused.code is Code.UNAVAILABLE
        assert refused.retry_after_s
        assert await tokenizers.encode(good, ["mill"]) == ([1], [[3]])

    run(tmp_path, use)


@pytest.mark.usefixtures("_short_runs")
def test_one_that_hangs_is_ended_and_others_go_on(tmp_path: Path, repository: Repositories) -> None:
    hangs, good = repository("hangs", EXPLODES), repository("good", tokenizer())

    async def use(tokenizers: Tokenizers) -> None:
        assert await tokenizers.encode(hangs, ["mill"]) == ([1], [[3]])
        hung = asyncio.create_task(failure(tokenizers.encode(hangs, [TRIGGER])))
        assert await tokenizers.encode(good, ["mill"]) == ([1], [[3]])
        assert (await hung).code is Code.EXPIRED
        assert (await tokenizers.encode(hangs, ["mill"]))[0] == [1]

    run(tmp_path, use)


def test_processes_are_bounded_and_the_least_recently_used_ends(tmp_path: Path, repository: Repositories) -> None:
    manifests = [repository(f"m{number}", tokenizer()) for number in range(PROCESSES_MAX + 2)]

    async def use(tokenizers: Tokenizers) -> None:
        for manifest in manifests:
            assert await tokenizers.encode(manifest, ["mill"]) == ([1], [[3]])
            assert len(tokenizers._versions) <= PROCESSES_MAX
        assert await tokenizers.encode(manifests[0], ["turns"]) == ([1], [[4]])

    run(tmp_path, use)


@pytest.mark.usefixtures("_short_runs")
def test_many_that_hang_for_one_key_do_not_refuse_the_texts_of_another(
    tmp_path: Path, repository: Repositories
) -> None:
    hanging = [repository(f"m{number}", EXPLODES) for number in range(PROCESSES_MAX)]
    more, good = repository("more", tokenizer()), repository("good", tokenizer())

    def calls(name: str) -> None:
        CALLER.set(cast("Principal", SimpleNamespace(counters=SimpleNamespace(name=name))))

    async def use(tokenizers: Tokenizers) -> None:
        calls("greedy")
        hung = [asyncio.create_task(failure(tokenizers.encode(one, [TRIGGER]))) for one in hanging]
        await asyncio.sleep(0)
        assert (await failure(tokenizers.encode(more, ["mill"]))).code is Code.UNAVAILABLE
        calls("other")
        assert await tokenizers.encode(good, ["mill"]) == ([1], [[3]])
        assert {one.code for one in await asyncio.gather(*hung)} <= ENDED
        calls("greedy")
        assert await tokenizers.encode(more, ["mill"]) == ([1], [[3]])

    run(tmp_path, use)


def test_more_tokens_than_the_limit_are_counted_and_not_sent(tmp_path: Path, repository: Repositories) -> None:
    good = repository("good", tokenizer())

    async def use(tokenizers: Tokenizers) -> None:
        assert await tokenizers.encode(good, ["a " * 9000]) == ([9000], [[]])

    run(tmp_path, use)


def test_a_process_that_answers_nonsense_is_not_believed(
    tmp_path: Path, repository: Repositories, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = repository("good", tokenizer())

    async def use(tokenizers: Tokenizers) -> None:
        for counts, ids in ((b"\x05\0\0\0", b"\x01\0\0\0"), (b"", b""), (b"\1", b"\1")):
            answer = [Encoded(counts=counts, ids=ids)]
            monkeypatch.setattr(
                "millstream.plugins.prepare.tokenizer_client.read_answers", lambda _, __, answer=answer: answer
            )
            version = await tokenizers._of(good)
            await version.end()
            assert (await failure(tokenizers.encode(good, ["mill"]))).code is Code.INVALID

    run(tmp_path, use)


def test_one_that_was_killed_while_idle_is_started_again(tmp_path: Path, repository: Repositories) -> None:
    good = repository("good", tokenizer())

    async def use(tokenizers: Tokenizers) -> None:
        for _ in range(2):
            assert await tokenizers.encode(good, ["mill"]) == ([1], [[3]])
            process = (await tokenizers._of(good)).process
            assert process is not None
            process._process.kill()
            await process._process.wait()
        assert await tokenizers.encode(good, ["mill"]) == ([1], [[3]])

    run(tmp_path, use)


def test_a_caller_who_leaves_is_left_out(tmp_path: Path, repository: Repositories) -> None:
    good = repository("good", tokenizer())

    async def use(tokenizers: Tokenizers) -> None:
        gone = asyncio.create_task(tokenizers.encode(good, ["a"]))
        stays = asyncio.create_task(tokenizers.encode(good, ["mill"]))
        await asyncio.sleep(0)
        gone.cancel()
        assert await stays == ([1], [[3]])
        with pytest.raises(asyncio.CancelledError):
            await gone

    run(tmp_path, use)


def test_a_request_that_waits_when_they_are_closed_gets_an_answer(tmp_path: Path, repository: Repositories) -> None:
    good = repository("good", tokenizer())

    async def use(tokenizers: Tokenizers) -> None:
        await tokenizers.encode(good, ["a"])
        left = asyncio.create_task(failure(tokenizers.encode(good, ["mill"])))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await tokenizers.stop()
        assert (await left).code is Code.UNAVAILABLE

    run(tmp_path, use)
