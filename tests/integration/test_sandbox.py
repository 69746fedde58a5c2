"""A compromised model check can access only its own folder and the libraries.

The attacks are Python in a process of this installation, confined as the checker is; the kernel answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.services.errors import Failure
from millstream.services.ingest.check_process import check_in_place
from millstream.services.ingest.upload import ModelUpload
from millstream.services.model.manifest import ModelConfig
from millstream.services.repository.folder import FolderRepository
from millstream.services.sandbox import landlock, seccomp
from millstream.services.sandbox.confine import probe
from millstream.services.settings import Settings
from tests.kit import models
from tests.kit.kernels import has_namespaces

ROOT = Path(__file__).parents[2]
needs_seccomp = pytest.mark.skipif(not seccomp.is_supported(), reason="this kernel or machine takes no seccomp filter")

#: name -> an expression; a confined process must get an error for each
FILES = {
    "read a file of the system": "open('/etc/passwd').read()",
    "read another model": "open(other / 'model.onnx').read()",
    "list another model": "os.listdir(other)",
    "read another model through a link": "open(own / 'link').read()",
    "read through /proc": "open(f'/proc/self/root{other}/model.onnx').read()",
    "read the environment of the parent": "open(f'/proc/{parent}/environ').read()",
    "list the folder of the project": "os.listdir(root)",
    "list all": "os.listdir('/')",
    "write to another model": "open(other / 'model.onnx', 'a')",
    "empty another model": "os.truncate(other / 'model.onnx', 0)",
    "remove another model": "os.unlink(other / 'model.onnx')",
    "replace another model": "os.rename(own / 'file', other / 'model.onnx')",
    "link another model into its folder": "os.link(other / 'model.onnx', own / 'mine')",
    "make a file elsewhere": "open(other / 'new', 'w')",
    "make a link": "os.symlink('/etc/passwd', own / 'passwd')",
    "make a FIFO": "os.mkfifo(own / 'fifo')",
    "make a unix socket": "socket.socket(socket.AF_UNIX).bind(str(own / 's'))",
    "write to a library": "open(os.__file__, 'a')",
    "run a program": "os.execv('/bin/true', ['true'])",
}
CALLS = {
    "connect over TCP": "socket.create_connection(('127.0.0.1', port), 5)",
    "listen": "socket.create_server(('127.0.0.1', 0))",
    "send over UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port))",
    "connect to a unix socket": "socket.socket(socket.AF_UNIX).connect(unix)",
    "make a pair of sockets": "socket.socketpair()",
    "fork": "os.fork() or os._exit(0)",
    "start a program": "subprocess.run(['/bin/true'])",
    "start a program without fork": "os.posix_spawn('/bin/true', ['true'], {})",
    "signal its parent": "os.kill(parent, 0)",
    "signal all processes": "os.kill(-1, 0)",
    "limit its parent": "resource.prlimit(parent, resource.RLIMIT_CORE, (0, 0))",
    "slow its parent down": "os.setpriority(os.PRIO_PROCESS, parent, 19)",
    "change rights": "os.chmod(own / 'file', 0o777)",
    "change an owner": "os.chown(own / 'file', os.getuid(), os.getgid())",
    "open a process": "os.pidfd_open(parent)",
    "trace its parent": "call('ptrace', 16, parent, 0, 0)",
    "read its parent's memory": "call('process_vm_readv', parent, 0, 0, 0, 0, 0)",
    "set up io_uring": "call('io_uring_setup', 8, ctypes.create_string_buffer(120))",
    "leave its namespaces": "call('unshare', 0x10000000)",
    "mount": "call('mount', b'none', str(own).encode(), b'tmpfs', 0, 0)",
    "load a BPF program": "call('bpf', 5, ctypes.create_string_buffer(64), 64)",
    "shut a socket down": "call('shutdown', 0, 2)",
    "set an option of a socket": "call('setsockopt', 0, 1, 2, 0, 0)",
    "outlive its parent": "libc_of('prctl', 1, 0, 0, 0, 0)",
    "become a subreaper": "libc_of('prctl', 36, 1, 0, 0, 0)",
    "have the kernel signal its parent": "fcntl.fcntl(1, fcntl.F_SETOWN, parent)",
    "hold memory in a file without a name": "os.memfd_create('x')",
    "hold memory that is shared and in no file": "mmap.mmap(-1, 4096)",
    "make shared memory of System V": "call('shmget', 0, 4096, 0o1600)",
    "pin its parent to a core": "os.sched_setaffinity(parent, {0})",
    "make a filter of its own": "call('seccomp', 0, 0, 0)",
    "have files of its own in a thread": "libc_of('clone', run, stack_end, 0x10900, None)",  # and not CLONE_FILES
    "leave the files of its threads": "libc_of('close_range', 4000, 4001, 2)",  # CLOSE_RANGE_UNSHARE
    "change its identity": "call('personality', 0x0040000)",
}
HONEST = {
    "read its file": "(own / 'file').read_bytes()",
    "write and remove": "((own / 'a').write_bytes(b'1'), os.link(own / 'a', own / 'b'), os.unlink(own / 'b'))",
    "map memory, and a file": "(mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), "
    "mmap.mmap(os.open(own / 'file', os.O_RDWR), 0))",
    "rename into a folder": "((own / 'd').mkdir(), os.rename(own / 'a', own / 'd' / 'a'))",
    "start a thread": "(thread := threading.Thread(target=int), thread.start(), thread.join())",
    "import a library": "__import__('sqlite3')",
    "ask about itself": "(os.kill(os.getpid(), 0), resource.getrlimit(resource.RLIMIT_AS), "
    "open('/proc/self/statm').read())",
}
PROGRAM = """
import ctypes, fcntl, json, mmap, os, platform, resource, socket, subprocess, sys, threading
from pathlib import Path
from millstream.services.sandbox.confine import confine
from tests.kit.kernels import without_landlock

given = json.loads(sys.argv[1])
own, other, root, port, unix = Path(given["own"]), Path(given["other"]), given["root"], given["port"], given["unix"]
parent = os.getppid()

X86_64 = dict(ptrace=101, process_vm_readv=310, io_uring_setup=425, unshare=272, mount=165, bpf=321, shutdown=48,
              setsockopt=54, shmget=29, seccomp=317, personality=135)
AARCH64 = dict(ptrace=117, process_vm_readv=270, io_uring_setup=425, unshare=97, mount=40, bpf=280, shutdown=210,
               setsockopt=208, shmget=194, seccomp=277, personality=92)

def call(name, *arguments):
    libc_of("syscall", (X86_64 if platform.machine() == "x86_64" else AARCH64)[name], *arguments)

def libc_of(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def run(_):
    return 0

stack = ctypes.create_string_buffer(1 << 20)
stack_end = ctypes.c_void_p((ctypes.addressof(stack) + len(stack)) & ~15)

if given["wall"] == "namespaces":
    without_landlock()
confine((), (own,))
answers = {}
for name, expression in given["attempts"].items():
    try:
        eval(expression)
        answers[name] = "done"
    except Exception as error:
        answers[name] = f"{type(error).__name__} {getattr(error, 'errno', '')}"
print(json.dumps(answers))
"""
#: 18: Landlock's word for links across its bounds; 38: for calls of newer kernels, so that libraries use an older one
REFUSED = {"PermissionError 1", "PermissionError 13", "OSError 18", "OSError 38"}
#: where files are not there, or mounted for reading; folders of what is there are listed, and have nothing else
UNSEEN = {*REFUSED, "FileNotFoundError 2", "OSError 30"}
EMPTY = {"list the folder of the project", "list all"}


@pytest.fixture(scope="module", params=["landlock", "namespaces"])
def wall(request: pytest.FixtureRequest) -> str:
    """What holds the files: Landlock, or what stands in for it where the kernel has none."""
    if request.param == "landlock" and not landlock.abi():
        pytest.skip("this kernel has no Landlock")
    if request.param == "namespaces" and not has_namespaces():
        pytest.skip("no namespaces can be had here")
    return str(request.param)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, wall: str) -> Iterator[dict[str, str]]:
    """Return the outcome of every attempt, by name."""
    folder = tmp_path_factory.mktemp("sandbox")
    own, other = folder / "own", folder / "other"
    own.mkdir()
    other.mkdir()
    (own / "file").write_bytes(b"mine")
    (other / "model.onnx").write_bytes(b"another owner's")
    (own / "link").symlink_to(other / "model.onnx")
    unix = str(folder / "unix")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(unix)
        local.listen()
        given = {"wall": wall, "own": str(own), "other": str(other), "root": str(ROOT), "port": server.getsockname()[1]}
        attempts = {"unix": unix, "attempts": {**HONEST, **FILES, **CALLS}}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), json.dumps({**given, **attempts})],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    yield json.loads(done.stdout)
    assert (other / "model.onnx").read_bytes() == b"another owner's"
    assert [path.name for path in other.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("name", FILES)
def test_other_files_are_inaccessible(answers: dict[str, str], wall: str, name: str) -> None:
    if wall == "namespaces":
        assert answers[name] in UNSEEN or name in EMPTY
    else:
        assert answers[name] in REFUSED


@needs_seccomp
@pytest.mark.parametrize("name", CALLS)
def test_the_network_and_other_processes_are_inaccessible(answers: dict[str, str], name: str) -> None:
    assert answers[name] in REFUSED


@pytest.mark.parametrize("name", HONEST)
def test_operations_that_a_check_needs_are_allowed(answers: dict[str, str], name: str) -> None:
    assert answers[name] == "done"


def test_all_layers_that_the_kernel_supports_are_active() -> None:
    layers = probe()
    assert (layers.landlock, layers.seccomp) == (landlock.abi(), seccomp.is_supported())
    assert layers.namespaces in (False, not layers.landlock)


@needs_seccomp
def test_the_checker_process_is_confined(tmp_path: Path) -> None:
    """Reads the status of a checker process while a model runs endlessly."""
    repository = FolderRepository(tmp_path / "repository")
    endless = models.slow(tmp_path / "slow.onnx", 2_000_000_000).read_bytes()

    async def look() -> dict[str, str]:
        async def upload() -> None:
            async with ModelUpload(repository, Settings(), "endless", None, ModelConfig()) as incoming:
                await incoming.write(endless)
                await incoming.publish()

        running = asyncio.ensure_future(upload())
        while not (found := confined_checkers(tmp_path)):
            assert not running.done()
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises((asyncio.CancelledError, Failure)):
            await running
        return found[0]

    status = asyncio.run(look())
    assert status["NoNewPrivs"] == "1"
    assert int(status["CapEff"], 16) & ~0b110 == 0


def test_a_symlinked_model_file_is_served_in_place(tmp_path: Path) -> None:
    """Deployments often link files into the repository; of the link's target folder only that file is readable."""
    (tmp_path / "blobs").mkdir()
    models.mlp(tmp_path / "blobs" / "5f3a")
    (tmp_path / "linked" / "1").mkdir(parents=True)
    (tmp_path / "linked" / "1" / "model.onnx").symlink_to("../../blobs/5f3a")
    found = asyncio.run(check_in_place(tmp_path / "linked", "1/model.onnx", None, Settings()))
    assert found.batching.decided == "proven"
    assert [path.name for path in (tmp_path / "linked" / "1").iterdir()] == ["model.onnx"]


def confined_checkers(folder: Path) -> list[dict[str, str]]:
    """Return the status of this folder's checkers that already have a seccomp filter."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if str(folder).encode() not in (entry / "cmdline").read_bytes():
                continue
            lines = (entry / "status").read_text().splitlines()
        except OSError:
            continue
        status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if status.get("Seccomp") == "2":
            found.append(status)
    return found
