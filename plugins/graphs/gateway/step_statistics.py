"""What is measured of the steps of graphs: counted as each ends, and added up over all gateways of the machine.

a step ends, or is skipped ─> StepCounts ─> metrics ─(files of all gateways)─> measured ─> the page of its version
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from millstream.gateway.admin.schemas_models import StepMeasured, VersionStep
from millstream.gateway.catalog.parts import part_view
from millstream.gateway.http.deps import Deps
from millstream.gateway.scheduling.request import Request
from millstream.plugins.graphs.ensemble import read_ensemble
from millstream.plugins.graphs.forms import FORMAT, read_graph
from millstream.plugins.graphs.inference_graph import resolved
from millstream.services.errors import Code, Failure
from millstream.services.ingest.importers import SOURCE
from millstream.services.metrics import catalogue
from millstream.services.metrics.record import Totals
from millstream.services.metrics.registry import Counter, Histogram, MetricsRegistry, quantile
from millstream.services.model.manifest import Manifest

OK, NOT_RUN = "ok", "skipped"  # outcomes, beside the codes of failures
_READ = frozenset(
    metric.name
    for metric in (
        catalogue.STEP_DURATION,
        catalogue.STEP_REQUESTS,
        catalogue.STEP_QUEUE_SECONDS,
        catalogue.STEP_RUN_SECONDS,
    )
)
_BOUNDS = (*catalogue.STEP_DURATION.buckets, float("inf"))


class StepCounts:
    """Counts the steps of one version in this gateway. Series are created as they are needed."""

    def __init__(self, registry: MetricsRegistry, manifest: Manifest) -> None:
        self._registry = registry
        self._labels = manifest.model, str(manifest.version)
        self._answered: dict[str, tuple[Histogram, Counter, Counter, Counter]] = {}

    def answered(self, request: Request, now: float) -> None:
        """Count a step that was answered, and how long it waited and ran, as far as its batch says it."""
        step = request.step
        series = self._answered.get(step)
        if series is None:
            counter, labels = self._registry.counter, (*self._labels, step)
            series = self._answered[step] = (
                self._registry.histogram(catalogue.STEP_DURATION, *labels),
                counter(catalogue.STEP_REQUESTS, *labels, OK),
                counter(catalogue.STEP_QUEUE_SECONDS, *labels),
                counter(catalogue.STEP_RUN_SECONDS, *labels),
            )
        seconds, ok, queue_s, run_s = series
        seconds.observe(now - request.arrival)
        ok.add()
        if request.timing is not None:
            queue_s.add(request.timing.waited_s(request.arrival))
            run_s.add(request.timing.run_s)

    def ended(self, step: str, outcome: str) -> None:
        """Count a step without an answer. `outcome`: NOT_RUN, or the code of its failure."""
        self._registry.counter(catalogue.STEP_REQUESTS, *self._labels, step, outcome).add()


def graph_of(deps: Deps, manifest: Manifest) -> dict[str, Any]:
    """Return what a graph adds to the page of its version: its document, and what was measured of its steps. Blocking.

    An ensemble of Triton that is served in place has its document in its configuration.
    """
    if manifest.source_format != FORMAT and not manifest.merged:
        return {}
    known = measured(deps.registry.totals(), manifest)
    steps = [VersionStep.model_validate(part) for part in (*manifest.parts, *manifest.merged)]
    found: dict[str, Any] = {"steps": [one.model_copy(update={"measured": known.get(one.step)}) for one in steps]}
    folder = deps.repository.local_path(manifest.model, manifest.version)
    with suppress(Failure, OSError, StopIteration):  # it was removed, or damaged
        path = next((folder / SOURCE).iterdir()) if manifest.merged else folder / manifest.served
        graph = read_ensemble(manifest.triton) if manifest.triton else read_graph(path)
        views = [part_view(part, deps.catalog.snapshot.models) for part in manifest.parts]
        known_views = [view for view in views if view is not None]
        if len(known_views) == len(views):
            graph = resolved(graph, [view.manifest.answered for view in known_views])
        found["graph"] = graph.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return found


def measured(totals: Totals, manifest: Manifest) -> dict[str, StepMeasured]:
    """Return what was measured of the steps of a version, by name; steps that nothing is known of lack."""
    version = manifest.model, str(manifest.version)
    sums = {
        (key.labels[2], key.name, *key.labels[3:]): values
        for key, values in totals.items()
        if key.name in _READ and key.labels[:2] == version
    }
    return {step: _measured(step, sums) for step in {at[0] for at in sums}}


def _measured(step: str, sums: Mapping[tuple[str, ...], Sequence[float]]) -> StepMeasured:
    outcomes = {at[2]: int(of[0]) for at, of in sums.items() if at[:2] == (step, catalogue.STEP_REQUESTS.name)}
    answered, skipped = outcomes.pop(OK, 0), outcomes.pop(NOT_RUN, 0)
    withdrawn = outcomes.pop(Code.CANCELLED.value, 0)
    counts = sums.get((step, catalogue.STEP_DURATION.name), [0.0])[:-1]

    def mean(name: str) -> float | None:
        found = sums.get((step, name))
        return found[0] / answered if found and answered else None

    return StepMeasured(
        answered=answered,
        skipped=skipped,
        withdrawn=withdrawn,
        failed=outcomes,
        p50_s=quantile(counts, 0.5, _BOUNDS),
        p99_s=quantile(counts, 0.99, _BOUNDS),
        queue_s=mean(catalogue.STEP_QUEUE_SECONDS.name),
        run_s=mean(catalogue.STEP_RUN_SECONDS.name),
    )
