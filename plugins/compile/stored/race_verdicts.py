"""race_verdicts: what a verdict changes: the report becomes a choice that workers follow, and an undo takes it back.

report ─> decide ─> Choice, losers deleted ─> workers swap          undo ─> no Choice ─> workers swap back
The choice changes before the race's document: after a kill between the two, the race runs again, or is undone again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from millstream.plugins.compile.race.report import Gate
from millstream.plugins.compile.stored.choices import BASELINE, Choice, Choices, ChosenVariant
from millstream.plugins.compile.stored.races import Race, RaceKey, RaceState, Undone
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest, SourceFile
from millstream.services.model.version_files import describe_file
from millstream.services.repository.base import Repository
from millstream.services.repository.verdicts import content_digest


def decide(repository: Repository, manifest: Manifest, race: Race, report: Mapping[str, Any], now: float) -> bool:
    """Store the report of a race, and serve its winner. Returns whether there is one.

    A race that was cancelled, deleted or asked for anew meanwhile changes nothing, and neither does one whose document
    cannot be written: what served before serves on. Raises Failure(STORAGE, INTERNAL, MODEL).
    """
    key, choices = race.key, repository.choices
    choice = _choice(choices.cache(manifest, key.kind, key.device), manifest, race, report, now)
    present = repository.races.get(key)
    if present is None or not _runs(present, race):
        return False
    before = choices.get(manifest, key.kind, key.device)
    _serve(choices, manifest, key, choice)

    def decided(one: Race | None) -> Race | None:
        if one is None or not _runs(one, race):
            return None
        return one.ended(RaceState.DECIDED, now, str(report.get("why", "")), dict(report))

    try:
        after = repository.races.change(key, decided)
    except Failure:
        _serve_again(choices, manifest, key, before)
        raise
    if after is None or after.state is not RaceState.DECIDED or not after.is_same_request(race):
        _serve_again(choices, manifest, key, before)
        return False
    kept = {variant.folder.rpartition("/")[2] for variant in choice.variants} if choice is not None else set()
    choices.sweep(manifest, key.kind, key.device, kept)
    return choice is not None


def undo(repository: Repository, manifest: Manifest, key: RaceKey, why: str, now: float, *, automatic: bool) -> bool:
    """Serve the version's own file again. Returns whether a variant served. Raises Failure(STORAGE, INTERNAL)."""
    served = repository.choices.remove(manifest, key.kind, key.device)

    def undone(race: Race | None) -> Race | None:
        if race is None or race.undone is not None or race.winner is None:
            return None
        return race.model_copy(update={"undone": Undone(why=why, at=now, automatic=automatic)})

    repository.races.change(key, undone)
    return served


def _runs(present: Race, race: Race) -> bool:
    return present.state is RaceState.RUNNING and present.is_same_request(race)


def _serve(choices: Choices, manifest: Manifest, key: RaceKey, choice: Choice | None) -> None:
    """Serve a choice; None: the version's own file. Raises Failure(STORAGE, INTERNAL, NOT_FOUND)."""
    if choice is None:
        choices.remove(manifest, key.kind, key.device)
    else:
        choices.write(manifest, choice)


def _serve_again(choices: Choices, manifest: Manifest, key: RaceKey, before: Choice | None) -> None:
    """Serve what served before; the version's own file if there is no space to write that, which removal needs not."""
    try:
        _serve(choices, manifest, key, before)
    except Failure:
        with suppress(Failure):
            choices.remove(manifest, key.kind, key.device)


def _choice(cache: Path, manifest: Manifest, race: Race, report: Mapping[str, Any], now: float) -> Choice | None:
    """Return what a report says is to serve; None: the baseline. Raises Failure(MODEL): files are missing."""
    table = {int(rows): str(form) for rows, form in dict(report.get("table") or {}).items()}
    keys = sorted(set(table.values()) - {BASELINE})
    if not report.get("winner") or not keys:
        return None
    rows = {row["candidate"]: row for row in report["rows"] if row.get("compiled")}
    if missing := [one for one in keys if one not in rows]:
        raise Failure(Code.MODEL, f"the report names {missing[0]}, which was not compiled")
    return Choice(
        content=content_digest(manifest),
        kind=race.kind,
        device=race.device,
        table=table,
        variants=tuple(_variant(cache, rows[one]) for one in keys),
        ratio=float(report.get("ratio", 1.0)),
        gate=Gate(**race.options.gate.model_dump()),
        raced_at=now,
    )


def _variant(cache: Path, row: Mapping[str, Any]) -> ChosenVariant:
    compiled, name = row["compiled"], str(row.get("folder") or row["candidate"])
    folder = cache / name
    if Path(name).name != name:
        raise Failure(Code.MODEL, f"the folder {name!r} of {row['candidate']} is not in the folder of the race")
    return ChosenVariant(
        key=row["candidate"],
        target=row["target"],
        folder=f"{cache.name}/{name}",
        files=_described(folder, tuple(compiled["files"])),
        backend=compiled["backend"],
        options=compiled.get("options", {}),
        runtime=compiled.get("runtime", ""),
        single=bool(row.get("single", False)),
        lossy=bool(row.get("lossy", False)),
        bounds=row.get("bounds") or {},
    )


def _described(folder: Path, loaded: tuple[str, ...]) -> tuple[SourceFile, ...]:
    """Return all files of a candidate with their digests, the loaded ones first: a library may open the others."""
    if not loaded:
        return ()
    try:
        found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return tuple(describe_file(folder, name) for name in dict.fromkeys((*loaded, *found)))
    except OSError as error:
        raise Failure(Code.MODEL, f"a compiled file cannot be read: {error.strerror}") from error
