"""What `import millstream` offers: cheap to import, complete for type checkers, and the same in both clients."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import millstream
from millstream import AsyncClient, Client, Metrics
from millstream.services.errors import Failure

PROGRAM = """
import numpy as np
from millstream import AsyncClient, Client, Failure, ServerError

with Client("http://127.0.0.1:8000", timeout=5) as client:
    reveal_type(client.predict("m", np.zeros(3))["y"])
    reveal_type(client.models()[0]["versions"][0]["state"])
    reveal_type(client.push("m", "m.onnx")["version"])
    client.predict("m", np.zeros(3), versoin=3)
    client.nothing()


async def main() -> None:
    async with AsyncClient() as client:
        reveal_type(await client.predict("m", {"x": [1.0]}))
        reveal_type(await client.predict("m", [{"a": 1, "b": "x"}]))
"""


def test_importing_millstream_imports_nothing_else():
    code = (
        "import sys; before = set(sys.modules); import millstream; dir(millstream)\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['millstream']", done.stdout


def test_errors_can_be_imported_without_numpy_and_httpx2():
    imported = "'numpy' in sys.modules, 'httpx2' in sys.modules"
    code = f"import sys; from millstream import Failure, ServerError; print({imported})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_every_public_name_is_there():
    assert millstream.__all__ == sorted(millstream.__all__)
    for name in millstream.__all__:
        assert getattr(millstream, name).__name__ == name
        assert name in dir(millstream)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = millstream.Nothing


def test_type_checkers_see_the_client(tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    revealed = [line.partition("Revealed type is ")[2].strip('"').removeprefix("builtins.") for line in lines]
    assert [line for line in revealed if line][1:] == [
        "str",
        "int",
        "millstream.client.inference.Prediction",
        "list[dict[str, Any]]",
    ], done.stdout
    assert "ndarray" in next(line for line in revealed if line)
    errors = [line for line in lines if line.startswith("error")]
    assert len(errors) == 3, done.stdout
    assert '"versoin"' in errors[0]
    assert "No overload" in errors[1]  # the same call
    assert "nothing" in errors[2]


def test_both_clients_have_the_same_methods():
    def methods(kind: type) -> dict[str, inspect.Signature]:
        return {
            name: inspect.signature(method)
            for name, method in vars(kind).items()
            if inspect.isfunction(method) and not name.startswith("_")
        }

    def awaited(method: inspect.Signature) -> str:
        return str(method).replace("AsyncIterator[", "Iterator[")

    blocking, awaiting = methods(Client), methods(AsyncClient)
    assert {name: str(one) for name, one in blocking.items()} == {name: awaited(one) for name, one in awaiting.items()}
    assert inspect.signature(Client) == inspect.signature(AsyncClient)
    for name in awaiting:
        method = getattr(AsyncClient, name)
        assert inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method), name
        assert inspect.getdoc(getattr(Client, name)), name


def test_metrics_are_parsed():
    page = '# TYPE a counter\na_total{m="x"} 1\na_total{m="y"} 2\n# TYPE b gauge\nb NaN\n'
    metrics = Metrics(page)
    assert metrics.value("a_total") == 3
    assert metrics.value("a_total", m="y") == 2
    assert metrics.select("a_total", m="x")[0].labels == {"m": "x"}
    assert metrics.text == page
    for broken in ("a", "a b c", "{", "<html>"):
        with pytest.raises(Failure, match="not a metrics page"):
            _ = Metrics(broken).samples


def test_clients_tell_where_they_point_but_no_key():
    with Client("http://127.0.0.1:1", key="secret") as client:
        assert repr(client) == "Client('http://127.0.0.1:1')"
    with pytest.raises(Failure, match="visible ASCII"):
        Client("http://127.0.0.1:1", key="a\nb")
