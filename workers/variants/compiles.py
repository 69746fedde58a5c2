"""Has processes compile the versions that this worker loaded, one after the other, while they serve.

loaded, large, no variant yet ─> queue ─(its memory is reserved)─> python -m millstream.workers.variants.compile ─> kept
A load that needs this memory ends the process; the next load of the version has it compiled.
The next load of the version takes the variant. Outputs are equal bit by bit, so that a loaded instance need not change.
"""

from __future__ import annotations

import logging
import threading

from millstream.services.environment import child_environment
from millstream.services.model.manifest import Manifest
from millstream.services.placement.views import Footprint
from millstream.services.repository.footprints import file_bytes
from millstream.services.repository.variants import Target, Variants
from millstream.services.sandbox.child import ChildProcess
from millstream.services.sizes import sizes
from millstream.workers.models.load_version import LoadEnvironment, LoadTask, pays_to_compile
from millstream.workers.models.memory_budget import MemoryBudget, SpareMemory

log = logging.getLogger("millstream.variants")

QUEUE_MAX = 64  # versions that wait; further ones are compiled after their next load
COMPILE_S_MAX = 900.0
#: Memory that compiling takes for each byte of the files, as measured with ONNX Runtime (3.0) and OpenVINO (2.2).
MEMORY_RATIO = 4
MEMORY_FIXED_BYTES = 128 << 20  # of the process: the interpreter and the library
REPORT_CHARACTERS_MAX = 500


class VariantCompiles:
    """Compiles versions in the background. Safe for several threads."""

    def __init__(self, at: LoadEnvironment, variants: Variants) -> None:
        self._at = at
        self._variants = variants
        self._lock = threading.Lock()
        self._queue: dict[str, Manifest] = {}
        self._running = False
        self._stopping = False
        self._child: ChildProcess | None = None
        self.memory = SpareMemory(at.budget or MemoryBudget(0), self._kill)

    def want(self, manifest: Manifest) -> None:
        """Compile a version that was loaded from its own files, if that pays and was not done."""
        if not pays_to_compile(manifest):
            return
        with self._lock:
            if self._stopping or len(self._queue) >= QUEUE_MAX:
                return
            self._queue[manifest.content_id] = manifest
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="variants", daemon=True).start()

    def stop(self) -> None:
        """Begin no further compilation and kill the one in progress."""
        with self._lock:
            self._stopping = True
            self._queue.clear()
        self._kill()

    def _kill(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.kill()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._running = False
                    return
                manifest = self._queue.pop(next(iter(self._queue)))
            try:
                self._compile(manifest)
            except Exception:
                log.exception("compiling %s failed", manifest.content_id)

    def _compile(self, manifest: Manifest) -> None:
        target = self._at.backend.target(self._at.device)
        if target is None or self._variants.report(manifest, target) is not None:
            return
        needed = MEMORY_FIXED_BYTES + MEMORY_RATIO * file_bytes(manifest)
        account = f"the compilation of {manifest.content_id}"
        if not self.memory.reserve(account, Footprint(needed)):
            log.info("%s is not compiled: that takes %s of memory", manifest.content_id, *sizes(needed))
            return
        limited = self._at.budget is not None and self._at.budget.budget_bytes
        try:
            self._compile_within(manifest, target, needed if limited else 0)
        finally:
            self.memory.free()

    def _compile_within(self, manifest: Manifest, target: Target, memory_bytes: int) -> None:
        """Run the process. `memory_bytes`: its limit; 0: none."""
        task = LoadTask(
            manifest=manifest,
            backend=self._at.backend_name,
            device=self._at.device,
            threads=1,
            memory_bytes=memory_bytes,
        )
        with self._lock:
            if self._stopping or self.memory.asked():
                return
            self._child = child = ChildProcess("millstream.workers.variants.compile", environment=child_environment({}))
        try:
            said = child.run(task.model_dump_json().encode(), COMPILE_S_MAX).errors
        except TimeoutError:
            said = f"it took longer than {COMPILE_S_MAX:g} s".encode()
        finally:
            with self._lock:
                self._child = None
        report = self._variants.report(manifest, target)
        if report is not None and report.files:
            log.info("compiled: %s for %s in %.1f s", manifest.content_id, target.name, report.seconds)
        elif self.memory.asked():
            log.info("%s is not compiled now: a load needs the memory", manifest.content_id)
        elif not self._stopping:
            why = report.refused if report is not None else said.decode(errors="replace")[-REPORT_CHARACTERS_MAX:]
            log.warning("%s is not compiled for %s: %s", manifest.content_id, target.name, why or "its process died")
