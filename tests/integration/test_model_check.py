"""Uploads, from the first byte to the published version, through the real checker process."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import random
import tarfile
import zipfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import uvloop
from onnx import TensorProto, helper, numpy_helper

from millstream.services.errors import Code, Failure
from millstream.services.ingest import check_process
from millstream.services.ingest.check_process import CHECKS_MAX, check_in_place
from millstream.services.ingest.upload import PIECE_BYTES, ModelUpload, Published
from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.staged_versions import StagedVersions
from millstream.services.settings import Settings
from millstream.services.wire.records import State
from tests.kit import models
from tests.kit.wait import PAUSE_S_MIN


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[FolderRepository]:
    root = tmp_path / "repository"
    yield FolderRepository(root)
    assert list((root / ".staging").iterdir()) == []
    assert checkers(root) == []


def checkers(root: Path) -> list[int]:
    """Return the pids of checkers that work on a folder of this repository."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"millstream.services.ingest.checker" in command and str(root).encode() in command:
                found.append(int(entry.name))
    return found


async def upload(
    repository: FolderRepository,
    content: bytes,
    *,
    version: int | None = None,
    digest: str | None = None,
    config: ModelConfig | None = None,
    settings: Settings | None = None,
    on_state: Callable[[State], Awaitable[None]] | None = None,
) -> Manifest:
    incoming = ModelUpload(repository, settings or Settings(), "digits", version, config or ModelConfig(), digest)
    async with incoming:
        for start in range(0, len(content), 300_000):
            await incoming.write(content[start : start + 300_000])
        published = await (incoming.publish() if on_state is None else incoming.publish(on_state))
        return published.manifest


def uploaded(repository: FolderRepository, content: bytes, **options: object) -> Manifest:
    return asyncio.run(upload(repository, content, **options))  # type: ignore[arg-type]


def refused(repository: FolderRepository, content: bytes, code: Code = Code.INVALID, **options: object) -> str:
    before = (list(repository.models()), repository.token())
    with pytest.raises(Failure) as caught:
        uploaded(repository, content, **options)
    assert caught.value.code is code, caught.value.message
    assert "\n" not in caught.value.message
    assert (list(repository.models()), repository.token()) == before
    return caught.value.message


def endless_model(tmp_path: Path) -> bytes:
    """A model whose run takes hours."""
    return models.slow(tmp_path / "slow.onnx", 2_000_000_000).read_bytes()


def mlp(tmp_path: Path, rows: int | str = "N") -> bytes:
    return models.mlp(tmp_path / "mlp.onnx", rows).read_bytes()


def test_an_upload_becomes_a_version_with_every_digest(repository: FolderRepository, tmp_path: Path) -> None:
    content = mlp(tmp_path)
    states: list[State] = []

    async def saw(state: State) -> None:
        states.append(state)

    digest = hashlib.sha256(content).hexdigest()
    manifest = uploaded(repository, content, digest=digest.upper(), on_state=saw)
    assert manifest == repository.manifest("digits", 1)
    assert states == [State.PENDING, State.CHECKING]
    assert (manifest.digest, manifest.version, manifest.signature.batching) == (digest, 1, True)
    folder = repository.local_path("digits", 1)
    assert (folder / "source/model.onnx").read_bytes() == content
    for file in manifest.files:
        stored = (folder / file.path).read_bytes()
        assert (len(stored), hashlib.sha256(stored).hexdigest()) == (file.size_bytes, file.sha256)
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "source"]


def test_large_uploads_are_stored_byte_for_byte_and_rewritten(repository: FolderRepository, tmp_path: Path) -> None:
    content = models.squeezenet(tmp_path / "squeezenet.onnx", 1).read_bytes()
    assert len(content) > 3 * PIECE_BYTES
    manifest = uploaded(repository, content)
    folder = repository.local_path("digits", 1)
    assert (folder / "source/model.onnx").read_bytes() == content
    assert manifest.digest == hashlib.sha256(content).hexdigest()
    assert (manifest.served, manifest.signature.batching) == ("compiled/onnx/model.onnx", True)
    assert [file.path for file in manifest.files] == ["compiled/onnx/model.onnx"]
    session = onnxruntime.InferenceSession(folder / manifest.served, providers=["CPUExecutionProvider"])
    assert session.run(None, {"data_0": np.zeros((2, 3, 224, 224), np.float32)})[0].shape == (2, 1000)


def external_model() -> tuple[bytes, bytes]:
    weight = numpy_helper.from_array(np.arange(16, dtype=np.float32).reshape(4, 4), "w")
    weights = bytes(weight.raw_data)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="data/weights.bin")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", values[:1], values[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString()), weights


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_external_weights_are_uploaded_in_an_archive(
    repository: FolderRepository, pack: Callable[[dict[str, bytes]], bytes]
) -> None:
    model, weights = external_model()
    unused = {"README": b"hello", "data/other.bin": b"0" * 100, "docs/a/b.md": b"", "old/net.onnx": model}
    content = pack({"net.onnx": model, "data/weights.bin": weights, "config.pbtxt": b"", **unused})
    manifest = uploaded(repository, content)
    folder = repository.local_path("digits", 1)
    assert manifest.digest == hashlib.sha256(content).hexdigest()
    assert [file.path for file in manifest.files] == ["compiled/onnx/model.onnx", "compiled/onnx/data/weights.bin"]
    kept = [str(path.relative_to(folder / "source")) for path in (folder / "source").rglob("*")]
    assert sorted(kept) == ["config.pbtxt", "data", "data/weights.bin", "net.onnx"]
    session = onnxruntime.InferenceSession(folder / manifest.served, providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.eye(4, dtype=np.float32)})[0].ravel().tolist() == list(range(16))


def test_a_rewritten_version_with_external_weights_passes_a_second_check(repository: FolderRepository) -> None:
    """As a load with another configuration does, in the version's folder, where weights are links and not copies."""
    model, weights = external_model()
    manifest = uploaded(repository, zipped({"model.onnx": model, "data/weights.bin": weights}))
    folder = repository.local_path("digits", 1)
    assert (folder / "compiled/onnx/data/weights.bin").stat().st_nlink == 2
    again = asyncio.run(check_in_place(folder, manifest.served, None, Settings()))
    assert (again.served, again.signature, again.batching) == (manifest.served, manifest.signature, manifest.batching)


def test_a_file_that_vanished_from_a_folder_of_the_operator_is_no_fault_of_the_server(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"model\.onnx was removed while it was read") as caught:
        asyncio.run(check_in_place(tmp_path, "1/model.onnx", None, Settings(), foreign=True))
    assert caught.value.code is Code.INVALID


def test_the_error_asks_for_missing_external_weights(repository: FolderRepository) -> None:
    assert "upload a zip or tar" in refused(repository, external_model()[0])


def test_a_text_model_is_accepted(repository: FolderRepository, tmp_path: Path) -> None:
    manifest = uploaded(repository, models.identity(tmp_path / "text.onnx", "BYTES").read_bytes())
    assert manifest.signature.inputs[0].datatype == "BYTES"
    assert manifest.signature.batching


def test_a_rejected_upload_leaves_no_files(repository: FolderRepository, tmp_path: Path) -> None:
    whole = mlp(tmp_path)
    assert "empty" in refused(repository, b"")
    assert "not an ONNX model" in refused(repository, random.Random(1).randbytes(5000))
    assert "was cut short" in refused(repository, whole[: len(whole) // 2])
    assert "leads out of the archive" in refused(repository, zipped({"../model.onnx": whole}))
    assert "nothing in it is known" in refused(repository, tarred({"readme": b""}))
    assert "sha256" in refused(repository, whole, digest="0" * 64)
    assert "64 hexadecimal digits" in refused(repository, whole, digest="abc")
    assert "pool name" in refused(repository, whole, config=ModelConfig(pools=("../x",)))
    assert "version 0 is not allowed" in refused(repository, whole, version=0)


def test_untrusted_names_are_made_printable_in_messages(repository: FolderRepository) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in "xy"]
    node = helper.make_node("Mi\nll\x1b[31m" + "!" * 5000, ["x"], ["y"])
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    message = refused(repository, model.SerializeToString())
    assert "Mi ll?[31m!" in message
    assert len(message) <= 1000


def test_byte_limits_apply_to_the_upload_and_to_its_unpacked_size(repository: FolderRepository) -> None:
    settings = Settings(upload_bytes_max=10_000)
    assert "larger than 10000 bytes" in refused(repository, b"\0" * 10_001, Code.TOO_LARGE, settings=settings)
    bomb = zipped({"model.onnx": b"\0" * 1_000_000})
    assert len(bomb) < 10_000
    assert "unpacks to more than 10000 bytes" in refused(repository, bomb, Code.TOO_LARGE, settings=settings)


def constant_of_shape(side: int) -> bytes:
    """Return a model of a few hundred bytes that creates a tensor of `side` x `side` floats."""
    nodes = [
        helper.make_node("ConstantOfShape", ["side"], ["huge"]),
        helper.make_node("ReduceSum", ["huge"], ["sum"], keepdims=0),
        helper.make_node("Add", ["x", "sum"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in "xy"]
    shape = numpy_helper.from_array(np.array([side, side]), "side")
    graph = helper.make_graph(nodes, "bomb", values[:1], values[1:], [shape])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def test_a_model_that_exceeds_the_memory_limit_is_rejected(repository: FolderRepository) -> None:
    settings = Settings(check_memory_bytes_max=2 << 30)
    assert "memory" in refused(repository, constant_of_shape(1 << 15), settings=settings)


def test_too_little_memory_for_the_libraries_is_an_internal_error(repository: FolderRepository, tmp_path: Path) -> None:
    message = refused(repository, mlp(tmp_path), Code.INTERNAL, settings=Settings(check_memory_bytes_max=64 << 20))
    assert "the model check" in message


def test_a_check_is_killed_after_its_time_limit(repository: FolderRepository, tmp_path: Path) -> None:
    endless = endless_model(tmp_path)
    assert "took longer than 2 s" in refused(repository, endless, settings=Settings(check_s_max=2))


def test_a_model_that_crashes_on_zeros_is_rejected(repository: FolderRepository, tmp_path: Path) -> None:
    """Random floats are never exactly zero, but the warm-up of a worker starts with zeros."""
    content = models.crashes_on_zeros(tmp_path / "zeros.onnx").read_bytes()
    assert len(content) < 300
    assert "crashes ONNX Runtime" in refused(repository, content)


def warm_up(fill: str, shape: tuple[int, ...] = (1,), file: str | None = None) -> ModelConfig:
    made = {"datatype": "INT64", "shape": shape, "fill": fill, "file": file}
    return ModelConfig.model_validate({"warmup": [{"name": "first", "inputs": {"index": made}}]})


def test_the_check_runs_warmup_requests(repository: FolderRepository, tmp_path: Path) -> None:
    lookup = models.lookup(tmp_path / "lookup.onnx").read_bytes()  # an index above 7 fails
    assert "warm-up 'first' failed: " in refused(repository, lookup, config=warm_up("random"))
    assert "shape [2] does not fit [1]" in refused(repository, lookup, config=warm_up("zero", (2,)))
    row = np.array([[5]], np.int64).tobytes()
    archive = zipped({"model.onnx": lookup, "row.bin": row, "rows.bin": row * 3, "bad.bin": row[:-8] + b"\x08" * 8})
    manifest = uploaded(repository, archive, config=warm_up("file", file="source/row.bin"))
    assert "source/row.bin" in [file.path for file in manifest.files]
    for name, why in (("rows", "cannot reshape"), ("bad", "element out of data bounds"), ("no", "no plain file")):
        assert why in refused(repository, archive, config=warm_up("file", file=f"source/{name}.bin"))


def test_a_crashing_warmup_request_is_rejected(repository: FolderRepository, tmp_path: Path) -> None:
    fragile = models.fragile(tmp_path / "fragile.onnx").read_bytes()
    minus_one = zipped({"model.onnx": fragile, "row.bin": np.array([-1], np.int64).tobytes()})
    assert "divi" not in str(uploaded(repository, fragile).notes)
    config = warm_up("file", file="source/row.bin").model_dump(mode="json")
    config["warmup"][0]["inputs"] = {"x": config["warmup"][0]["inputs"]["index"]}
    assert "crashes ONNX Runtime" in refused(repository, minus_one, config=ModelConfig.model_validate(config))


def test_a_killed_checker_rejects_the_model(repository: FolderRepository, tmp_path: Path) -> None:
    endless = endless_model(tmp_path)
    root = tmp_path / "repository"

    async def kill_when_running() -> str:
        checking = asyncio.Event()

        async def saw(state: State) -> None:
            if state is State.CHECKING:
                checking.set()

        running = asyncio.ensure_future(upload(repository, endless, on_state=saw))
        await checking.wait()
        while not (found := checkers(root)):
            await asyncio.sleep(PAUSE_S_MIN)
        os.kill(found[0], 9)
        with pytest.raises(Failure) as caught:
            await running
        assert caught.value.code is Code.INVALID
        return caught.value.message

    assert "SIGKILL" in asyncio.run(kill_when_running())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_cancelling_an_upload_ends_the_checker_and_removes_the_files(
    repository: FolderRepository, tmp_path: Path, run: Callable[[Awaitable[None]], None]
) -> None:
    endless = endless_model(tmp_path)
    root = tmp_path / "repository"

    async def go_away() -> None:
        running = asyncio.ensure_future(upload(repository, endless))
        while not checkers(root):
            await asyncio.sleep(PAUSE_S_MIN)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert checkers(root) == []
        assert list((root / ".staging").iterdir()) == []

    run(go_away())
    assert list(repository.models()) == []


def test_cancelling_publish_leaves_a_complete_version_or_none(
    repository: FolderRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = mlp(tmp_path)
    incoming = ModelUpload(repository, Settings(), "digits", 1, ModelConfig())

    async def leave_during_publish() -> None:
        publishing = asyncio.Event()
        loop = asyncio.get_running_loop()
        publish = FolderRepository.publish

        def slow_publish(self: FolderRepository, *arguments: object, **options: object) -> None:
            loop.call_soon_threadsafe(publishing.set)
            publish(self, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(FolderRepository, "publish", slow_publish)

        async def go() -> None:
            async with incoming:
                await incoming.write(content)
                await incoming.publish()

        running = asyncio.ensure_future(go())
        await asyncio.wait_for(publishing.wait(), 120)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(leave_during_publish())
    assert list(repository.versions("digits")) == [1]
    assert (repository.local_path("digits", 1) / "source/model.onnx").read_bytes() == content


def test_an_existing_version_is_rejected_before_the_upload_is_read(
    repository: FolderRepository, tmp_path: Path
) -> None:
    uploaded(repository, mlp(tmp_path), version=4)

    async def enter() -> None:
        async with ModelUpload(repository, Settings(), "digits", 4, ModelConfig(), "0" * 64):
            raise AssertionError("the upload was let in")

    with pytest.raises(Failure) as caught:
        asyncio.run(enter())
    assert caught.value.code is Code.CONFLICT
    assert "already exists" in refused(repository, b"another one", Code.CONFLICT, version=4)


def test_concurrent_uploads_get_distinct_numbers_and_one_wins_an_explicit_number(
    repository: FolderRepository, tmp_path: Path
) -> None:
    content = mlp(tmp_path)
    checking = 0
    most = 0

    async def all_at_once() -> list[Manifest | BaseException]:
        examine = check_process.examine

        async def counted(*arguments: object) -> object:
            nonlocal checking, most
            checking += 1
            most = max(most, checking)
            try:
                return await examine(*arguments)  # type: ignore[arg-type]
            finally:
                checking -= 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("millstream.services.ingest.upload.examine", counted)
            asked = ((None, 1), (None, 2), (None, 3), (9, 4), (9, 5))
            uploads = [upload(repository, content, version=at, config=ModelConfig(rows_max=n)) for at, n in asked]
            return await asyncio.gather(*uploads, return_exceptions=True)

    results = asyncio.run(all_at_once())
    won = [result.version for result in results if isinstance(result, Manifest)]
    lost = [result for result in results if isinstance(result, Failure)]
    assert len(won) == len(set(won)) == 4
    assert [failure.code for failure in lost] == [Code.CONFLICT]
    assert sorted(won) == list(repository.versions("digits"))
    assert most == CHECKS_MAX


def test_the_same_upload_is_the_same_version(repository: FolderRepository, tmp_path: Path) -> None:
    content, digest = mlp(tmp_path), hashlib.sha256(mlp(tmp_path)).hexdigest()
    first = uploaded(repository, content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millstream.services.ingest.upload.examine", None)  # it is not checked again
        for version, given in ((None, None), (None, digest), (1, None), (1, digest)):
            again = uploaded(repository, content, version=version, digest=given)
            assert again == first
    assert uploaded(repository, content, config=ModelConfig(rows_max=7)).version == 2
    assert uploaded(repository, content, version=5).version == 5  # a number of its own
    assert uploaded(repository, content).version == 5  # the newest one
    for version in (1, 5):
        repository.delete_version("digits", version)
    assert uploaded(repository, content).version == 6


def test_a_version_that_has_failed_does_not_stand_for_an_upload(repository: FolderRepository, tmp_path: Path) -> None:
    content = mlp(tmp_path)
    uploaded(repository, content)

    async def again() -> Published:
        async with ModelUpload(repository, Settings(), "digits", None, ModelConfig()) as incoming:
            incoming.reusable = lambda manifest: manifest.version != 1
            await incoming.write(content)
            return await incoming.publish()

    for new in (True, False):
        made = asyncio.run(again())
        assert (made.manifest.version, made.new) == (2, new)


def test_the_same_upload_at_once_is_one_version(repository: FolderRepository, tmp_path: Path) -> None:
    content = mlp(tmp_path)

    async def all_at_once(*versions: int | None) -> list[Manifest]:
        return await asyncio.gather(*(upload(repository, content, version=version) for version in versions))

    assert {one.version for one in asyncio.run(all_at_once(None, None, None, None))} == {1}
    assert {one.version for one in asyncio.run(all_at_once(9, 9, 9))} == {9}
    assert list(repository.versions("digits")) == [1, 9]


def test_a_version_that_is_deleted_while_it_is_uploaded_again_is_made_again(
    repository: FolderRepository, tmp_path: Path
) -> None:
    content = mlp(tmp_path)
    uploaded(repository, content)
    original = StagedVersions.original

    def deleted(self: StagedVersions, model: str, version: int) -> Manifest | None:
        found = original(self, model, version)
        repository.delete_version(model, version)
        return found

    async def again() -> Published:
        async with ModelUpload(repository, Settings(), "digits", None, ModelConfig()) as incoming:
            await incoming.write(content)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(StagedVersions, "original", deleted)
                return await incoming.publish(activate=True)

    made = asyncio.run(again())
    assert (made.manifest.version, made.new) == (2, True)
    assert list(repository.versions("digits")) == [2]


def test_the_uploaded_configuration_is_kept(repository: FolderRepository, tmp_path: Path) -> None:
    config = ModelConfig(batching=False, rows_max=7, pools=("gpu",))
    manifest = uploaded(repository, mlp(tmp_path), config=config)
    assert manifest.config == config
    assert not manifest.signature.batching
    mixing = models.row_mixing(tmp_path / "mixing.onnx").read_bytes()
    assert "batching is not possible" in refused(repository, mixing, config=ModelConfig(batching=True))


def test_the_checker_does_not_inherit_secrets(
    repository: FolderRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY", "secret-of-the-gateway")
    endless = endless_model(tmp_path)

    async def look() -> bytes:
        running = asyncio.ensure_future(upload(repository, endless))
        while not (found := checkers(tmp_path / "repository")):
            await asyncio.sleep(PAUSE_S_MIN)
        environment = Path(f"/proc/{found[0]}/environ").read_bytes()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return environment

    environment = asyncio.run(look())
    assert b"PATH=" in environment
    assert b"secret-of-the-gateway" not in environment
