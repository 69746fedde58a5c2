"""The wheel alone: what is in it, and `millstream up` from an environment that has nothing of this checkout."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.role_environment import PROJECT, ROOT, build_wheel, install, make_environment, needed_by
from tests.kit.wait import wait_until

STOP_S_MAX = 120.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_has_one_import_package(contents: set[str]) -> None:
    tops = {name.split("/")[0] for name in contents}
    information = next(name for name in tops if name.endswith(".dist-info"))
    assert tops == {"millstream", information}
    assert {f"{information}/licenses/LICENSE", "millstream/py.typed", "millstream/__init__.py"} <= contents


def test_wheel_has_every_file_of_the_packages(contents: set[str]) -> None:
    folders = ["gateway", "services", "workers", "examples"]
    tracked = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    files = tracked.stdout.splitlines()
    assert {f"millstream/{file}" for file in files if (ROOT / file).is_file()} <= contents
    assert any(name.endswith(".lua") for name in contents)
    assert "millstream/examples/digits/digits.onnx" in contents
    assert not [name for name in contents if "__pycache__" in name]


def test_metadata_names_the_licence_the_extras_and_the_command(wheel: Path, contents: set[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata, entry_points = (
            archive.read(next(name for name in contents if name.endswith(f".dist-info/{file}"))).decode()
            for file in ("METADATA", "entry_points.txt")
        )
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    extras = {line.removeprefix("Provides-Extra: ") for line in metadata.splitlines() if "Provides-Extra: " in line}
    assert extras == set(PROJECT["optional-dependencies"])
    assert "millstream = millstream.services.cli.__main__:main" in entry_points


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Iterator[Path]:
    """The installed `millstream` command. Nothing in its environment leads to this checkout."""
    folder = tmp_path_factory.mktemp("installed")
    python = make_environment(folder, needed_by("all"))
    install(python, wheel)
    yield folder / "bin/millstream"


def bare_environment(home: Path) -> dict[str, str]:
    """Without variables of this test run, and without a Redis on PATH: the one that is embedded is used."""
    return {"HOME": str(home), "PATH": str(home), "LANG": "C.UTF-8", "NO_COLOR": "1"}


def test_no_path_of_the_installation_leads_to_the_checkout(command: Path, tmp_path: Path) -> None:
    code = "import json, sys, millstream.services as s; print(json.dumps([s.__file__, *sys.path]))"
    done = subprocess.run(
        [command.parent / "python", "-c", code],
        cwd=tmp_path,
        env=bare_environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    location, *paths = json.loads(done.stdout)
    assert Path(location).is_relative_to(command.parent.parent)
    checkout = [path for path in paths if path and Path(path).resolve().is_relative_to(ROOT)]
    assert checkout == []


def test_up_serves_the_example_and_stops_at_ctrl_c(command: Path, tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [command, "up", "--http-port", "0", "--grpc-port", "0"],
            cwd=tmp_path,
            env=bare_environment(tmp_path),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        url = wait_until(lambda: ready_url(process, tmp_path / "output"), timeout_s=120)
        request = urllib.request.Request(
            f"{url}/v2/models/digits/infer", data=(ROOT / "examples/digits/request.json").read_bytes()
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer = json.load(reply)
        assert answer["model_name"] == "digits"
        assert {output["name"] for output in answer["outputs"]} >= {"probabilities"}
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S_MAX) == 0, (tmp_path / "output").read_text()
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / ".millstream/repository").is_dir()
    assert not [*(tmp_path / ".millstream/run").glob("*.sock")]
    assert "Traceback" not in (tmp_path / "output").read_text()


def ready_url(process: subprocess.Popen[bytes], output: Path) -> str | None:
    """What `ready URL` says, once it is there."""
    lines = output.read_text().splitlines()
    assert process.poll() is None, "\n".join(lines)
    return next((line.split()[1] for line in lines if line.startswith("ready ")), None)
