"""The audit of packages says so in one line if the vulnerability service knows nothing; the list of components."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROLES = ("gateway", "worker-cpu", "worker-gpu", "serving")
LOCK = r"""
redis==8.1.0 \
    --hash=sha256:{0} \
    --hash=sha256:{0}
only-on-windows==1.0 ; sys_platform == 'win32' \
    --hash=sha256:{0}
msgspec==0.22.0 ; python_full_version >= '3.11' \
    --hash=sha256:{0}
numpy==2.4.6 \
    --hash=sha256:{0}
""".format("a" * 64)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = util.spec_from_file_location("supply_chain", ROOT / "deploy" / "supply_chain.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "role.txt").write_text(LOCK)
    monkeypatch.setattr(module, "LOCKS", tmp_path)
    return module


def answering(program: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, output: str, error: str = "") -> None:
    """Put a pip-audit in front of the real one that prints this."""
    (folder / "pip_audit.py").write_text(
        f"import sys\nprint({output!r})\nprint({error!r}, file=sys.stderr)\nsys.exit(1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))


def report(*flaws: dict[str, Any], **of_all: Any) -> str:
    versions = {"redis": "8.1.0", "msgspec": "0.22.0", "numpy": "2.4.6"}
    items = [{"name": name, "version": number, "vulns": [], **of_all} for name, number in versions.items()]
    items[0]["vulns"] = list(flaws)
    return json.dumps({"dependencies": items, "fixes": []})


def test_every_lock_is_read_and_packages_of_other_systems_are_left_out(program: Any, tmp_path: Path) -> None:
    assert [requirement.name for requirement, _ in program.locked("role")] == ["redis", "msgspec", "numpy"]
    for role in ROLES:
        assert (ROOT / "deploy" / "locks" / f"{role}.txt").exists()
    assert program.ROLES == ROLES


def test_vulnerabilities_are_named(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flaw = {"id": "CVE-2099-1", "fix_versions": ["8.1.1"], "aliases": [], "description": "x"}
    answering(program, tmp_path, monkeypatch, report(flaw))
    assert program.main(["audit", "role"]) == 1
    assert capsys.readouterr().err == "role: redis 8.1.0: CVE-2099-1, fixed in 8.1.1\n"
    answering(program, tmp_path, monkeypatch, report())
    assert program.main(["audit", "role"]) == 0
    assert capsys.readouterr().out == "no known vulnerabilities in the packages of role\n"


@pytest.mark.parametrize(
    ("output", "error", "words"),
    [
        ("", "Traceback\nConnectionError: no route", "not audited, pip-audit failed: ConnectionError: no route"),
        ("[]", "", "not audited, pip-audit failed: no output"),
        ('{"dependencies": []}', "", "only 0 of 3 packages audited"),
        (report(skip_reason="Dependency not found on PyPI"), "", "audited, the vulnerability service answered: Dep"),
    ],
)
def test_without_a_vulnerability_service_one_line_says_so_and_it_fails(
    program: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: str,
    error: str,
    words: str,
) -> None:
    answering(program, tmp_path, monkeypatch, output, error)
    assert program.main(["audit", "role"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert words in line


AUDIT_PYTHON = ROOT / ".venv" / "audit" / "bin" / "python"


def test_the_components_of_each_role(tmp_path: Path) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(ROOT / "deploy")!r})
import supply_chain; from pathlib import Path
supply_chain.SBOMS = Path({str(tmp_path)!r}); supply_chain.ROOT = Path({str(ROOT)!r})
print([supply_chain.sbom(role) for role in supply_chain.ROLES])
"""
    output = subprocess.check_output([AUDIT_PYTHON, "-c", program], text=True, timeout=480, env=dict(os.environ))
    assert output.splitlines()[-1] == "[[], [], [], []]"
    for role in ROLES:
        document = json.loads((tmp_path / f"{role}.json").read_text())
        names = {component["name"] for component in document["components"]}
        assert document["bomFormat"] == "CycloneDX"
        assert document["metadata"]["component"]["name"] == "millstream"
        assert {"numpy", "msgspec", "redis"} <= names
        assert ("fastapi" in names) is (role in {"gateway", "serving"})
        assert sys.platform == "win32" or "colorama" not in names
