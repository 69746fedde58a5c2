"""Versions that run other versions: their state, which follows from those of their parts, and who uses which. Pure.

manifest.parts ─> views of these versions ─> composed_view: READY if all are, else the worst of them, with the step
a model changed ─> Users.of ─> models with a version that runs one of its versions, whose views follow
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from millstream.gateway.access.principal import shown
from millstream.gateway.catalog.snapshot import ModelView, VersionView
from millstream.services.errors import Code, Failure
from millstream.services.model.formats import formats
from millstream.services.model.manifest import Endpoint, Manifest, VersionPart
from millstream.services.repository.verdicts import Verdict
from millstream.services.wire.records import State

#: the states that a composed version has from its parts: that of the part that is furthest from an answer
_WORST_FIRST = (State.PENDING, State.LOADING, State.WARMING, State.DRAINING, State.STANDBY)


class Users:
    """Which models have versions that run versions of which others, by name."""

    def __init__(self) -> None:
        self._parts: dict[str, frozenset[str]] = {}
        self._users: dict[str, set[str]] = {}

    def note(self, name: str, model: ModelView | None) -> None:
        """Note the parts of a model's versions; None: it was removed."""
        views = model.versions.values() if model is not None else ()
        parts = frozenset(part.model for view in views for part in view.manifest.parts)
        known = self._parts.get(name, frozenset())
        if parts == known:
            return
        self._parts[name] = parts
        for part in known - parts:
            self._users[part].discard(name)
        for part in parts - known:
            self._users.setdefault(part, set()).add(name)

    def of(self, name: str) -> Collection[str]:
        """Return the models with a version that runs a version of this one."""
        return self._users.get(name, ())


def part_view(part: VersionPart, models: Mapping[str, ModelView]) -> VersionView | None:
    """Return the version that a part names; None: it was removed, or its number is another one's now."""
    model = models.get(part.model)
    view = None if model is None else model.versions.get(part.version)
    return view if view is not None and view.manifest.content_id == part.content_id else None


def composed_view(
    endpoint: Endpoint, manifest: Manifest, verdict: Verdict, models: Mapping[str, ModelView]
) -> VersionView:
    """Return the view of a version that runs other versions."""
    if not endpoint.serves(manifest.version):
        return VersionView(manifest, State.UNLOADED, None, (), verdict, ())
    if manifest.source_format not in formats():
        return VersionView(manifest, State.FAILED, "the plug-in that runs it is off", (), verdict, ())
    views: list[VersionView] = []
    for part in manifest.parts:
        view = part_view(part, models)
        if (why := _unusable(view)) is not None:
            return VersionView(manifest, State.FAILED, f"{part.label}: {why}", (), verdict, ())
        assert view is not None
        views.append(view)
    states = {view.state for view in views}
    state = next((one for one in _WORST_FIRST if one in states), State.READY)
    on_demand = all(view.available for view in views)
    return VersionView(manifest, state, None, (), verdict, (), on_demand)


def _unusable(view: VersionView | None) -> str | None:
    """Return why a part cannot answer; None: it does, or will."""
    if view is None:
        return "the version was removed: upload the graph again"
    if not view.loaded:
        return "it is unloaded"
    return f"it has failed: {view.reason}" if view.state is State.FAILED else None


def used_versions(models: Mapping[str, ModelView], model: str) -> dict[int, list[tuple[str, int]]]:
    """Return the versions of `model` that versions of other models run, each with those, as name and number."""
    found: dict[int, list[tuple[str, int]]] = {}
    for name, view in models.items():
        for number, one in view.versions.items() if name != model else ():
            for part in one.manifest.parts:
                if part.model == model:
                    found.setdefault(part.version, []).append((name, number))
    return found


def check_unused(models: Mapping[str, ModelView], model: str, version: int | None = None) -> None:
    """Raise Failure(CONFLICT) if a version of another model runs this version of `model`; None: any of them."""
    used = used_versions(models, model)
    for number in sorted(used if version is None else used.keys() & {version}):
        seen = [f"'{name}' version {of}" for name, of in used[number] if shown([name])]
        by = " and ".join(seen[:3]) or "a graph of somebody else"
        raise Failure(
            Code.CONFLICT,
            f"version {number} of '{model}' is a step of {by}, which cannot serve without it: delete that first, or "
            "delete it with ?force=true",
        )


def is_current(models: Mapping[str, ModelView], manifest: Manifest) -> bool:
    """Return whether an upload of the same bytes would run the same versions as a composed version does."""
    for part in (*manifest.parts, *manifest.merged):
        model = models.get(part.model)
        if part_view(part, models) is None or model is None or (not part.named and model.serving != part.version):
            return False
    return True
