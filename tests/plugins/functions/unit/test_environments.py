"""The environment of a function: declared, resolved to a lock, built once, and used by check and worker."""

from __future__ import annotations

import asyncio
import fcntl
import subprocess
import time
import zipfile
from pathlib import Path

import pytest

from millstream.plugins.functions.document import DOCUMENT, read_document
from millstream.plugins.functions.function_packages import (
    ENVIRONMENTS,
    LOCK,
    UNUSED_S,
    asks_network,
    check_requirements,
    declared,
    key_of,
    remove_unused,
)
from millstream.plugins.functions.trial import Tried, tried
from millstream.plugins.functions.worker import Python
from millstream.services.errors import Code, Failure
from millstream.services.settings import Settings
from tests.plugins.functions.served import answers, texts

FUNCTION = "import greeting\n\ndef greet(name: str) -> str:\n    return greeting.of(name)\n"
SCRIPT = '# /// script\n# dependencies = ["greeting>=1"]\n# ///\n'


def wheel(folder: Path, version: str) -> None:
    """Write a wheel of the package `greeting`."""
    folder.mkdir(exist_ok=True)
    info = f"greeting-{version}.dist-info"
    members = {
        "greeting.py": f"def of(name):\n    return f'hello {{name}}, {version}'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: greeting\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*members, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"greeting-{version}-py3-none-any.whl", "w") as archive:
        for name, content in {**members, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(name), content)  # the same bytes at any time


def upload(tmp_path: Path, name: str, files: dict[str, str], *versions: str) -> Path:
    """Check a folder of a function with wheels, and return that of its version."""
    folder = tmp_path / name
    (folder / "source").mkdir(parents=True)
    for file, content in files.items():
        (folder / "source" / file).write_text(content)
    for version in versions:
        wheel(folder / "source" / "wheels", version)
    asyncio.run(tried(folder, Tried(folder / "source" / "service.py"), Settings(home=tmp_path / "home")))
    return folder


def environments(tmp_path: Path) -> list[Path]:
    return [one for one in (tmp_path / "home" / ENVIRONMENTS).iterdir() if (one / "complete").exists()]


@pytest.mark.parametrize("files", [
    {"service.py": SCRIPT + FUNCTION},
    {"service.py": FUNCTION, "requirements.txt": "greeting >= 1  # of ours\n"},
    {"service.py": FUNCTION,
     "pyproject.toml": '[project]\nname = "one"\nversion = "1"\ndependencies = ["greeting"]\n'},
], ids=["PEP 723", "requirements.txt", "pyproject.toml"])  # fmt: skip
def test_declared_packages_are_locked_installed_and_used(tmp_path: Path, files: dict[str, str]) -> None:
    folder = upload(tmp_path, "version", files, "1.0", "1.5")
    assert read_document(folder / DOCUMENT).lock == LOCK
    assert (folder / LOCK).read_text().startswith("greeting==1.5 \\\n    --hash=sha256:")
    (built,) = environments(tmp_path)
    signature = read_document(folder / DOCUMENT).signature
    instance = Python(tmp_path / "home").load(folder / DOCUMENT, signature, "cpu", 1)
    assert answers(instance, {"name": texts("you")}) == [[b"hello you, 1.5"]]
    instance.close()
    assert environments(tmp_path) == [built], "the worker uses that of the check"


def test_functions_with_the_same_lock_share_an_environment(tmp_path: Path) -> None:
    upload(tmp_path, "one", {"service.py": SCRIPT + FUNCTION}, "1.0")
    upload(tmp_path, "same", {"service.py": SCRIPT + FUNCTION + "\n_OTHER = 1\n"}, "1.0")
    assert len(environments(tmp_path)) == 1
    upload(tmp_path, "newer", {"service.py": SCRIPT + FUNCTION}, "2.0")
    assert len(environments(tmp_path)) == 2


def test_a_package_that_cannot_be_had_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(Failure) as refused:
        upload(tmp_path, "version", {"service.py": SCRIPT.replace(">=1", ">=9") + FUNCTION}, "1.0")
    assert refused.value.code is Code.INVALID
    assert refused.value.message.startswith("the function's packages cannot be installed: ")
    assert "greeting" in refused.value.message
    assert "\n" not in refused.value.message


def test_an_environment_that_is_damaged_or_half_built_is_built_again(tmp_path: Path) -> None:
    folder = upload(tmp_path, "version", {"service.py": SCRIPT + FUNCTION}, "1.0")
    (built,) = environments(tmp_path)
    (built / "complete").unlink()
    signature = read_document(folder / DOCUMENT).signature
    instance = Python(tmp_path / "home").load(folder / DOCUMENT, signature, "cpu", 1)
    assert answers(instance, {"name": texts("you")}) == [[b"hello you, 1.0"]]
    instance.close()


@pytest.mark.parametrize("line", [
    "-e .", "--index-url http://10.0.0.1/", "greeting @ file:///etc/passwd", "git+https://host/x", "./local.whl",
    "http://169.254.169.254/x.whl", "-r other.txt",
])  # fmt: skip
def test_requirements_reach_no_other_place_than_the_index(line: str) -> None:
    with pytest.raises(Failure, match="is not served"):
        check_requirements([line])


def test_requirements_are_read_as_they_are_written() -> None:
    lines = ["# a comment", "", "numpy", "torch>=2,<3  # why", 'a[b, c] ~= 1.0 ; python_version < "3.12"',
             "x==1 \\", "    --hash=sha256:" + "0" * 64]  # fmt: skip
    expected = ["numpy", "torch>=2,<3", 'a[b, c] ~= 1.0 ; python_version < "3.12"', "x==1"]
    assert check_requirements(lines) == expected


@pytest.mark.parametrize(("source", "found"), [
    ("", []), ("# /// script\n# dependencies = [\n#   'a',\n#   'b>1',\n# ]\n# ///\n", ["a", "b>1"]),
    ("# /// script\n# requires-python = '>=3.11'\n# ///\n", []), ("# /// other\n# dependencies = ['a']\n# ///\n", []),
])  # fmt: skip
def test_the_block_of_pep_723(tmp_path: Path, source: str, found: list[str]) -> None:
    (tmp_path / "service.py").write_text(source)
    assert declared(tmp_path / "service.py") == found


@pytest.mark.parametrize(("content", "asks"), [
    ("", False), ("dependencies = []", False), ("[tool.millstream]\n# network = true", True),
    ("[tool.millstream]\n# network = false", False), ("[tool.other]\n# network = true", False),
])  # fmt: skip
def test_the_network_is_asked_for_in_the_file(tmp_path: Path, content: str, asks: bool) -> None:
    (tmp_path / "service.py").write_text(f"# /// script\n# {content}\n# ///\n")
    assert asks_network(tmp_path / "service.py") is asks


@pytest.mark.parametrize(
    "content", ["[tool.millstream]\n# network = 1", "[tool.millstream]\n# memory = 1", "tool = 1\n# x ="]
)
def test_what_is_asked_for_in_a_wrong_way_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "service.py").write_text(f"# /// script\n# {content}\n# ///\n")
    with pytest.raises(Failure, match=r"service.py: "):
        asks_network(tmp_path / "service.py")


@pytest.mark.parametrize("content", ["dependencies = [", "dependencies = 'a'", "dependencies = [1]"])
def test_a_block_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "service.py").write_text(f"# /// script\n# {content}\n# ///\n")
    with pytest.raises(Failure, match=r"service.py: "):
        declared(tmp_path / "service.py")


def test_environments_that_nothing_uses_are_removed_after_a_week(tmp_path: Path) -> None:
    home = tmp_path / "home"
    folder = upload(tmp_path, "kept", {"service.py": SCRIPT + FUNCTION}, "1.0")
    upload(tmp_path, "running", {"service.py": SCRIPT + FUNCTION}, "2.0")
    upload(tmp_path, "building", {"service.py": SCRIPT + FUNCTION}, "3.0")
    upload(tmp_path, "gone", {"service.py": SCRIPT + FUNCTION}, "4.0")
    built = {one.name: one for one in environments(tmp_path)}
    kept, running, building, gone = (
        key_of((tmp_path / name / LOCK).read_bytes()) for name in ("kept", "running", "building", "gone")
    )
    assert built.keys() == {kept, running, building, gone}
    folder.rename((home / "repository").resolve())
    later = time.time() + UNUSED_S + 60
    assert remove_unused(home, later - 120) == []
    command = [str(built[running] / "bin" / "python"), "-c", "print(flush=True); input()"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        (home / ENVIRONMENTS / f"{building}.lock").open("w") as held,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        fcntl.flock(held, fcntl.LOCK_EX)
        assert remove_unused(home, later) == [gone]
        process.communicate(b"\n")
    assert sorted(remove_unused(home, later)) == sorted([running, building])
    assert [one.name for one in environments(tmp_path)] == [kept]
