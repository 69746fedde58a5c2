"""The files of a version -> an instance that answered its warm-up requests and was measured.

verify digests ─> backend.load ─> warm up, measure ─> LoadedVersion, with the bytes that it took
A suspect version is loaded in a process of its own first (workers.variants.trial_load): a crash there loses nothing.
A compiled form is opened beside an instance that serves, warmed up and measured (`open_form`).
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from millstream.services.crashes.load_marks import PROBE, take_stale_marks
from millstream.services.environment import child_environment
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.model.profile import Profile
from millstream.services.model.version_files import describe_file, overwritten
from millstream.services.process.exit_status import describe_exit
from millstream.services.process.gc_tuning import freeze_gc
from millstream.services.process.inheritance import die_with_parent
from millstream.services.process.threads import at_low_priority, in_own_thread, lower_priority
from millstream.services.repository.variants import Variants
from millstream.services.sandbox.child import ChildProcess
from millstream.services.wire.records import kind_of
from millstream.services.wire.worker_id import new_start, worker_id
from millstream.workers.backends.base import Backend, Instance, Options, OutOfMemory, Stop, takes_requests
from millstream.workers.backends.engine_parts import Reshaped
from millstream.workers.models.footprint_meter import FootprintMeter, Measurement
from millstream.workers.models.memory_budget import DEVICE_MEMORY_OPTION, MEMORY_OPTION, MemoryBudget
from millstream.workers.models.profiler import KnownProfiles, measure, runs_as_known, warm_up

log = logging.getLogger("millstream.variants")

MEASURE_S_MAX = 2.0
COMPILE_BYTES_MIN = 64 << 20  # of a version's files; smaller ones load in less than 0.1 s
COMPILE_BYTES_MAX = 3 << 29  # 1.5 GiB: an optimised model is one file, of which protobuf takes 2 GiB at most
REFUSED = 1  # exit code of a trial load that fails with an error instead of a crash


class LoadedVersion(NamedTuple):
    """An instance that can serve, how long its runs take, and the memory that it takes."""

    instance: Instance
    profile: Profile
    measurement: Measurement
    compiled: bool = False  # its variant was loaded


class LoadEnvironment(NamedTuple):
    """Where a worker loads versions.

    Args:
        backend_name: by which the process of a trial load finds the same backend.
        budget: the memory of the worker; None: there is no limit.
        runs: returns the number of runs of the main loop so far; None during a run.
        variants: what was compiled before; None: it is not used.
        profiles: what was measured before; None: every load measures.
        beside: further backends, whose instances live in processes of their own.
    """

    backend: Backend
    backend_name: str
    device: str
    threads: int
    budget: MemoryBudget | None = None
    runs: Callable[[], int | None] = lambda: 0
    variants: Variants | None = None
    profiles: KnownProfiles | None = None
    beside: tuple[Backend, ...] = ()

    @property
    def formats(self) -> frozenset[str]:
        """The formats of models that can be loaded."""
        return self.backend.formats.union(*(one.formats for one in self.beside))

    def of(self, manifest: Manifest) -> LoadEnvironment:
        """Return the environment with the backend that loads the version. Raises Failure(MODEL) if none does."""
        found = next((one for one in (self.backend, *self.beside) if manifest.source_format in one.formats), None)
        if found is None:
            raise Failure(
                Code.MODEL,
                f"the backend {self.backend.name} loads {' and '.join(sorted(self.formats))}, and this version is "
                f"{manifest.source_format}: serve it in a pool with a backend that does",
            )
        return self._replace(backend=found)

    @property
    def kind(self) -> str:
        """The kind of the worker, by which footprints and verdicts are kept."""
        return kind_of(self.backend_name, self.device)


def load(
    manifest: Manifest,
    folder: Path,
    at: LoadEnvironment,
    stop: Stop,
    warming: Callable[[Instance], None] = lambda _: None,
) -> LoadedVersion:
    """Load `manifest`, whose files are in `folder`, and call `warming` with the instance before its first run.

    Raises Failure; if `stop.reason` is set, that is the cause.
    """
    at = at.of(manifest)
    at.backend.prepare(at.device)
    compiled = at_low_priority(lambda: _checked_variant(manifest, folder, at))
    budget = at.budget or MemoryBudget(0)
    if at.budget is not None and budget.base_grew():
        freeze_gc()  # the library's objects, which stay
    try:
        with budget.measuring() as measuring:
            loaded = _load_and_measure(manifest, (folder, compiled), at, stop, warming)
    except OutOfMemory as error:
        reserved = budget.footprint(manifest.content_id)
        if not budget.budget_bytes or reserved is None:
            raise
        numbers = (reserved.load_bytes, "memory", budget.room_bytes, MEMORY_OPTION)
        if error.of_device:
            numbers = (reserved.device_load_bytes, "device memory", budget.device.room_bytes, DEVICE_MEMORY_OPTION)
        bytes_reserved, memory, room, option = numbers
        raise OutOfMemory(
            f"it takes more than the {bytes_reserved} bytes of {memory} that were reserved for it, of {room} for "
            f"models: unload others, or raise {option} ({error.message})",
            of_device=error.of_device,
        ) from error
    return loaded._replace(measurement=loaded.measurement._replace(alone=measuring.alone))


def _load_and_measure(
    manifest: Manifest,
    files: tuple[Path, Path | None],
    at: LoadEnvironment,
    stop: Stop,
    warming: Callable[[Instance], None],
) -> LoadedVersion:
    """Load the variant, if there is one, or the version's own file. `files`: the version's folder, the variant."""
    folder, compiled = files
    meter = FootprintMeter(at.runs, folder, lambda: at.backend.device_bytes(at.device))
    instance = _open(manifest, folder, compiled, at, stop)
    try:
        meter.sample()
        if manifest.signature.reshaped:
            instance = Reshaped(instance, manifest.signature)
        stop.on_request(instance.terminate)
        warming(instance)
        lower_priority()  # not before: threads that a library starts while it loads inherit it, and serve later
        warm_up(instance, manifest, folder)
        meter.sample()
        rows_max = manifest.config.rows_max if manifest.signature.batching else 1
        reserved = at.budget.footprint(manifest.content_id) if at.budget is not None else None
        whole = reserved is None or not reserved.measured
        profile, whole = _profile(instance, manifest, at, rows_max, whole=whole)
        if stop.reason:  # the end was requested between two runs
            raise Failure(Code.MODEL, stop.reason)
        measurement = meter.end()._replace(whole=whole)
    except BaseException:
        instance.close()
        raise
    resident_bytes = max(measurement.resident_bytes, instance.size_bytes)
    measurement = measurement._replace(resident_bytes=resident_bytes)
    return LoadedVersion(instance, profile, measurement, compiled is not None)


def pays_to_compile(manifest: Manifest) -> bool:
    """Return whether a version is large enough for a variant to save time and memory, and not too large for one."""
    size = sum(file.size_bytes for file in manifest.files)
    return manifest.source_format == "onnx" and COMPILE_BYTES_MIN <= size <= COMPILE_BYTES_MAX


def _checked_variant(manifest: Manifest, folder: Path, at: LoadEnvironment) -> Path | None:
    """Return the file of the variant, if there is one, and check the files of the version that are to be loaded.

    Raises Failure(MODEL) if one of them is damaged.
    """
    compiled = _variant(manifest, at)
    verify(folder, manifest, without=manifest.served if compiled is not None else "")
    return compiled


def _variant(manifest: Manifest, at: LoadEnvironment) -> Path | None:
    """Return the file of the variant for this device, if there is one and it is not damaged."""
    target = at.backend.target(at.device) if at.variants is not None and pays_to_compile(manifest) else None
    return at.variants.find(manifest, target) if at.variants is not None and target is not None else None


def _open(manifest: Manifest, folder: Path, compiled: Path | None, at: LoadEnvironment, stop: Stop) -> Instance:
    """Load the variant; if that fails, delete it and load the version's own file."""
    path, signature = folder / manifest.served, manifest.signature
    if compiled is None or at.variants is None:
        return at.backend.load(path, signature, at.device, at.threads, stop, manifest.options)
    log.info("%s is loaded from its variant %s", manifest.content_id, compiled.parent.name)
    try:
        return at.backend.load(compiled, signature, at.device, at.threads, stop)
    except OutOfMemory:
        raise
    except Failure as failure:
        target = at.backend.target(at.device)
        if stop.reason or target is None:
            raise
        at.variants.discard(manifest, target, failure.message)
        verify(folder, manifest)
        return at.backend.load(path, signature, at.device, at.threads, stop, manifest.options)


def _profile(
    instance: Instance, manifest: Manifest, at: LoadEnvironment, rows_max: int, *, whole: bool
) -> tuple[Profile, bool]:
    """Return how long runs take, and whether the largest batch was run.

    A version that this process loaded before is not measured again: one row is run, and with `whole` also the most.
    """
    if takes_requests(instance):  # generated ones are nobody's, and might have effects
        return Profile({}), whole
    known = at.profiles.get(manifest.content_id) if at.profiles is not None else None
    if known is not None and runs_as_known(instance, manifest.signature, known, whole=whole):
        return known, whole
    profile = measure(instance, manifest.signature, rows_max, MEASURE_S_MAX)
    if at.profiles is not None:
        at.profiles.keep(manifest.content_id, profile)
    return profile, True


class LoadTask(BaseModel):
    """What a process beside the worker loads or compiles, as JSON on its standard input.

    Args:
        start: distinguishes a trial load from all others.
        warm_up_s_max: seconds after which its warm-up is ended.
        memory_bytes: that a compilation may use; 0: no limit.
    """

    manifest: Manifest
    backend: str
    device: str
    threads: int
    start: str = ""
    warm_up_s_max: float = 0.0
    memory_bytes: int = 0


def read_task() -> LoadTask:
    """Return the task of this process, which ends with its parent from now on."""
    die_with_parent(int(sys.argv[-1]))
    return LoadTask.model_validate_json(sys.stdin.read())


def probe(manifest: Manifest, at: LoadEnvironment, run_dir: Path, warm_up_s_max: float, stop: Stop) -> str:
    """Load a version in a process of its own on trial. Returns how that process died; "" if it did not.

    The mark that it leaves in `run_dir` is removed here. Raises Failure(MODEL) if the end of the load is requested
    through `stop`: by the loader at the limit of the trial, or here if the warm-up takes longer than `warm_up_s_max`.
    """
    start = new_start()
    task = LoadTask(
        manifest=manifest,
        backend=at.backend_name,
        device=at.device,
        threads=at.threads,
        start=start,
        warm_up_s_max=warm_up_s_max,
    )
    child = ChildProcess("millstream.workers.variants.trial_load", environment=child_environment({}))
    try:
        stop.on_request(child.kill)
        ended = child.run(task.model_dump_json().encode())
    finally:
        child.close()
        take_stale_marks(run_dir, worker_id(PROBE, start))
    sys.stderr.write(ended.errors.decode(errors="replace"))
    if ended.status == -signal.SIGALRM:  # the timer that it sets when its warm-up begins
        stop.request(took_too_long("warming up", warm_up_s_max))
    if stop.reason:
        raise Failure(Code.MODEL, stop.reason)
    return "" if ended.status in {0, REFUSED} else describe_exit(ended.status)


def took_too_long(what: str, seconds: float) -> str:
    """Return the reason for ending a load."""
    return f"{what} took longer than {seconds:g} s"


def verify(folder: Path, manifest: Manifest, without: str = "") -> None:
    """Raise Failure(MODEL) if a file of the version, `without` one, is not the file that was published."""
    for file in manifest.files:
        if file.path == without:
            continue
        try:
            found = describe_file(folder, file.path)
        except OSError as error:
            raise Failure(
                Code.MODEL, f"damaged: {file.path} cannot be read: {error.strerror or type(error).__name__}"
            ) from error
        if found.sha256 != file.sha256:
            what = "uploaded" if manifest.origin is None else "checked"
            raise Failure(
                Code.MODEL,
                f"damaged: {file.path} is not the file that was {what} (sha256 differs){overwritten(manifest)}",
            )


LOAD_S_MAX = 300.0  # for loading, warming up and measuring one form


def open_form(
    manifest: Manifest,
    files: tuple[Path, Path],
    backend: Backend,
    at: LoadEnvironment,
    options: Options,
    rows_max: int,
) -> tuple[Instance, dict[int, float]]:
    """Load one form of a version; return it with the seconds of runs by rows.

    `files` are the version's folder and the file to load; `options` are those of Backend.load; `rows_max` is the most
    rows of a run.

    Raises Failure: MODEL, OutOfMemory, UNAVAILABLE if the library is not installed, INVALID for unknown options.
    """
    folder, path = files
    stop = Stop()
    limit = threading.Timer(LOAD_S_MAX, lambda: stop.request(took_too_long("loading", LOAD_S_MAX)))
    limit.daemon = True
    limit.start()
    try:
        backend.prepare(at.device)
        # In a new thread, at the normal priority: threads that a library starts while it loads inherit it, and serve
        # later, and a backend lowers its thread once they have started.
        instance = in_own_thread(
            lambda: backend.load(path, manifest.signature, at.device, at.threads, stop, options=options)
        )
        try:
            if manifest.signature.reshaped:
                instance = Reshaped(instance, manifest.signature)
            stop.on_request(instance.terminate)
            return instance, at_low_priority(lambda: _prepare(manifest, folder, instance, rows_max))
        except BaseException:
            instance.close()
            raise
    finally:
        limit.cancel()


def _prepare(manifest: Manifest, folder: Path, instance: Instance, rows_max: int) -> dict[int, float]:
    warm_up(instance, manifest, folder)
    return dict(measure(instance, manifest.signature, rows_max, MEASURE_S_MAX).seconds)
