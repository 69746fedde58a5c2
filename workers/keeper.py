"""keeper: a thread that keeps what this worker holds equal to what the repository has for its pool.

new version: verify digests -> load -> warm up and measure -> ready; then the heart holds its lane
gone version: draining -> its stream runs dry -> release -> nothing leased any more -> close
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

from services.errors import Code, Failure
from services.manifest import Manifest
from services.records import State
from services.repository.base import Repository
from workers.backends.base import Backend
from workers.exchange import Exchange
from workers.held import Held, Holding
from workers.profile import measure
from workers.reshaped import Reshaped
from workers.tallies import WorkerTallies
from workers.warmup import warm_up

log = logging.getLogger("millrace.keeper")

LOOK_S = 0.2  # how often the repository's token is compared; one stat of a file
DRAIN_S_MAX = 30.0
NEWS_S = 0.3  # how long gateways may take to hear of a change, and to send what waits for a version that goes
WARM_UP_S_MAX = 2.0
RETRY_S = 30.0  # a version that failed for want of a device or of Redis is tried again after this


class Keeper:
    """`connect` opens an exchange of the keeper's own. One version is loaded at a time; the main loop goes on serving.

    `place`: of this worker among those of its pool, from 0; versions that few workers are to hold are held by the first.
    """

    def __init__(
        self,
        repository: Repository,
        pool: str,
        backend: Backend,
        device: str,
        threads: int,
        held: Held,
        connect: Callable[[], Exchange],
        tallies: WorkerTallies,
        place: int = 0,
    ) -> None:
        self._place = place
        self._repository = repository
        self._pool = pool
        self._backend = backend
        self._device = device
        self._threads = threads
        self._held = held
        self._connect = connect
        self._tallies = tallies
        self._stopping = threading.Event()
        self._retry_at: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take up nothing more. A load that is under way is left to end with the process."""
        self._stopping.set()

    def _run(self) -> None:
        token = ""
        while not self._stopping.is_set():
            try:
                seen = self._repository.token()
                if seen != token or any(at <= time.monotonic() for at in self._retry_at.values()):
                    self.sync()
                    token = seen
            except Failure as failure:
                log.warning("%s; trying again", failure.message)
                self._stopping.wait(1)
            except Exception:
                log.exception("keeping the instances failed; trying again")
                self._stopping.wait(1)
            self._stopping.wait(LOOK_S)

    def sync(self) -> None:
        """Load what is missing and close what is gone, as the repository is now."""
        wanted = self._wanted()
        held = self._held.all()
        # What was on its way out when Redis went away, and is wanted again, begins anew.
        gone = [one for release, one in held.items() if release not in wanted or one.state is State.DRAINING]
        if any(holding.state is State.READY for holding in gone):
            self._stopping.wait(NEWS_S)
        for holding in gone:
            if not self._stopping.is_set():
                self._unload(holding)
        for release, manifest in wanted.items():
            if self._stopping.is_set():
                return
            retry_at = self._retry_at.get(release)
            if self._held.get(release) is None or (retry_at is not None and retry_at <= time.monotonic()):
                self._retry_at.pop(release, None)
                self._load(manifest)

    def _wanted(self) -> dict[str, Manifest]:
        wanted: dict[str, Manifest] = {}
        for manifest in chain(self._published(), self._proposed()):
            few = manifest.config.instances_max
            if manifest.config.pool == self._pool and (not few or self._place < few):
                wanted[manifest.release] = manifest
        return wanted

    def _published(self) -> Iterator[Manifest]:
        for model in self._repository.models():
            with _skipping_damage():
                endpoint = self._repository.endpoint(model)
                for version in self._repository.versions(model):
                    with _skipping_damage():
                        if endpoint.serves(version):
                            yield self._repository.manifest(model, version)

    def _proposed(self) -> Iterator[Manifest]:
        """Versions on trial, which are loaded beside those that serve."""
        for model in self._repository.proposals.models():
            with _skipping_damage():
                yield from self._repository.proposals.of(model)

    def _load(self, manifest: Manifest) -> None:
        holding = Holding(manifest, State.LOADING)
        self._held.set(holding)
        try:
            folder = self._repository.folder_of(manifest)
            verify(folder, manifest)
            instance = self._backend.load(folder / manifest.served, manifest.signature, self._device, self._threads)
            if manifest.signature.reshaped:
                instance = Reshaped(instance, manifest.signature)
            holding = replace(holding, state=State.WARMING, instance=instance)
            self._held.set(holding)
            warm_up(instance, manifest, folder)
            profile = measure(instance, manifest.signature, holding.rows_max, WARM_UP_S_MAX)
            rows = profile.efficient_rows() if profile.seconds else holding.rows_max
            self._held.set(replace(holding, state=State.READY, measured=dict(profile.seconds), rows_efficient=rows))
        except Failure as failure:
            self._fail(holding, failure.message)
            if failure.code is not Code.MODEL:
                self._retry_at[manifest.release] = time.monotonic() + RETRY_S
        except Exception as error:
            log.exception("version %s of %s cannot be loaded", manifest.version, manifest.model)
            self._fail(holding, f"{type(error).__name__}: {error}")
        else:
            self._tallies.bytes_of(holding, instance.size_bytes)
            log.info("ready: %s version %s", manifest.model, manifest.version)

    def _fail(self, holding: Holding, reason: str) -> None:
        manifest = holding.manifest
        log.error("failed: %s version %s: %s", manifest.model, manifest.version, reason)
        if holding.instance is not None:
            holding.instance.close()
        self._held.set(replace(holding, state=State.FAILED, reason=reason, instance=None))

    def _unload(self, holding: Holding) -> None:
        release = holding.manifest.release
        if holding.state is State.READY:
            exchange = self._connect()
            try:
                self._drain(exchange, release)
            finally:
                exchange.close()
        self._held.remove(release)
        self._retry_at.pop(release, None)
        self._tallies.gone(holding)
        if holding.instance is not None:
            holding.instance.close()
        log.info("unloaded: %s version %s", holding.manifest.model, holding.manifest.version)

    def _drain(self, exchange: Exchange, release: str) -> None:
        """Gateways stop sending when they see the version gone; what they sent before is still run."""
        self._held.move(release, State.DRAINING)
        until = time.monotonic() + DRAIN_S_MAX
        while exchange.pending(release) and time.monotonic() < until and not self._stopping.wait(0.02):
            continue
        exchange.release(release)
        while exchange.leased(release) and time.monotonic() < until and not self._stopping.wait(0.02):
            continue
        exchange.release(release)  # once more: the last to leave takes the empty stream along


@contextmanager
def _skipping_damage() -> Iterator[None]:
    """What was removed in between, or is damaged, is left out; the others go on."""
    try:
        yield
    except Failure as failure:
        if failure.code is not Code.NOT_FOUND:
            log.warning("%s", failure.message)


def verify(folder: Path, manifest: Manifest) -> None:
    """Raises Failure(MODEL) when a file of the version is not what was published."""
    for file in manifest.files:
        try:
            with (folder / file.path).open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as error:
            raise Failure(
                Code.MODEL, f"damaged: {file.path} cannot be read: {error.strerror or type(error).__name__}"
            ) from error
        if digest != file.sha256:
            raise Failure(Code.MODEL, f"damaged: {file.path} is not the file that was uploaded (sha256 differs)")
