"""Resolves a graph at upload, and makes what runs it.

Graph ─> the version of each step that serves now ─> GraphPlan: types, shapes ─> parts, signature

The parts are pinned: a version that is activated later changes no graph.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from millstream.gateway.access.principal import require
from millstream.gateway.catalog.parts import part_view
from millstream.gateway.catalog.snapshot import ModelView, Snapshot
from millstream.gateway.scheduling.composed import ComposedParts
from millstream.plugins.graphs.document import STEPS, Graph, Step
from millstream.plugins.graphs.ensemble import check_models, read_ensemble
from millstream.plugins.graphs.forms import read_graph
from millstream.plugins.graphs.gateway.run import GraphRunner
from millstream.plugins.graphs.graph_plan import GraphPlan
from millstream.plugins.graphs.inference_graph import resolved
from millstream.plugins.graphs.structure import Structure
from millstream.services.access.scopes import Need
from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.report import CheckedModel
from millstream.services.model.formats import ONNX
from millstream.services.model.manifest import Batching, Manifest, ModelConfig, VersionPart
from millstream.services.model.signature import Signature

DEPTH_MAX = 4  # of graphs within graphs
FILE_BYTES_MAX = (1 << 31) - 1  # of one ONNX file
STEPS_MAX = 256  # of a graph, with those of the graphs in it


class GraphComposer:
    """The composer of graphs (gateway/scheduling/composed.py)."""

    def compose(
        self,
        source: Path | Mapping[str, Any],
        checked: CheckedModel,
        config: ModelConfig,
        model: str,
        snapshot: Snapshot,
    ) -> CheckedModel:
        """Return a checked graph with its parts and its signature. Raises Failure: INVALID, FORBIDDEN (a step)."""
        for field in ("pools", "warmup", "classes", "instances_max"):
            if getattr(config, field):
                raise invalid(f"config.{field} is for models that workers run: a graph is run by the gateway")
        graph = read_graph(source) if isinstance(source, Path) else read_ensemble({"name": model, **source})
        if config.batching is not None and not graph.ensemble:
            graph = graph.model_copy(update={"batching": config.batching})
        parts = tuple(_pinned(name, step, snapshot, graph.ensemble) for name, step in graph.steps.items())
        for part in parts if graph.merge else ():
            require(Need.WRITE, part.model)  # the new version has a copy of the model
        manifests = [snapshot.models[part.model].versions[part.version].manifest for part in parts]
        _check_depth(model, manifests, snapshot.models)
        if graph.ensemble:
            check_models(
                graph,
                [one.model for one in manifests],
                [one.answered for one in manifests],
                [int(one.triton.get("max_batch_size", 0)) for one in manifests],
            )
        signatures = [one.answered for one in manifests]
        graph = resolved(graph, signatures)
        plan = GraphPlan(Structure(graph), parts, signatures)
        return checked.model_copy(
            update={
                "parts": parts,
                "signature": plan.signature,
                "batching": _batching(graph, plan.signature),
            }
        )

    def gather(
        self, folder: Path, checked: CheckedModel, snapshot: Snapshot, folder_of: Callable[[str, int], Path]
    ) -> bool:
        """Put the models of the steps beside a graph that is to be merged; False: it is not. Blocking.

        Raises Failure: INVALID (a step is no model that can be merged), UNAVAILABLE (it was removed meanwhile).
        """
        graph = read_graph(folder / checked.served)
        if not graph.merge:
            return False
        (folder / STEPS).mkdir()
        size_bytes = 0
        for part in checked.parts:
            view = part_view(part, snapshot.models)
            if view is None:
                raise Failure(Code.UNAVAILABLE, f"{part.label} was removed: send the graph again", retry_after_s=1)
            manifest = view.manifest
            if why := _not_merged(manifest):
                raise invalid(f"merge: {part.label} {why}")
            size_bytes += next((file.size_bytes for file in manifest.files if file.path == manifest.served), 0)
            if size_bytes > FILE_BYTES_MAX:
                raise invalid("merge: the models of the steps take more than the 2 GiB that one ONNX file may have")
            source = folder_of(part.model, part.version) / manifest.served
            try:
                shutil.copyfile(
                    source, folder / STEPS / f"{part.step}.onnx"
                )  # no link: the check may write to its folder
            except OSError as error:
                raise Failure(Code.UNAVAILABLE, f"{part.label}: {error.strerror}", retry_after_s=1) from error
        return True

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise Failure(INVALID) for an ensemble that is wrong whatever models it runs."""
        Structure(read_ensemble(config))

    def runner(self, path: Path, made: ComposedParts) -> GraphRunner:
        """Return what runs the graph at `path`. Blocking. Raises Failure(INVALID), OSError."""
        config = made.manifest.triton
        return GraphRunner(read_ensemble(config) if config else read_graph(path), made)


COMPOSER = GraphComposer()


def _not_merged(manifest: Manifest) -> str:
    """Return why a version cannot be merged with others; empty: it can."""
    if manifest.source_format != ONNX:
        return f"is no ONNX model ({manifest.source_format})"
    if manifest.signature.reshaped or manifest.config.classes is not None:
        return "has shapes or labels that its configuration makes, not the model"
    return ""


def _pinned(name: str, step: Step, snapshot: Snapshot, ensemble: Mapping[str, Any]) -> VersionPart:
    """Return the version that a step runs from now on. Raises Failure: INVALID (there is none), FORBIDDEN.

    `ensemble`: Triton's configuration; empty: it is a graph of another form.
    """
    require(Need.INFER, step.model)
    try:
        view = snapshot.model(step.model).version(step.version)
    except Failure as failure:
        if failure.code is not Code.NOT_FOUND:
            raise
        if ensemble and step.version is not None:
            whose = f"'{step.model}' whose required version {step.version} is not loaded"
            raise invalid(f"ensemble '{ensemble['name']}' depends on {whose}") from None
        raise invalid(f"step '{name}': {failure.message}") from None
    manifest = view.manifest
    return VersionPart(
        step=name,
        model=manifest.model,
        version=manifest.version,
        content_id=manifest.content_id,
        named=step.version is not None,
    )


def _check_depth(model: str, manifests: list[Manifest], models: Mapping[str, ModelView]) -> None:
    """Raise Failure(INVALID) for graphs in graphs that are too deep, too many steps, or have a step of `model`."""
    level, depth, steps = manifests, 1, len(manifests)
    while level:
        if any(one.model == model for one in level):
            raise invalid(f"a step of the graph would run '{model}' itself: a graph has no cycles")
        level = [inner for one in level for inner in _inner(one, models)]
        depth, steps = depth + 1, steps + len(level)
        if level and depth > DEPTH_MAX:
            raise invalid(f"graphs within graphs may be {DEPTH_MAX} deep, and these are deeper")
        if steps > STEPS_MAX:
            raise invalid(f"the graph has more than {STEPS_MAX} steps, with those of the graphs in it")


def _inner(manifest: Manifest, models: Mapping[str, ModelView]) -> Iterator[Manifest]:
    for part in manifest.parts:
        view = models[part.model].versions.get(part.version) if part.model in models else None
        if view is not None:
            yield view.manifest


def _batching(graph: Graph, signature: Signature) -> Batching:
    if signature.batching:
        return Batching(decided="proven", reason="the rows of all steps are independent")
    return Batching(decided="off", reason="requests of a step have no rows" if graph.batching is None else "asked for")
