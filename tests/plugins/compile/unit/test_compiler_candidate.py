"""Candidates have stable keys, and targets propose them by the subject alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from millstream.plugins.compile.candidate import FLAGS_MAX, Candidate, Compiled, Subject
from millstream.plugins.compile.targets import TARGETS, get_target
from millstream.plugins.compile.targets.onnxruntime import thread_numbers
from millstream.services.errors import Failure
from millstream.services.model.signature import Signature, TensorSpec

CANDIDATES_MAX = 16  # of one target

ROWS = Signature(
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 4)),),
    batching=True,
)


def subject(source_format: str = "onnx", *, threads: int = 1, device: str = "cpu") -> Subject:
    path = Path("/models/model.onnx")
    return Subject(path=path, source_format=source_format, signature=ROWS, threads=threads, device=device)


def test_a_key_is_the_target_and_a_digest_of_the_flags_in_any_order():
    one = Candidate(target="onnxruntime", flags={"threads": 2, "arena": True}, lossy=False)
    other = Candidate(target="onnxruntime", flags={"arena": True, "threads": 2}, lossy=False)
    assert one.key == other.key == "onnxruntime-fe76dddf"
    assert one.key != Candidate(target="onnxruntime", flags={"threads": 2, "arena": 1}, lossy=False).key


def test_flags_survive_json_with_their_types():
    flags = {"threads": 1, "arena": True, "percentile": 1.0, "method": "1"}
    read = Candidate.model_validate_json(Candidate(target="any", flags=flags, lossy=True).model_dump_json())
    assert [(name, type(value)) for name, value in read.flags.items()] == [(n, type(v)) for n, v in flags.items()]


def test_too_many_flags_are_refused():
    with pytest.raises(ValidationError):
        Compiled(backend="any", runtime="", options={str(number): 1 for number in range(FLAGS_MAX + 1)})


def test_the_name_of_a_target_is_unique_and_an_unknown_one_is_refused():
    assert len({target.name for target in TARGETS}) == len(TARGETS)
    assert all(get_target(target.name) is target for target in TARGETS)
    with pytest.raises(Failure, match="unknown target 'glow'; known: onnxruntime"):
        get_target("glow")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("threads", [1, 2, 96])
def test_candidates_are_few_distinct_and_the_same_again(target, threads):
    if target.available("cpu") is not None:
        return
    found = target.candidates(subject(threads=threads))
    assert len({candidate.key for candidate in found}) == len(found) <= CANDIDATES_MAX
    assert found == target.candidates(subject(threads=threads))
    assert all(candidate.target == target.name for candidate in found)
    assert target.candidates(subject("simulated", threads=threads)) in ((), [])


def test_numbers_of_threads_are_powers_of_two_below_the_share():
    assert thread_numbers(1) == [1]
    assert thread_numbers(2) == [2, 1]
    assert thread_numbers(6) == [6, 4, 2, 1]
    assert thread_numbers(4096) == [4096, 2048, 1024, 512, 256, 128, 64, 32]
