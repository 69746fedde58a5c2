"""Every kind of confined process has only the descriptors and variables that it needs, however it is started.

Each is started as the product starts it, beside a listening socket and a file that children inherit, and looked at
from outside once its system calls are restricted.
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
import uvloop
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier

from millstream.plugins.compile.candidate import CompileTask, Subject
from millstream.plugins.compile.form_runner import Measuring, Opening, compile_candidate
from millstream.plugins.compile.race.samples import write_samples
from millstream.plugins.compile.targets import get_target
from millstream.services.errors import Failure
from millstream.services.ingest import check_process, forked_check
from millstream.services.ingest.importers import ImportOptions
from millstream.services.ingest.upload import ModelUpload
from millstream.services.model.manifest import ModelConfig
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.repository.folder import FolderRepository
from millstream.services.sandbox import seccomp
from millstream.services.settings import Settings
from tests.kit import models
from tests.kit.stack import WAIT_S

pytestmark = pytest.mark.skipif(not seccomp.is_supported(), reason="this kernel or machine takes no seccomp filter")

SECRETS = {
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "HF_TOKEN": "secret",
    "MILLSTREAM_ADMIN_KEY": "secret",
    "REDIS_URL": "redis://:secret@somewhere",
}
ROWS = Signature(
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 4)),),
    batching=True,
)


class Seen(NamedTuple):
    """A confined process: what its descriptors are, and its environment."""

    files: dict[int, str]
    environment: dict[str, str]


@contextmanager
def inheritable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Have this process hold secrets, a listening socket and a file that a careless start would hand on."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    private = folder / "private"
    private.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as listener, private.open() as file:
        listener.set_inheritable(True)
        os.set_inheritable(file.fileno(), True)
        yield {str(Path(f"/proc/self/fd/{one.fileno()}").readlink()) for one in (listener, file)}


def upload(folder: Path, content: bytes) -> None:
    async def run() -> None:
        repository = FolderRepository(folder / "repository")
        async with ModelUpload(repository, Settings(), "m", None, ModelConfig()) as incoming:
            incoming.options = ImportOptions(allow_pickle=True)
            await incoming.write(content)
            await incoming.publish()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, suppress(Failure):
        runner.run(run())


def check(folder: Path) -> None:
    upload(folder, models.slow(folder / "slow.onnx", 2_000_000_000).read_bytes())


def convert(folder: Path) -> None:
    rows, labels = load_iris(return_X_y=True)
    upload(folder, pickle.dumps(RandomForestClassifier(50).fit(rows, labels)))


def compile_one(folder: Path) -> None:
    subject = Subject(path=models.mlp(folder / "mlp.onnx"), source_format="onnx", signature=ROWS)
    candidate = get_target("onnxruntime").candidates(subject)[0]
    (folder / "compiled").mkdir(exist_ok=True)
    compile_candidate(CompileTask(subject=subject, candidate=candidate, folder=folder / "compiled"))


def measure(folder: Path) -> None:
    model = models.slow(folder / "slow.onnx", 20_000_000)
    write_samples(folder / "timed.npz", {"x": np.ones((1, 4), np.float32)})
    with suppress(Exception):
        opening = Opening(
            backend="onnxruntime",
            path=model,
            signature=ROWS,
            device="cpu",
            threads=1,
            inputs=folder / "timed.npz",
            folder=folder,
        )
        Measuring(opening, WAIT_S).close()


def tokenize(folder: Path) -> None:
    model = models.embeddings(folder / "tokens.onnx", pooled=True, types=True)
    content = io.BytesIO()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    with zipfile.ZipFile(content, "w") as packed:
        packed.write(model, "model.onnx")
        packed.writestr("tokenizer.json", words.to_str())
    upload(folder, content.getvalue())


#: kind -> the module that `ps` shows, and what starts it
KINDS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "check, forked": ("services.ingest.checker", check),
    "check, started": ("services.ingest.checker", check),
    "import": ("plugins.convert.import_process", convert),
    "compilation": ("plugins.compile.worker.form_process", compile_one),
    "measuring": ("plugins.compile.worker.form_process", measure),
    "tokenizer": ("plugins.prepare.tokenizer_process", tokenize),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_inherits_no_descriptor_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    module, start = KINDS[kind]
    asyncio.run(forked_check.end_fork_servers())  # an earlier one has the environment of its time
    if kind == "check, started":
        monkeypatch.setattr(check_process, "FORKS", False)
    with inheritable(tmp_path, monkeypatch) as private, ThreadPoolExecutor(1) as thread:
        over = threading.Event()

        def repeat() -> None:  # one that is short may end before it is seen
            while not over.is_set():
                start(tmp_path)

        running = thread.submit(repeat)
        try:
            seen = confined(module)
        finally:
            over.set()
        assert not private & {*seen.files.values()}, seen.files
        report = {name for fd, name in seen.files.items() if fd > 2 and name.startswith(("socket:", "pipe:"))}
        assert len(report) == 1, seen.files
        assert "secret" not in "".join(seen.environment.values()), seen.environment
        assert {0, 1, 2} <= seen.files.keys()
        running.result(WAIT_S)
    asyncio.run(forked_check.end_fork_servers())


def confined(module: str) -> Seen:
    """Return the first process of this module whose calls are restricted; it is stopped, looked at and killed."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"millstream.{module}".encode() not in (entry / "cmdline").read_bytes():
                    continue
                if "Seccomp:\t2" not in (entry / "status").read_text() or not is_ours(int(entry.name)):
                    continue
                os.kill(int(entry.name), signal.SIGSTOP)
                try:
                    return look(entry)
                finally:
                    os.kill(int(entry.name), signal.SIGKILL)
        time.sleep(0.001)
    raise AssertionError(f"no process of {module} was confined")


def look(entry: Path) -> Seen:
    files = {}
    for one in (entry / "fd").iterdir():
        with suppress(OSError):
            files[int(one.name)] = str(one.readlink())
    variables = (entry / "environ").read_bytes().decode().rstrip("\0").split("\0")
    return Seen(files, dict(one.partition("=")[::2] for one in variables))


def is_ours(pid: int) -> bool:
    """Return whether this process started it, or what started it."""
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    return False


def test_no_program_that_a_gateway_starts_inherits_its_listener() -> None:
    """uvloop closes nothing in its children, and hands its own pipes on, too."""
    code = (
        "import asyncio, os, socket, uvloop\n"
        "from millstream.services.process.inheritance import keep_from_children\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "listener.set_inheritable(True)\n"
        "keep_from_children()\n"
        "print(os.readlink(f'/proc/self/fd/{listener.fileno()}'), flush=True)\n"
        "async def main():\n"
        "    await (await asyncio.create_subprocess_exec('ls', '-l', '/proc/self/fd')).wait()\n"
        "uvloop.run(main())\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_S)
    listener, _, listed = ran.stdout.partition("\n")
    assert listener.startswith("socket:")
    assert "2 -> " in listed
    assert listener not in listed
