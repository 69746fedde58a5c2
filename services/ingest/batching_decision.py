"""Decides whether requests may share a run of a model. Imported by the checker process only.

first dimensions ─ all variable ────> keep the file    ┐
                 ─ some fixed at 1 ─> rewrite the file ┴> proven by the graph? ─> trials agree? ─> requests share runs
                   not proven, and inputs name sizes alike ─> make sure that they are equal ^
                 ─ anything else ───> no
Without a proof requests run one at a time, unless the configuration requests batching: then agreeing trials suffice. A
model in place, whose max_batch_size says that requests have rows, need not share runs: as Triton without
dynamic_batching does, each request runs alone with all its rows where trials disagree.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import onnx

from millstream.services.errors import Failure, invalid
from millstream.services.ingest.batch_trials import (
    Contradiction,
    Expected,
    Influence,
    check_batches,
    constant_outputs,
    run_rows_alone,
)
from millstream.services.ingest.graph import save_model
from millstream.services.ingest.model_io import ModelTensor
from millstream.services.ingest.proof import Proof, prover
from millstream.services.ingest.trial_inputs import Probe, find_probe
from millstream.services.ingest.trial_session import Array, Session, TrialError, TrialProgram, TrialSession
from millstream.services.model.manifest import Batching

_NO_TRIAL = "no trial input would run"


class ModelUnderCheck(NamedTuple):
    """The model under check.

    Args:
        model: the ONNX model; None for a program of PyTorch, which `prove` and `open` know instead.
        path: the model file.
        files: its weight files, relative to the folder of `path`.
        compiled: the folder for a rewritten model; None for a model that is never rewritten: a program, or one that is
            served in place.
        inputs: its inputs, except those with a default.
        rows_max: the rows of the largest batch.
        defect: how the model breaks the rules of ONNX, which a proof relies on, as ONNX Runtime may not.
    """

    model: onnx.ModelProto | None
    path: Path
    files: list[str]
    compiled: Path | None
    inputs: list[ModelTensor]
    outputs: list[ModelTensor]
    rows_max: int
    program: TrialProgram | None = None
    defect: str = ""

    def open(self) -> TrialSession:
        """Load the model for trial runs. Raises Failure(INVALID)."""
        if self.program is not None:
            return self.program.open()
        return Session(self.path, self.inputs, self.outputs)

    def prove(self, rewritten: onnx.ModelProto | None = None) -> Proof:
        """Return whether the graph, or a rewritten one, shows that rows are independent."""
        if self.model is None:
            assert self.program is not None
            return self.program.prove()
        if self.defect:
            return Proof(False, "the graph", f"it {self.defect}")
        return prover().prove(rewritten or self.model, self.names)

    @property
    def in_place(self) -> bool:
        return self.model is not None and self.compiled is None

    @property
    def names(self) -> list[str]:
        """Names of the inputs."""
        return [tensor.name for tensor in self.inputs]


class BatchingDecision(NamedTuple):
    """How to serve the model.

    Args:
        served: the model file to serve: the original or a rewrite.
        observed: the outputs of a run on one row; None if no such run succeeded.
        outcome: whether requests share runs, and why.
    """

    served: Path
    observed: list[Array] | None
    outcome: Batching
    notes: tuple[str, ...] = ()

    @property
    def batching(self) -> bool:
        """Whether requests have rows."""
        return self.outcome.decided != "off"


class _Unbatchable(Exception):
    """Requests may not share a run. The message is the reason, worded to follow "…: "."""


def decide(subject: ModelUnderCheck, requested: bool | None) -> tuple[BatchingDecision, TrialSession]:
    """Load the model, analyse its graph, run trials, and decide. Returns the decision and the served file's session.

    `requested` is what the configuration says about batching; None if it says nothing.

    Raises Failure(INVALID) if the model cannot be loaded or the requested batching is not possible.
    """
    session = subject.open()
    probe, failure = _probe(session, subject.inputs)
    observed = probe.observed if probe else None
    if requested is False:
        return BatchingDecision(
            subject.path, observed, Batching(decided="off", reason="the configuration says so")
        ), session
    try:
        if not _first_dimensions(subject, requested):
            rewrite = _rewritten(subject, probe, failure, bool(requested))
        elif (guarded := None if requested or probe is None else _guarded(subject)) is None:
            return _decide_unchanged(subject, session, probe, failure, bool(requested)), session
        else:
            rewrite = guarded
        expected = _expected(session, subject, probe)
        del session  # frees the original before the rewrite is loaded: a large model fits into memory once
        return _decide_rewritten(subject, rewrite, expected, observed)
    except (_Unbatchable, Contradiction) as reason:
        why = str(reason)
        if requested and subject.in_place and isinstance(reason, Influence):
            note = f"Each request runs alone, as in Triton without dynamic_batching: {why}."
            outcome = Batching(decided="unmerged", reason=why)
            return BatchingDecision(subject.path, observed, outcome, (note,)), subject.open()
        if requested:
            raise invalid(f"batching is not possible: {reason}") from reason
    alone = BatchingDecision(
        subject.path, observed, Batching(decided="off", reason=why), (f"Requests run one at a time: {why}.",)
    )
    return alone, subject.open()


def servable_defaults(
    subject: ModelUnderCheck, decision: BatchingDecision, defaults: Sequence[ModelTensor]
) -> list[ModelTensor]:
    """Return the inputs among `defaults` (inputs with a default value) that a request may set.

    If requests share runs, such an input must have rows, too: all of them together are proven and tried as the other
    inputs are, and none is returned if that fails.
    """
    if not decision.batching:
        return list(defaults)
    offered = [tensor for tensor in defaults if tensor.has_rows]
    if decision.outcome.decided == "unmerged":
        return offered
    if not offered or decision.served != subject.path:
        return []
    whole = subject._replace(inputs=[*subject.inputs, *offered])
    if not whole.prove().proven:
        return []
    session = whole.open()
    try:
        check_batches(
            session, whole.outputs, _expected(session, whole, find_probe(session, whole.inputs)), whole.rows_max
        )
    except (TrialError, Contradiction, _Unbatchable):
        return []
    return offered


def _probe(session: TrialSession, inputs: Sequence[ModelTensor]) -> tuple[Probe | None, str]:
    try:
        return find_probe(session, inputs), ""
    except TrialError as error:
        if error.out_of_memory:
            raise invalid(f"the model needs more memory than a check may use: {error}") from error
        return None, str(error)


def _first_dimensions(subject: ModelUnderCheck, requested: bool | None) -> bool:
    """Return True if all first dimensions are variable, False if some are 1 and the file must be rewritten.

    Raises _Unbatchable for any other first dimension.
    """
    fixed = False
    if not subject.inputs:
        raise _Unbatchable("the model has no inputs")
    for what, tensors in (("input", subject.inputs), ("output", subject.outputs)):
        for tensor in tensors:
            if tensor.dims == ():
                raise _Unbatchable(f"{what} {tensor.name!r} is a scalar")
            first = tensor.dims[0]
            if isinstance(first, int) and first != 1:
                raise _Unbatchable(f"{what} {tensor.name!r} has a fixed first dimension of {first}")
            fixed = fixed or first == 1
    _check_symbols(subject.inputs, requested)
    if fixed and subject.compiled is None:
        if subject.model is None:
            raise _Unbatchable("the first dimension is fixed at 1: export the program with a dynamic one")
        raise _Unbatchable("the first dimension is fixed at 1, and a model that is served in place is not rewritten")
    return not fixed


def _check_symbols(inputs: Sequence[ModelTensor], requested: bool | None) -> None:
    symbols = {tensor.dims[0]: tensor.name for tensor in inputs if isinstance(tensor.dims[0], str)}
    for tensor in inputs:
        if inner := symbols.keys() & set(tensor.dims[1:]):
            raise _Unbatchable(
                f"the first dimension ({inner.pop()}) is also another dimension of input {tensor.name!r}"
            )
    if len(symbols) > 1 and not requested:
        names = ", ".join(f"{symbol} of {name!r}" for symbol, name in sorted((str(s), n) for s, n in symbols.items()))
        raise _Unbatchable(
            f"the inputs may have different numbers of rows ({names}); set batching to true if they never differ"
        )


def _decide_unchanged(
    subject: ModelUnderCheck, session: TrialSession, probe: Probe | None, failure: str, requested: bool
) -> BatchingDecision:
    """Decide about the unchanged file. Raises _Unbatchable, Contradiction."""
    proof = subject.prove()
    if not proof.proven and not requested:
        raise _Unbatchable(_unproven_reason(proof))
    if probe is not None:
        expected = _expected(session, subject, probe)
        check_batches(session, subject.outputs, expected, subject.rows_max)
        notes = _constant_note(subject, expected)
        return BatchingDecision(subject.path, probe.observed, _outcome(proof), (*_requested_note(proof), *notes))
    if not requested:
        raise _Unbatchable(f"{_NO_TRIAL} ({failure})")
    note = f"Requests share runs because the configuration says so; {_NO_TRIAL} ({failure})."
    return BatchingDecision(
        subject.path, None, Batching(decided="requested", reason=f"{_NO_TRIAL} ({failure})"), (note,)
    )


class _Rewrite(NamedTuple):
    """A model to serve in place of the upload, its proof, and the note on it; `failed`: why not, if trials differ."""

    model: onnx.ModelProto
    proof: Proof
    note: str
    failed: str


def _guarded(subject: ModelUnderCheck) -> _Rewrite | None:
    """Return the model with equal sizes where inputs name them so, if that alone proves it."""
    if subject.model is None or subject.compiled is None or subject.prove().proven:
        return None
    model = prover().with_equal_sizes(subject.model)
    proof = subject.prove(model) if model is not None else None
    if model is None or proof is None or not proof.proven:
        return None
    note = (
        "Inputs have dimensions of the same name: a request in which their sizes differ fails, so that runs are shared."
    )
    return _Rewrite(model, proof, note, "equal sizes of its inputs change its answers")


def _rewritten(subject: ModelUnderCheck, probe: Probe | None, failure: str, requested: bool) -> _Rewrite:
    """Return the model with a variable batch. Raises _Unbatchable if a proof is needed and there is none."""
    if probe is None:
        raise _Unbatchable(f"the fixed batch of 1 could not be made variable, as {_NO_TRIAL} ({failure})")
    assert subject.model is not None  # a program has no folder for a rewrite
    model = prover().with_variable_rows(subject.model, subject.path.parent)
    if model is None:
        raise _Unbatchable("the fixed batch of 1 stays, as no plug-in is there that makes it variable")
    proof = subject.prove(model)
    if proof.proven or requested:
        proven = "as the graph proves" if proof.proven else "in all trials"
        note = f"The fixed batch of 1 was made variable; {proven}, each row's outputs equal the original's."
        return _Rewrite(model, proof, note, "the fixed batch of 1 could not be made variable")
    raise _Unbatchable(f"the fixed batch of 1 stays, as {_unproven_reason(proof)}")


def _decide_rewritten(
    subject: ModelUnderCheck, rewrite: _Rewrite, expected: Sequence[Expected], observed: list[Array] | None
) -> tuple[BatchingDecision, TrialSession]:
    """Decide for the rewritten model if its outputs agree with the original's. Raises _Unbatchable otherwise."""
    assert subject.compiled is not None
    try:
        served = save_model(rewrite.model, subject.files, subject.path.parent, subject.compiled)
        session = Session(served, subject.inputs, subject.outputs)
        check_batches(session, subject.outputs, expected, subject.rows_max)
    except (Failure, Contradiction) as failure:
        shutil.rmtree(subject.compiled)
        raise _Unbatchable(f"{rewrite.failed}: {failure}") from failure
    notes = (rewrite.note, *_requested_note(rewrite.proof), *_constant_note(subject, expected))
    return BatchingDecision(served, observed, _outcome(rewrite.proof), notes), session


def _expected(session: TrialSession, subject: ModelUnderCheck, probe: Probe | None) -> list[Expected]:
    """Run trial rows alone through the original. Raises Contradiction; _Unbatchable if nothing runs."""
    expected = run_rows_alone(session, subject.inputs, subject.outputs, probe) if probe else []
    if not expected:
        raise _Unbatchable("trial inputs run once but not again")
    return expected


def _outcome(proof: Proof) -> Batching:
    return Batching(decided="proven") if proof.proven else Batching(decided="requested", reason=_unproven_reason(proof))


def _unproven_reason(proof: Proof) -> str:
    return f"it is not proven that rows are independent: {proof.culprit}: {proof.reason}"


def _requested_note(proof: Proof) -> tuple[str, ...]:
    """Return the note on a version that batches without a proof, because the configuration requests it."""
    if proof.proven:
        return ()
    return (f"Requests share runs because the configuration says so; {_unproven_reason(proof)}.",)


def _constant_note(subject: ModelUnderCheck, expected: Sequence[Expected]) -> tuple[str, ...]:
    """Return the note on outputs that are the same in all trials, and so are covered by the proof alone."""
    names = constant_outputs(subject.outputs, expected)
    if not names:
        return ()
    listed = ", ".join(repr(name) for name in names[:3]) + (", …" if len(names) > 3 else "")
    return (f"No trial input changes {listed}: only the graph shows that its rows are independent.",)
