"""Finds models and versions for callers of TensorFlow Serving's APIs, and refuses in its words."""

from __future__ import annotations

from millstream.gateway.catalog.snapshot import ModelView, Snapshot, VersionView, name_excerpt, version_number
from millstream.gateway.http.deps import Deps
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.plugins.compat.tfserving.predict import servable_not_found
from millstream.services.errors import Code, Failure, not_found

#: Labels of the serving version. No other labels exist.
_LABELS = frozenset({"serving", "stable"})


def version_of_label(label: str) -> str | None:
    """Return the version of a label: None, the serving one. Raises Failure(NOT_FOUND)."""
    if label in _LABELS:
        return None
    raise not_found(f"Unrecognized servable version label: {name_excerpt(label)}; known: {', '.join(sorted(_LABELS))}")


def find_view(deps: Deps, model: str, version: str | None) -> tuple[ModelView, VersionView]:
    """Return a model and its version; None: the serving one. Raises Failure(NOT_FOUND)."""
    try:
        view = deps.catalog.snapshot.model(model)
        return view, view.version(None if version is None else version_number(model, version))
    except Failure:
        raise servable_not_found(model, version, _known(deps.catalog.snapshot, model)) from None


def find_route(deps: Deps, model: str, version: str | None) -> ModelRoute:
    """Return the route of a version; None: the serving one. Raises Failure."""
    try:
        return deps.caller("tfserving").find(model, version)
    except Failure as failure:
        if failure.code is not Code.NOT_FOUND:
            raise
        raise servable_not_found(model, version, _known(deps.catalog.snapshot, model)) from None


def _known(snapshot: Snapshot, model: str) -> str:
    """Return the names or versions that a caller of an unknown model or version may have meant."""
    view = snapshot.models.get(model)
    return snapshot.did_you_mean(model) if view is None else view.loaded_versions
