"""Imports on kernels that lack parts of the sandbox: what may execute code is refused, unless a wall stands.

Each upload runs in a process for which the kernel seems to have less.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from millstream.services.sandbox import seccomp
from tests.kit.kernels import ROOT, has_namespaces
from tests.kit.stack import WAIT_S

pytestmark = pytest.mark.skipif(not seccomp.is_supported(), reason="this kernel or machine takes no seccomp filter")

UPLOAD = """
import asyncio, json, sys
from pathlib import Path
from millstream.services.errors import HTTP_STATUS, Failure
from millstream.services.ingest.importers import ImportOptions
from millstream.services.ingest.upload import ModelUpload
from millstream.services.model.manifest import ModelConfig
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import Settings
from tests.kit import kernels

folder, unconfined, *missing = sys.argv[1:]
for name in missing:
    getattr(kernels, f"without_{name}")()

async def main():
    settings = Settings(unconfined_imports=unconfined)
    async with ModelUpload(FolderRepository(Path(folder) / "repository"), settings, "m", None, ModelConfig()) as upload:
        upload.options = ImportOptions(allow_pickle=True)
        await upload.write((Path(folder) / "model.pkl").read_bytes())
        return (await upload.publish()).manifest.source_format

try:
    print(json.dumps([200, asyncio.run(main())]))
except Failure as failure:
    print(json.dumps([HTTP_STATUS[failure.code], failure.message]))
"""


def uploaded(folder: Path, unconfined: str, *missing: str) -> tuple[int, str]:
    """Upload a pickle from a process without what is `missing`. Returns the status and the message."""
    rows, labels = load_iris(return_X_y=True)
    (folder / "model.pkl").write_bytes(pickle.dumps(LogisticRegression(max_iter=500).fit(rows, labels)))
    command = [sys.executable, "-c", UPLOAD, str(folder), unconfined, *missing]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=WAIT_S)
    status, message = json.loads(done.stdout.splitlines()[-1])
    assert list((folder / "repository" / ".staging").iterdir()) == []
    return int(status), str(message)


@pytest.mark.skipif(not has_namespaces(), reason="no namespaces can be had here")
def test_namespaces_stand_in_for_landlock(tmp_path: Path) -> None:
    assert uploaded(tmp_path, "refuse", "landlock") == (200, "onnx")


def test_without_a_wall_for_files_code_is_refused(tmp_path: Path) -> None:
    status, message = uploaded(tmp_path, "refuse", "landlock", "namespaces")
    assert status == 501
    assert "MILLSTREAM_UNCONFINED_IMPORTS=accept" in message
    assert "millstream doctor" in message


def test_the_risk_can_be_accepted(tmp_path: Path) -> None:
    assert uploaded(tmp_path, "accept", "landlock", "namespaces") == (200, "onnx")
