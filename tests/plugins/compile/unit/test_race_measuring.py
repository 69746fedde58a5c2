"""plugins/compile/form_runner.py: a process that runs somebody else's code is not believed."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from millstream.plugins.compile import form_runner
from millstream.plugins.compile.form_runner import Measuring, Opening, read_outputs, write_outputs
from millstream.plugins.compile.race.report import STDERR_CHARACTERS_MAX
from millstream.services.sandbox import child
from millstream.services.sandbox.child import ChildFailedError
from tests.kit.races import MLP

PYTHON = sys.executable
HELLO = """print('{"error": ""}', flush=True); """


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a program that is started in place of a measuring process."""
    program = tmp_path / "program"
    monkeypatch.setattr(sys, "executable", str(program))
    return program


def say(script: Path, code: str) -> None:
    script.write_text(f"#!{PYTHON}\nimport sys, time\n{code}\n")
    script.chmod(0o700)


def opening(tmp_path: Path) -> Opening:
    return Opening(
        backend="onnxruntime",
        path=tmp_path / "m",
        signature=MLP,
        device="cpu",
        threads=1,
        inputs=tmp_path / "i.npz",
        folder=tmp_path,
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('hello', flush=True); time.sleep(60)", "replied nothing that can be read"),
        ("sys.exit(3)", "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
        ("import os; os.close(1); time.sleep(60)", "closed its output"),
        ('print(\'{"error": "no\\\\nway"}\', flush=True)', "no way"),
        ('print(\'{"times_s": "many"}\', flush=True)', "replied nothing that can be read"),
    ],
)
def test_a_process_that_does_not_load_says_why(script: Path, tmp_path: Path, code: str, said: str) -> None:
    say(script, code)
    with pytest.raises(ChildFailedError, match=said):
        Measuring(opening(tmp_path), 30)


def test_a_flood_without_a_line_ends(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "REPORT_BYTES_MAX", 1 << 18)
    say(script, "while True: sys.stdout.write('x' * 65536)")
    with pytest.raises(ChildFailedError):
        Measuring(opening(tmp_path), 30)


def test_standard_error_is_bounded_and_its_end_is_kept(script: Path, tmp_path: Path) -> None:
    say(script, "sys.stderr.write('x' * 1000000 + 'the end'); sys.stderr.flush(); sys.exit(1)")
    with pytest.raises(ChildFailedError) as failed:
        Measuring(opening(tmp_path), 30)
    assert failed.value.stderr.endswith("the end")
    assert len(failed.value.stderr) <= STDERR_CHARACTERS_MAX


@pytest.mark.parametrize("times", ["[]", "[0.0]", "[-1.0]"])
def test_times_that_cannot_be_are_refused(script: Path, tmp_path: Path, times: str) -> None:
    say(script, f"{HELLO}sys.stdin.readline(); sys.stdin.readline(); print('{{\"times_s\": {times}}}', flush=True)")
    process = Measuring(opening(tmp_path), 30)
    try:
        with pytest.raises(ChildFailedError, match="no times"):
            process.times(1, 0.01, 30)
    finally:
        process.close()


def test_a_process_that_says_nothing_is_killed_with_what_it_started(script: Path, tmp_path: Path) -> None:
    said = tmp_path / "pid"
    code = "import subprocess; child = subprocess.Popen(['sleep', '600']); "
    code += f"open({str(said)!r}, 'w').write(str(child.pid)); {HELLO}time.sleep(600)"
    say(script, code)
    process = Measuring(opening(tmp_path), 30)
    with pytest.raises(TimeoutError):
        process.times(1, 0.01, 0.01)
    child = int(said.read_text())
    with suppress(ProcessLookupError):  # it is gone already
        descriptor = os.pidfd_open(child)
        try:
            assert select.select([descriptor], [], [], 30)[0]
        finally:
            os.close(descriptor)


def test_outputs_survive_the_file_text_included(tmp_path: Path) -> None:
    text = np.array([[b"a\0", b""], [b"c", b"\xff"]], dtype=object)
    given = [np.arange(6, dtype=np.float32).reshape(2, 3), text, np.zeros((0, 2), np.int64)]
    write_outputs(tmp_path / "o.npz", given)
    found = read_outputs(tmp_path / "o.npz")
    assert [array.shape for array in found] == [array.shape for array in given]
    assert found[1].tolist() == text.tolist()


def test_outputs_that_are_no_file_of_arrays_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link", "absent"):
        with pytest.raises(ValueError, match="there are none"):
            read_outputs(tmp_path / name)
    write_outputs(tmp_path / "o.npz", [np.zeros(1000)])
    monkeypatch.setattr(form_runner, "ANSWER_BYTES_MAX", 100)
    with pytest.raises(ValueError, match="more than"):
        read_outputs(tmp_path / "o.npz")


STARTS = """import threading
threading.stack_size(32768)
for _ in range(1200):
    threading.Thread(target=time.sleep, args=(99,)).start()"""
TAKES = {
    "threads": (
        STARTS,
        "it started more than 1024 threads",
    ),
    "disk": ("open(FOLDER + '/large', 'wb').write(b'x' * (3 << 20))", "its files take more than 2 MiB"),
    "files without a name": (
        "import os; kept = open(FOLDER + '/gone', 'w+b'); kept.write(b'x' * (3 << 20)); os.unlink(kept.name)",
        "its files take more than 2 MiB",
    ),
    "memory": ("kept = b'x' * (200 << 20)", "its processes use more than 96 MiB of memory together"),
}


@pytest.mark.parametrize("answers", [True, False], ids=["and answers at once", "and is silent"])
@pytest.mark.parametrize("what", TAKES)
def test_a_process_that_takes_too_much_is_ended(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, answers: bool
) -> None:
    monkeypatch.setattr(form_runner, "WRITTEN_BYTES_MAX", 2 << 20)
    code, why = TAKES[what]
    says = "for _ in sys.stdin: print('{\"times_s\": [1]}', flush=True)" if answers else "time.sleep(1e6)"
    say(script, f"FOLDER = {str(tmp_path)!r}\n{code}\n{says}")

    def measure() -> None:
        measured = Measuring(opening(tmp_path).model_copy(update={"memory_bytes": 64 << 20}), 60)
        while True:
            measured.times(1, 0.01, 60)

    with pytest.raises(ChildFailedError, match=why):
        measure()
