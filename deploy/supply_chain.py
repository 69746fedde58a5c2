"""Audits the packages of each role for known vulnerabilities, or writes the list of its components (SBOM).

deploy/locks/ROLE.txt ─> packages of this platform ─> pip-audit ─> a line for each finding; exit code 1 if there is one
                                                  └─> cyclonedx-py ─> build/sbom/ROLE.json (CycloneDX)

.venv/audit/bin/python deploy/supply_chain.py audit|sbom [ROLE...]   (make audit, make sbom)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "deploy" / "locks"
SBOMS = Path("build") / "sbom"  # below the current folder
ROLES = ("gateway", "worker-cpu", "worker-gpu", "serving")
AUDIT = ("-m", "pip_audit", "--require-hashes", "--disable-pip", "--progress-spinner", "off", "--format", "json")
SBOM = ("-W", "ignore", "-m", "cyclonedx_py", "requirements", "--output-reproducible", "--output-format", "JSON")
AUDIT_S_MAX = 600


class UnauditedError(Exception):
    """The packages could not be audited: nothing is known of them."""


def locked(role: str) -> Iterator[tuple[Requirement, str]]:
    """Yield the packages of a role that this platform and Python install, with their lines in the lock."""
    text = (LOCKS / f"{role}.txt").read_text().replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        requirement = Requirement(line.partition("--hash")[0])
        if requirement.marker is None or requirement.marker.evaluate():
            yield requirement, f"{requirement.name}{requirement.specifier} --hash{line.partition('--hash')[2]}"


def audit(role: str) -> list[str]:
    """Return a line for each vulnerability of a role's packages. Raises UnauditedError."""
    packages = list(locked(role))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as lines:
        lines.write("\n".join(line for _, line in packages))
        lines.flush()
        command = [sys.executable, *AUDIT, "--requirement", lines.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=AUDIT_S_MAX)
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError) as error:
        why = (done.stderr.strip() or "no output").splitlines()[-1]
        raise UnauditedError(f"{role}: not audited, pip-audit failed: {why[:300]}") from error
    unknown = [item for item in found if "skip_reason" in item]
    if unknown or len(found) < len(packages):
        why = unknown[0]["skip_reason"] if unknown else "they are not in its report"
        audited = f"{len(found) - len(unknown)} of {len(packages)} packages"
        raise UnauditedError(f"{role}: only {audited} audited, the vulnerability service answered: {why}")
    return [
        f"{role}: {item['name']} {item['version']}: {flaw['id']}, fixed in {', '.join(flaw['fix_versions']) or 'none'}"
        for item in found
        for flaw in item["vulns"]
    ]


def sbom(role: str) -> list[str]:
    """Write the components of a role; returns a line if that failed."""
    SBOMS.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(line for _, line in locked(role))
    file = SBOMS / f"{role}.json"
    command = [sys.executable, *SBOM, "--pyproject", str(ROOT / "pyproject.toml"), "--output-file", str(file), "-"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, timeout=AUDIT_S_MAX)
    if done.returncode:
        return [f"{role}: {(done.stderr.strip() or 'cyclonedx-py failed').splitlines()[-1]}"]
    print(f"{file}: {len(json.loads(file.read_text())['components'])} components")
    return []


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 0, or 1 after a finding or a failure."""
    what = {"audit": audit, "sbom": sbom}[arguments[0]]
    try:
        problems = [line for role in arguments[1:] or ROLES for line in what(role)]
    except UnauditedError as error:  # the service would answer the same for the other roles
        problems = [str(error)]
    for line in problems:
        print(line, file=sys.stderr)
    if what is audit and not problems:
        print("no known vulnerabilities in the packages of", ", ".join(arguments[1:] or ROLES))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
