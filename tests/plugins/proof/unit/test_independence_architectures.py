"""Exported real architectures are proven, and their rows are independent when they run."""

from __future__ import annotations

import pytest

from millstream.plugins.proof.analysis import prove
from millstream.services.ingest.proof import Proof
from tests.kit import architectures
from tests.kit.independence import assert_independent, load, run_alone


@pytest.mark.parametrize("name", architectures.GRAPHS)
def test_architecture_is_proven(name: str):
    model = architectures.build(name)
    inputs = [value.name for value in model.graph.input]
    assert prove(model, inputs) == Proof(True, "", "")
    running = load(model)
    feeds = architectures.rows(model, count=4)
    assert_independent(running, feeds, inputs, run_alone(running, feeds, inputs))
