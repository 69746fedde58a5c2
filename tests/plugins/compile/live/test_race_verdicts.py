"""A verdict that is interrupted anywhere, by a kill or a full disk: what serves can be loaded, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millstream.plugins.compile.race.report import RaceReport
from millstream.plugins.compile.stored.job import Job, Jobs, RaceState, new_job
from millstream.plugins.compile.stored.selection import Selections, decide
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.repository.folder import FolderRepository
from tests.kit.disk import small_disk
from tests.kit.versions import publish

KIND, HERE = "onnxruntime.cpu", "0123456789abcdef"
PAGE = os.sysconf("SC_PAGE_SIZE")
OLD, NEW, LOSER = "v-old", "v-new", "loser"
STEPS_MAX = 400  # file operations of a verdict; there are fewer

#: Stores a verdict, and kills its own process before the file operation of that number.
_KILLED = """
import json, os, signal, sys
from pathlib import Path
from millstream.services.repository.folder import FolderRepository
from millstream.plugins.compile.race.report import RaceReport
from millstream.plugins.compile.stored.job import Jobs
from millstream.plugins.compile.stored.selection import Selections, decide

root, left, document = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
repository = FolderRepository(root)
manifest = repository.manifest("m", 1)
jobs = Jobs(repository)
[job] = jobs.all()

def count(event, arguments):
    global left
    if event in {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
assert decide(Selections(repository), jobs, manifest, job, RaceReport.model_validate(document), 3.0)
"""


def report(key: str) -> dict[str, Any]:
    """A report of several pages in which a candidate won."""
    compiled = {"files": ["model.onnx"], "backend": "onnxruntime", "options": {}, "runtime": ""}
    won = {"target": "t", "candidate": key, "folder": key, "verdict": "won", "compiled": compiled}
    lost = {"target": "t", "candidate": LOSER, "folder": LOSER, "verdict": "lost", "why": "slower" * 3000}
    return {"baseline": "b", "winner": key, "ratio": 2.0, "table": {"16": key}, "rows": [won, lost]}


@dataclass
class Scene:
    """A version that a compiled form serves, and a race in progress whose verdict is another form."""

    root: Path
    repository: FolderRepository
    manifest: Manifest
    race: Job

    @property
    def jobs(self) -> Jobs:
        return Jobs(self.repository)

    @property
    def selections(self) -> Selections:
        return Selections(self.repository)

    def decide(self) -> bool:
        return decide(self.selections, self.jobs, self.manifest, self.race, RaceReport.model_validate(report(NEW)), 3.0)

    def state(self) -> RaceState:
        [race] = Jobs(FolderRepository(self.root)).all()
        return race.state

    def serving(self) -> str | None:
        """Return which form serves, whose files are there, whole."""
        selection = self.selections.get(self.manifest, KIND, HERE)
        if selection is None:
            return None
        self.selections.file(self.manifest, selection.form, Path("own"))
        return selection.form.key


def scene(root: Path) -> Scene:
    repository = FolderRepository(root)
    jobs, selections = Jobs(repository), Selections(repository)
    manifest = publish(repository, "m", 1)
    race = new_job(manifest, KIND, HERE, "cpu", 1.0)
    for key in (OLD, NEW):
        race = race.model_copy(update={"state": RaceState.RUNNING, "report": None})
        jobs.put(race, lambda _, race=race: race)  # type: ignore[misc]
        for name in (key, LOSER):
            folder = selections.make_cache(manifest, KIND, HERE) / name
            folder.mkdir(exist_ok=True)
            (folder / "model.onnx").write_bytes(name.encode() * 100)
        if key == OLD:
            assert decide(selections, jobs, manifest, race, RaceReport.model_validate(report(OLD)), 2.0)
    return Scene(root, repository, manifest, race)


def test_a_verdict_that_is_killed_at_any_step_is_reached_again(tmp_path: Path) -> None:
    seen: Counter[tuple[RaceState, str | None]] = Counter()
    for step in range(STEPS_MAX):
        one = scene(tmp_path / str(step))
        command = [sys.executable, "-P", "-c", _KILLED, str(one.root), str(step), json.dumps(report(NEW))]
        code = subprocess.run(command, timeout=300, check=False).returncode
        assert code in {0, -signal.SIGKILL}
        state, serving = one.state(), one.serving()
        seen[state, serving] += 1
        assert serving == NEW if state is RaceState.DECIDED else serving in {OLD, NEW}
        if state is RaceState.RUNNING:  # its lock is free: a worker races again
            assert one.decide()
            assert (one.state(), one.serving()) == (RaceState.DECIDED, NEW)
        if code == 0:
            break
    print(dict(seen))
    assert seen.keys() == {(RaceState.RUNNING, OLD), (RaceState.RUNNING, NEW), (RaceState.DECIDED, NEW)}


@pytest.mark.needs("tmpfs")
def test_a_verdict_that_finds_no_space_changes_nothing(tmp_path: Path) -> None:
    with small_disk(8 << 20) as disk:
        one = scene(disk.seen(disk.folder) / "repository")
        refused = 0
        for pages in range(64):  # each page more that is free lets it come one step further
            disk.fill(left_bytes=pages * PAGE)
            try:
                assert one.decide()
                break
            except Failure as failure:
                assert failure.code is Code.STORAGE
                refused += 1
            finally:
                disk.empty()
            assert (one.state(), one.serving()) == (RaceState.RUNNING, OLD)
        assert (one.state(), one.serving()) == (RaceState.DECIDED, NEW)
    print(f"refused {refused} times")
    assert refused >= 2, "at the choice, and at the race's document"


def test_a_verdict_of_a_race_that_was_asked_for_anew_changes_nothing(tmp_path: Path) -> None:
    """Also with the clock set back between the two requests."""
    one = scene(tmp_path)
    again = one.race.model_copy(update={"requested_at": one.race.requested_at - 3600})
    one.jobs.put(one.race, lambda _: again)
    assert not one.decide()
    assert one.jobs.all() == [again]
    assert one.serving() == OLD


def test_a_verdict_of_a_version_that_was_replaced_changes_nothing(tmp_path: Path) -> None:
    one = scene(tmp_path)
    one.repository.delete_version("m", 1)
    with one.repository.open_staging() as staging:
        (staging.path / "source").mkdir()
        (staging.path / "source" / "model.onnx").write_bytes(b"other")
        other = one.manifest.model_copy(update={"digest": "0" * 64})
        one.repository.publish(staging, other)
    race = new_job(other, KIND, HERE, "cpu", 5.0).model_copy(update={"state": RaceState.RUNNING})
    one.jobs.put(race, lambda _: race)
    with pytest.raises(Failure, match="cannot be read"):
        one.decide()  # its files went with it
    assert one.jobs.all() == [race]
    assert not list(one.selections.compiled(other).glob("choice-*"))
