"""Rules of pyproject.toml notice what they forbid: each is shown a breach in a copy of the code, or in a line."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from millstream.services.environment import child_environment

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
CONTRACTS = [contract["name"] for contract in TOOLS["importlinter"]["contracts"]]
BANNED = TOOLS["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
#: the first words of a contract's name -> a file, and the import that the contract forbids in it
BREACHES = {
    "the core knows no plug-in": ("services/sizes.py", "millstream.plugins.proof"),
    "plug-ins import gateway": ("plugins/plan/view.py", "millstream.gateway.app"),
    "plug-ins import workers": ("plugins/plan/pools.py", "millstream.workers.worker"),
    "the HTTP/2 library": ("gateway/http2/events.py", "millstream.services.errors"),
    "the client stands on": ("client/errors.py", "millstream.services.queue.keys"),
    "the Python client knows no command": ("client/async_client.py", "millstream.client.cli.terminal"),
    "services imports neither": ("services/version.py", "millstream.workers.worker"),
    "gateway and workers are coupled": ("workers/backends/engine_parts.py", "millstream.gateway.tensors.outputs"),
    "gRPC is known": ("gateway/v2/options.py", "grpc"),
    "FastAPI is known": ("gateway/scheduling/lane.py", "fastapi"),
    "Redis is known": ("workers/batches/consumer.py", "redis"),
    "inference libraries are known": ("workers/batches/runner.py", "onnxruntime"),
    "folders of gateway have an order": ("gateway/tensors/outputs.py", "millstream.gateway.scheduling.lane"),
    "folders of the gRPC adapter have an order": (
        "gateway/grpc/connections/call_head.py",
        "millstream.gateway.grpc.methods.metadata_calls",
    ),
    "what decides on batches": ("gateway/scheduling/batching/dispatch.py", "millstream.gateway.scheduling.lane"),
    "folders of workers have an order": ("workers/models/wanted.py", "millstream.workers.residency.loader"),
    "folders of services have an order": ("services/process/waits.py", "millstream.services.settings"),
    "decisions, codecs and formats are pure": ("gateway/scheduling/batching/batcher.py", "time"),
}


@pytest.mark.plugins
def test_each_contract_notices_a_breach(tmp_path: Path) -> None:
    """All breaches are planted in one copy: each contract is broken by its own."""
    for folder in ("src", "gateway", "services", "workers", "plugins", "client", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert "0 broken" in lint_imports(tmp_path)
    for file, module in BREACHES.values():
        with (tmp_path / file).open("a") as code:
            code.write(f"\nimport {module}\n")
    output = " ".join(lint_imports(tmp_path).split())
    assert f"0 kept, {len(CONTRACTS)} broken." in output
    for contract in CONTRACTS:
        (start,) = [words for words in BREACHES if contract.startswith(words)]
        file, module = BREACHES[start]
        importer = "millstream." + file.removesuffix(".py").replace("/", ".")
        details = output.split("Broken contracts", 1)[1]
        assert re.search(rf"{re.escape(importer)} -> {re.escape(module)}\b", details), (contract, details)


def lint_imports(folder: Path) -> str:
    """Output of import-linter on the package in `folder`, not on the installed one."""
    environment = child_environment({"PYTHONPATH": str(folder / "src"), "COLUMNS": "400", "NO_COLOR": "1"})
    done = subprocess.run(
        [BIN / "lint-imports", "--no-cache"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert not done.stderr, done.stderr
    return done.stdout


def ruff(code: str, file: str = "services/planted.py") -> set[str]:
    """Rules that `code` breaks, as the content of `file`."""
    command = [str(BIN / "ruff"), "check", "--output-format", "concise", "--stdin-filename", str(ROOT / file), "-"]
    done = subprocess.run(command, input=code, cwd=ROOT, capture_output=True, text=True, check=False)
    return set(re.findall(r":\d+:\d+: (\w+)", done.stdout))


@pytest.mark.parametrize("name", BANNED)
def test_what_is_banned_is_noticed(name: str) -> None:
    parent, _, last = name.rpartition(".")
    code = f'"""Planted."""\n\nfrom {parent} import {last}\n\nprint({last})\n' if parent else f"import {name}\n"
    assert "TID251" in ruff(code)


BRANCHES = "\n".join(f"    if number == {number}:\n        print({number})" for number in range(13))
RETURNS = "\n".join(f"    if number == {number}:\n        return {number}" for number in range(9))


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("C901", f"def planted(number: int) -> None:\n{BRANCHES}\n"),
        ("PLR0912", f"def planted(number: int) -> None:\n{BRANCHES}\n"),
        ("PLR0911", f"def planted(number: int) -> int:\n{RETURNS}\n    return 0\n"),
        ("PLR0915", "def planted() -> None:\n" + "    print()\n" * 51),
        ("PLR0913", "def planted(a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int) -> None:\n    ...\n"),
        ("E501", f"# {'word ' * 24}\n"),
    ],
)
def test_limits_on_functions_and_lines_are_noticed(rule: str, code: str) -> None:
    assert rule in ruff(code)


def test_one_module_alone_reads_the_environment() -> None:
    """Exceptions from the ban are lines with a reason: variables of terminals and shells."""
    exceptions = []
    for folder in ("gateway", "services", "workers", "plugins", "client", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            lines = path.read_text().splitlines()
            exceptions += [str(path.relative_to(ROOT)) for line in lines if re.search(r"os\.(environ|getenv)", line)]
    assert sorted(exceptions) == [
        "client/cli/terminal.py",
        "services/environment.py",
    ]


METHODS_MAX = 30
#: classes above it today: a number may only become smaller, and a row goes when it is no longer needed
LARGER_CLASSES = {
    "gateway/grpc/connections/fast_call.py:FastCall": 36,
    "services/repository/folder.py:FolderRepository": 33,
    "workers/batches/consumer.py:Consumer": 46,
}


def test_no_class_has_more_methods_than_a_reader_can_keep_in_mind() -> None:
    counts: dict[str, int] = {}
    for folder in ("gateway", "services", "workers"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    methods = sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)
                    counts[f"{path.relative_to(ROOT)}:{node.name}"] = methods
    assert len(counts) > 700
    larger = {name: count for name, count in counts.items() if count > METHODS_MAX}
    assert {name: count for name, count in larger.items() if count > LARGER_CLASSES.get(name, 0)} == {}
    assert LARGER_CLASSES.keys() <= larger.keys(), "a row that is no longer needed"


def test_lanes_and_their_parts_know_each_other_in_one_direction() -> None:
    """A module that another one imports for types alone is imported by it: objects in a circle."""
    files = [
        path for folder in ("scheduling", "placement", "catalog") for path in (ROOT / "gateway" / folder).rglob("*.py")
    ]
    files += (ROOT / "workers" / "residency").rglob("*.py")
    assert len(files) > 40
    assert [str(path.relative_to(ROOT)) for path in files if "TYPE_CHECKING" in path.read_text()] == []


def test_no_file_imports_httpx() -> None:
    """It has no maintainer. Ruff's ban does not apply to tests."""
    folders = ("gateway", "services", "workers", "plugins", "client", "examples", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 400
    pattern = re.compile(r"^\s*(import|from) httpx\b", re.MULTILINE)
    assert [str(path.relative_to(ROOT)) for path in files if pattern.search(path.read_text())] == []


def test_a_modules_docstring_does_not_repeat_its_name() -> None:
    folders = ("gateway", "services", "workers", "plugins", "client")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 400
    assert [str(path.relative_to(ROOT)) for path in files if path.read_text().startswith(f'"""{path.stem}: ')] == []
