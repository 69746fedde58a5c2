"""Calls four models where memory is for three: refusals and the mean wait, against rules that unload the oldest.

four models, calls at random instants ─> Millstream: refusals, mean wait
                 the same calls       ─> simulated rules: least recently used by bytes, by count ─> their mean wait
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from millstream.plugins.plan.simulation.fleet_options import FleetOptions
from millstream.plugins.plan.simulation.models import SimulatedModel
from millstream.plugins.plan.simulation.policies import POLICIES
from millstream.plugins.plan.simulation.report import summary_of
from millstream.plugins.plan.simulation.simulator import WARMUP_SHARE, Simulator
from millstream.plugins.plan.simulation.traffic import Trace, sorted_trace
from millstream.services.model.manifest import ModelConfig
from millstream.services.placement.views import Footprint
from millstream.services.repository.folder import FolderRepository
from tests.bench import servers
from tests.bench.load import json_payload
from tests.bench.open_loop import Arrivals, send
from tests.kit.versions import publish_simulated

MODELS = 4
MODEL_BYTES = 200 << 20
MEMORY = "800MiB"  # the interpreter and three models
LOAD_S = 0.6
RUN_S = 0.015
RATE = 1.0  # calls of each model a second
SECONDS = 60.0

Say = Callable[[str], None]


class Waits(NamedTuple):
    """The measurements, without the first quarter.

    Args:
        calls: of all models.
        refused: calls that were refused or too late.
        wait_s: mean seconds of the others beyond their run.
        rules_s: the same of the better of the simulated rules.
    """

    calls: int
    refused: int
    wait_s: float
    rules_s: float


def measure_waits(folder: Path, say: Say) -> Waits:
    """Call the models, and simulate the rules with the same calls."""
    say("waiting line: four models, memory for three")
    home = folder / "line"
    repository = FolderRepository(home / "repository")
    names = [f"turn-{at}" for at in range(MODELS)]
    for name in names:
        behaviour = {"bytes": MODEL_BYTES, "load_s": LOAD_S, "run_s": RUN_S}
        publish_simulated(repository, name, behaviour, config=ModelConfig(pools=("line",)))
    payload = json_payload(folder, "x", np.ones(4, np.float32))
    arrivals = [Arrivals(f"/v2/models/{name}/infer", payload, RATE, SECONDS) for name in names]
    pool = ["--pool", f"line=1,backend=simulated,memory={MEMORY}"]
    with servers.millstream_up(folder, "line", pool) as server:
        send(server.url, *arrivals)
    calls = sorted((answer.due, at, answer) for at, one in enumerate(arrivals) for answer in one.answers)
    began = calls[0][0]
    counted = [answer for due, _, answer in calls if due - began >= WARMUP_SHARE * SECONDS]
    answered = [answer.seconds - RUN_S for answer in counted if answer.status == 200]
    trace = sorted_trace([due - began for due, _, _ in calls], [at for _, at, _ in calls])
    return Waits(len(counted), len(counted) - len(answered), float(np.mean(answered)), _of_rules(trace))


def _of_rules(trace: Trace) -> float:
    """Return the mean wait of the better of the rules that Millstream is compared with."""
    footprint = Footprint(MODEL_BYTES, 0, LOAD_S, measured=True)
    models = [SimulatedModel(f"turn-{at}", footprint, RUN_S) for at in range(MODELS)]
    fleet = FleetOptions(1, 3 * MODEL_BYTES, runs=1, round_s=0.0)
    return min(
        summary_of(Simulator(models, fleet, policy).run(trace)).mean_wait_s
        for name, policy in POLICIES.items()
        if name != "millstream"
    )
