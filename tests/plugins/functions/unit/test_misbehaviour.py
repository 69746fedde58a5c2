"""Each way in which the process of an instance can die, cheat or take too much, beside one that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from millstream.plugins.children.arrays import to_array, to_tensor
from millstream.plugins.children.process import EndedError, InstanceProcess, InstanceProcesses, RunError
from millstream.plugins.functions.document import RunsIn, ServedFile, program_of
from millstream.services.sandbox.confine import available
from tests.kit.wait import wait_until
from tests.plugins.functions.served import texts

MEMORY_BYTES = 256 << 20


@pytest.fixture
def processes() -> Iterator[InstanceProcesses]:
    processes = InstanceProcesses()
    yield processes
    processes.close()


def started(processes: InstanceProcesses, folder: Path, source: str) -> InstanceProcess:
    """Start a function, which is not loaded yet."""
    folder.mkdir(exist_ok=True)
    (folder / "service.py").write_text(dedent(source))
    runs_in = RunsIn(sys.executable, MEMORY_BYTES, 1, unconfined=False)
    program = program_of(folder, ServedFile("service.py"), folder.name, runs_in)
    return processes.start(program)


def ask(child: InstanceProcess, text: str = "a") -> object:
    (answer,) = child.run([to_tensor("text", "BYTES", texts(text))]).tensors
    return to_array(answer).tolist()


FUNCTION = """
import ctypes, os, signal, socket, subprocess, sys, threading, time

def f(text: str) -> str:
    if text == "a":
        return text
    {does}
    return "done"
"""
ENDS = {
    "os.abort()": "its process was ended by SIGABRT",
    "os._exit(0)": "its process ended with exit code 0",
    "os.kill(os.getpid(), signal.SIGKILL)": "its process was ended by SIGKILL",
    "ctypes.string_at(1)": "its process was ended by SIGSEGV",
    "os.closerange(0, 4096); time.sleep(3600)": "it closed its connection",
    "os.write(int(sys.argv[1].split(',')[0]), b'x' * 4096); time.sleep(3600)": "it broke its connection: a message",
    "os.write(int(sys.argv[1].split(',')[0]), "
    'b"\\x0c\\0\\0\\0\\0\\0\\0\\0" + b\'{"run": 999}\')': "it answered something that it was not asked",
}
FAILS = {
    "raise SystemExit(3)": "it called exit(3) (service.py, line 7)",
    "raise KeyboardInterrupt": "KeyboardInterrupt (service.py, line 7)",
    "raise BaseException('all of them')": "BaseException: all of them (service.py, line 7)",
    "x = bytearray(1 << 30)": "out of memory",
    "os.fork()": "PermissionError: [Errno 1] Operation not permitted (service.py, line 7)",
    "subprocess.run(['/bin/true'])": "PermissionError: [Errno 1] Operation not permitted",
    "socket.create_connection(('127.0.0.1', 80))": "PermissionError: [Errno 1] Operation not permitted",
    "os.kill(os.getppid(), signal.SIGKILL)": "PermissionError: [Errno 1] Operation not permitted",
    "open('/etc/passwd').read()": "PermissionError: [Errno 13] Permission denied: '/etc/passwd' (service.py, line 7)",
    "open('/proc/1/environ').read()": "PermissionError: [Errno 13] Permission denied: '/proc/1/environ'",
    "open(__file__, 'w')": "PermissionError: [Errno 13] Permission denied",
    "return 1": "its result is int, and str was declared",
    "return f": "its result is function, and str was declared",
    "threading.stack_size(1 << 29); threading.Thread(target=print).start()": "RuntimeError: can't start new thread",
}


@pytest.mark.parametrize(("does", "why"), ENDS.items())
def test_a_process_that_ends_says_why_and_its_neighbour_goes_on(
    processes: InstanceProcesses, tmp_path: Path, does: str, why: str
) -> None:
    child = started(processes, tmp_path / "bad", FUNCTION.format(does=does))
    neighbour = started(processes, tmp_path / "good", FUNCTION.format(does="pass"))
    child.load()
    neighbour.load()
    assert ask(child) == [b"a"]
    with pytest.raises(EndedError, match=why.replace("(", r"\(").replace(")", r"\)")):
        ask(child, "now")
    assert why in child.ended
    with pytest.raises(EndedError):
        ask(child)
    assert ask(neighbour, "b") == [b"done"]


@pytest.mark.skipif(not available().stand, reason="nothing confines processes on this kernel")
@pytest.mark.parametrize(("does", "why"), FAILS.items())
def test_what_fails_fails_its_run_alone(processes: InstanceProcesses, tmp_path: Path, does: str, why: str) -> None:
    child = started(processes, tmp_path / "bad", FUNCTION.format(does=does))
    child.load()
    with pytest.raises(RunError) as failed:
        ask(child, "now")
    assert str(failed.value).startswith(why)
    assert ("functions have no network" in str(failed.value)) == ("Errno 1]" in why)
    assert ask(child) == [b"a"]


@pytest.mark.parametrize("does", [
    "while True: pass",
    "while True:\n        try:\n            time.sleep(3600)\n        except Exception:\n            pass",
])  # fmt: skip
def test_a_run_that_can_be_ended_leaves_the_process(processes: InstanceProcesses, tmp_path: Path, does: str) -> None:
    child = started(processes, tmp_path / "bad", FUNCTION.format(does=does))
    child.load()
    with ended_soon(child), pytest.raises(RunError, match="the run was terminated"):
        ask(child, "now")
    assert ask(child) == [b"a"]


@pytest.mark.parametrize("does", [
    "while True:\n        try:\n            time.sleep(3600)\n        except BaseException:\n            pass",
    "[signal.signal(one, signal.SIG_IGN) for one in (2, 15)]; time.sleep(3600)",
    "signal.pthread_sigmask(signal.SIG_BLOCK, {2}); time.sleep(3600)",
])  # fmt: skip
def test_a_run_that_does_not_end_is_killed(processes: InstanceProcesses, tmp_path: Path, does: str) -> None:
    child = started(processes, tmp_path / "bad", FUNCTION.format(does=does))
    child.load()
    with ended_soon(child), pytest.raises(EndedError, match="its run did not end when it was asked to"):
        ask(child, "now")
    assert child.terminated


class ended_soon:
    """Interrupts the run in the block once it has begun."""

    def __init__(self, child: InstanceProcess) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
        self._child = child

    def __enter__(self) -> None:
        import threading

        threading.Thread(target=self._interrupt, daemon=True).start()

    def _interrupt(self) -> None:
        self._process.wait()
        self._child.interrupt()

    def __exit__(self, *_: object) -> None:
        self._process.wait()


def test_memory_beyond_the_limit_ends_the_process(processes: InstanceProcesses, tmp_path: Path) -> None:
    """Shared memory is none that a resource limit counts: the group's watch does."""
    does = (
        "fd = int(sys.argv[1].split(',')[2]); os.ftruncate(fd, 1 << 30); import mmap; m = mmap.mmap(fd, 1 << 30)\n"
        "    for at in range(0, 1 << 30, 4096): m[at] = 1\n    time.sleep(3600)"
    )
    child = started(processes, tmp_path / "bad", FUNCTION.format(does=does))
    child.load()
    with pytest.raises(EndedError, match="it was ended: its processes use more than 256 MiB of memory together"):
        ask(child, "now")


def test_a_leak_ends_in_an_error_and_not_in_the_machine(processes: InstanceProcesses, tmp_path: Path) -> None:
    source = "kept = []\ndef f(text: str) -> str:\n    kept.append(bytearray(32 << 20))\n    return text\n"
    child = started(processes, tmp_path / "bad", source)
    child.load()
    with pytest.raises((RunError, EndedError), match=r"out of memory|more than 256 MiB"):
        for _ in range(20):
            ask(child)


def test_endless_output_does_not_fill_memory_or_the_log(
    processes: InstanceProcesses, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    source = FUNCTION.format(does="pass").replace(
        "def f",
        "threading.Thread(target=lambda: [print('x' * 70) for _ in iter(int, 1)], daemon=True).start()\n\ndef f",
    )
    child = started(processes, tmp_path / "bad", source)
    child.load()
    began, before = time.monotonic(), time.process_time()
    while time.monotonic() < began + 2:
        assert ask(child) == [b"a"]
        time.sleep(0.1)
    assert time.process_time() - before < 1.0, "its reader is not busy"
    assert 20 <= sum("xxx" in record.message for record in caplog.records) <= 100
    assert any("more lines were not logged" in record.message for record in caplog.records)
    assert len(child.lines) == 50


@pytest.mark.parametrize(("source", "why"), [
    ("import os\nos._exit(7)", "its process ended with exit code 7"),
    ("import sys\nprint('the reason')\nsys.stdout.flush()\nimport os\nos.abort()",
     "its process was ended by SIGABRT; it printed last: the reason"),
    ("x = bytearray(1 << 30)", "out of memory"),
    ("class Model:\n    def load(self): raise OSError('no weights')\n    def predict(self, text: str) -> str: ...",
     "OSError: no weights (service.py, line 2)"),
])  # fmt: skip
def test_a_load_that_fails_says_why(processes: InstanceProcesses, tmp_path: Path, source: str, why: str) -> None:
    child = started(processes, tmp_path / "bad", source)
    with pytest.raises((RunError, EndedError)) as failed:
        child.load()
    assert str(failed.value).startswith(why)
    child.close()
    assert not Path(f"/proc/{child.pid}").exists()


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(FUNCTION.format(does="pass"))
    code = f"""if True:
        import sys, time
        from pathlib import Path
        from millstream.plugins.children.process import InstanceProcesses
        from millstream.plugins.functions.document import RunsIn, ServedFile, program_of
        runs_in = RunsIn(sys.executable, 1 << 30, 1, unconfined=False)
        program = program_of(Path({str(tmp_path)!r}), ServedFile("service.py"), "f", runs_in)
        child = InstanceProcesses().start(program)
        child.load()
        print(child.pid, flush=True)
        time.sleep(3600)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z (zombie)" in Path(f"/proc/{pid}/status").read_text())


def test_large_answers_are_those_of_the_run(processes: InstanceProcesses, tmp_path: Path) -> None:
    source = """
        from typing import Annotated
        import numpy as np
        from numpy.typing import NDArray
        Rows = Annotated[NDArray[np.float32], (None, 1000)]
        def f(x: Rows) -> Rows: return x + 1
        """
    child = started(processes, tmp_path / "large", source)
    child.load()
    for rows in (1, 5000, 2, 10_000):
        x = np.arange(rows * 1000, dtype=np.float32).reshape(rows, 1000)
        (answer,) = child.run([to_tensor("x", "FP32", x)]).tensors
        np.testing.assert_array_equal(to_array(answer), x + 1)
