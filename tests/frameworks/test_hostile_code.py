"""Code that a model folder brings with it, allowed with --allow-code, and hostile: what the sandbox lets it do."""

from __future__ import annotations

import asyncio
import io
import json
import os
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.services.errors import Code, Failure
from millstream.services.ingest.importers import ImportOptions
from millstream.services.ingest.upload import ModelUpload
from millstream.services.model.manifest import ModelConfig
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import Settings

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CONFIG = {
    "model_type": "hostile",
    "architectures": ["HostileModel"],
    "auto_map": {"AutoConfig": "hostile.HostileConfig", "AutoModel": "hostile.HostileModel"},
}
#: runs when transformers imports the folder's code
PRELUDE = """
import ctypes, mmap, os, pathlib, signal, socket, subprocess, sys, threading, time
from transformers import BertConfig as HostileConfig, BertModel as HostileModel
SCRATCH = pathlib.Path(os.environ["TMPDIR"])
FOLDER = SCRATCH.parent
"""
TRIED = """
def tried(*attempts):
    done = []
    for attempt in attempts:
        try:
            attempt()
        except OSError:
            continue
        except MemoryError:
            continue
        done.append(attempt.__name__)
    raise RuntimeError(f"hostile code did: {done}")
"""


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[FolderRepository]:
    root = tmp_path / "repository"
    yield FolderRepository(root)
    assert list((root / ".staging").iterdir()) == []


def refused(repository: FolderRepository, code: str, code_of: Code = Code.INVALID, **settings: Any) -> str:
    """Return the one line of the refusal; nothing may be left of the upload."""
    content = io.BytesIO()
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("config.json", json.dumps(CONFIG))
        archive.writestr("hostile.py", PRELUDE + code)
        archive.writestr("model.safetensors", struct.pack("<Q", len(header)) + header + bytes(4))

    async def upload() -> None:
        async with ModelUpload(repository, Settings(**settings), "hostile", None, ModelConfig()) as incoming:
            incoming.options = ImportOptions(allow_code=True)
            await incoming.write(content.getvalue())
            await incoming.publish()

    with pytest.raises(Failure) as caught:
        asyncio.run(upload())
    assert caught.value.code is code_of, caught.value.message
    assert "\n" not in caught.value.message
    assert list(repository.models()) == []
    return caught.value.message


def test_it_starts_no_process_reaches_no_network_and_no_other_file(repository: FolderRepository) -> None:
    os.environ["MILLSTREAM_TEST_SECRET"] = "secret"
    try:
        said = refused(
            repository,
            TRIED
            + """
def fork(): os.fork() or os._exit(0)
def daemon(): os.posix_spawn("/bin/sleep", ["sleep", "1000"], {}, setsid=True)
def program(): subprocess.run(["true"])
def libc_fork():
    if ctypes.CDLL(None).fork() < 0: raise OSError
def network(): socket.create_connection(("127.0.0.1", 80))
def local_socket(): socket.socket(socket.AF_UNIX)
def kill_parent(): os.kill(os.getppid(), signal.SIGKILL)
def kill_all(): os.kill(-1, signal.SIGKILL)
def read_secret(): pathlib.Path("/etc/passwd").read_text()
def read_parent(): pathlib.Path(f"/proc/{os.getppid()}/environ").read_bytes()
def read_repository(): list((FOLDER.parent.parent).iterdir())
def read_neighbour(): list((FOLDER.parent).iterdir())
def write_elsewhere(): pathlib.Path("/tmp/millstream-hostile").write_text("x")
def write_upload(): next(FOLDER.joinpath("source").iterdir()).write_text("x")
def add_to_upload(): FOLDER.joinpath("source", "more").write_text("x")
def remove_upload(): next(FOLDER.joinpath("source").iterdir()).unlink()
def write_folder(): FOLDER.joinpath("manifest.json").write_text("x")
def link_out(): os.symlink("/etc/passwd", SCRATCH / "link")
def hard_link(): os.link("/etc/hostname", SCRATCH / "link")
def pipe_file(): os.mkfifo(SCRATCH / "fifo")
def close_folder():
    os.mkdir(SCRATCH / "closed"); os.chmod(SCRATCH / "closed", 0)
def much_memory(): bytearray(1 << 40)
def memory_file(): os.memfd_create("x")
def outlive_parent():
    if ctypes.CDLL(None).prctl(1, 0, 0, 0, 0): raise OSError
def secret():
    if not [name for name in os.environ if name.startswith("MILLSTREAM_")]: raise OSError
tried(fork, daemon, program, libc_fork, network, local_socket, kill_parent, kill_all, read_secret, read_parent,
      read_repository, read_neighbour, write_elsewhere, write_upload, add_to_upload, remove_upload, write_folder,
      link_out, hard_link, pipe_file, close_folder, much_memory, memory_file, outlive_parent, secret)
""",
        )
    finally:
        del os.environ["MILLSTREAM_TEST_SECRET"]
    assert "hostile code did: []" in said
    assert not Path("/tmp/millstream-hostile").exists()


ENDED: dict[str, tuple[str, dict[str, Any], str]] = {
    "sleeps": (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1e6)\n",
        {"check_s_max": 6},
        "took longer than 30 s",
    ),
    "threads that do not end": (
        (
            "[threading.Thread(target=time.sleep, args=(1e6,)).start() for _ in range(9)]\n"
            "while True: print('x' * 65536, flush=True)\n"
        ),
        {"check_s_max": 6},
        "took longer than 30 s",
    ),
    "many files": (
        "for number in range(10**6): (SCRATCH / str(number)).write_bytes(bytes(1 << 20))\n",
        {"upload_bytes_max": 16 << 20},
        "its files take more than 64 MiB",
    ),
    "deleted files": (
        (
            "import tempfile\nfiles = [tempfile.TemporaryFile() for _ in range(200)]\n"
            "while True:\n    for file in files: file.write(bytes(1 << 20)); file.flush(); time.sleep(0.01)\n"
        ),
        {"upload_bytes_max": 16 << 20},
        "its files take more than 64 MiB",
    ),
    "empty files": (
        "for number in range(10**7): (SCRATCH / str(number)).touch()\n",
        {},
        "it made more than 40000 files",
    ),
    "deep folders": (
        "os.chdir(SCRATCH)\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\ntime.sleep(1e6)\n",
        {},
        "it made more than 600 folders in each other",
    ),
    "a signal": ("os.kill(os.getpid(), signal.SIGSEGV)\n", {}, "ended by signal 11"),
}


@pytest.mark.parametrize("name", ENDED)
def test_it_is_ended_and_leaves_nothing(repository: FolderRepository, name: str) -> None:
    code, settings, says = ENDED[name]
    assert says in refused(repository, code, Code.INVALID, **settings)


def test_it_leaves_nothing_that_cannot_be_removed(repository: FolderRepository) -> None:
    """Folders made without rights and nested too deeply for a path; the fixture finds the staging folder empty."""
    code = (
        "os.umask(0)\nos.chdir(SCRATCH)\nos.mkdir('closed', 0)\n"
        "for _ in range(3000): os.mkdir('d'); os.chdir('d')\nraise RuntimeError('done')\n"
    )
    said = refused(repository, code)
    assert "folders" in said


FIND_REPORT = """
FD = next(fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")
          and os.readlink(f"/proc/self/fd/{fd}").startswith(("pipe:", "socket:")))
"""
REPORT = (
    'os.write(FD, b\'{{"outcome":{{"served":"{served}","source_format":"onnx","samples":["imported/s.npz"],'
    '"importer":"x","producer":"x","rtol":0,"atol":0}}}}\'); os._exit(0)'
)
FORGED: dict[str, tuple[str, str]] = {
    "no report": ("os._exit(0)", "ended the process of its import (exit status 0)"),
    "an exit status": ("os._exit(3)", "ended the process of its import (exit status 3)"),
    "not a report": ('os.write(FD, b"{}"); os._exit(0)', "ended the process of its import"),
    "a file outside": (REPORT.format(served="../../../x.onnx"), "ended the process of its import"),
    "a file of the folder": (REPORT.format(served="scratch/x.onnx"), "which is no file of the upload"),
    "a file that is none": (
        'os.mkdir(FOLDER / "imported" / "x.onnx")\n' + REPORT.format(served="imported/x.onnx"),
        "which is no file of the upload",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_report_publishes_nothing(repository: FolderRepository, name: str) -> None:
    code, says = FORGED[name]
    assert says in refused(repository, FIND_REPORT + code, Code.INVALID)
