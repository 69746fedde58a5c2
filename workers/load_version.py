"""load_version: one version from its files to an instance that has answered its warm-up requests and was measured.

verify digests ─> backend.load ─> warm up, measure ─> Loaded
a suspect, in a process of its own first (millstream.workers.trial_load): should it crash again, nothing else is lost
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from millstream.services.crashes.exit_status import describe_exit
from millstream.services.crashes.load_marks import PROBE, take_stale_marks
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.model.profile import Profile
from millstream.services.model.version_files import describe_file
from millstream.services.settings import child_environment
from millstream.services.wire.worker_id import new_start, worker_id
from millstream.workers.backends.base import Backend, Instance, Stop
from millstream.workers.profiler import measure
from millstream.workers.reshape import Reshaped
from millstream.workers.warmup import warm_up

MEASURE_S_MAX = 2.0
REFUSED = 1  # exit code of a probe whose model fails with an error


class LoadedVersion(NamedTuple):
    """A version that can serve, and how long its runs take."""

    instance: Instance
    profile: Profile


class Placement(NamedTuple):
    """Where a worker loads versions. `backend_name`: by which a process of its own finds the same."""

    backend: Backend
    backend_name: str
    device: str
    threads: int


def load(
    manifest: Manifest, folder: Path, at: Placement, stop: Stop, warming: Callable[[Instance], None] = lambda _: None
) -> LoadedVersion:
    """Load `manifest`, whose files are in `folder`. `warming`: called with the instance before its first run.

    Raises Failure; with `stop.reason` set, because of that.
    """
    verify(folder, manifest)
    instance = at.backend.load(folder / manifest.served, manifest.signature, at.device, at.threads, stop)
    try:
        if manifest.signature.reshaped:
            instance = Reshaped(instance, manifest.signature)
        stop.by(instance.terminate)
        warming(instance)
        warm_up(instance, manifest, folder)
        rows_max = manifest.config.rows_max if manifest.signature.batching else 1
        profile = measure(instance, manifest.signature, rows_max, MEASURE_S_MAX)
        if stop.reason:  # asked for between two runs
            raise Failure(Code.MODEL, stop.reason)
    except BaseException:
        instance.close()
        raise
    return LoadedVersion(instance, profile)


def probe(manifest: Manifest, at: Placement, run_dir: Path, seconds_max: float, stop: Stop) -> str:
    """Try to load a version in a process of its own. Returns how that process died; "" if it did not.

    `run_dir`: where it leaves its mark, which is taken away here.

    Raises Failure(MODEL) when it took too long, or `stop` was asked.
    """
    start = new_start()
    command = [
        sys.executable,
        "-P",
        "-m",
        "millstream.workers.trial_load",
        "--parent",
        str(os.getpid()),
        "--start-id",
        start,
    ]
    command += ["--backend", at.backend_name, "--device", at.device, "--threads", str(at.threads)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=child_environment({}), close_fds=True
    )
    try:
        stop.by(process.kill)
        process.communicate(manifest.model_dump_json().encode(), seconds_max)
    except subprocess.TimeoutExpired:
        raise Failure(Code.MODEL, took_too_long("loading", seconds_max)) from None
    finally:
        process.kill()
        process.wait()
        take_stale_marks(run_dir, worker_id(PROBE, start))
    if stop.reason:
        raise Failure(Code.MODEL, stop.reason)
    return "" if process.returncode in {0, REFUSED} else describe_exit(process.returncode)


def took_too_long(what: str, seconds: float) -> str:
    """Why a load was ended."""
    return f"{what} took longer than {seconds:g} s"


def verify(folder: Path, manifest: Manifest) -> None:
    """Raises Failure(MODEL) when a file of the version is not what was published."""
    for file in manifest.files:
        try:
            found = describe_file(folder, file.path)
        except OSError as error:
            raise Failure(
                Code.MODEL, f"damaged: {file.path} cannot be read: {error.strerror or type(error).__name__}"
            ) from error
        if found.sha256 != file.sha256:
            raise Failure(Code.MODEL, f"damaged: {file.path} is not the file that was uploaded (sha256 differs)")
