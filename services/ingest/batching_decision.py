"""Whether requests may share a run of a model. Imported by the checker process only.

first dimensions ─ all variable ────> keep the file    ┐
                 ─ some fixed at 1 ─> rewrite the file ┴> proven by the graph? ─> do trials agree? ─> requests share runs
                 ─ anything else ───> no
Without a proof they run one at a time, unless the uploader asks for batching: then the trials alone must agree.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import onnx

from millstream.services.errors import Failure, invalid
from millstream.services.ingest.batch_rewrite import LEADING, with_variable_rows
from millstream.services.ingest.batch_trials import Contradiction, Expected, check, constant_outputs, expect
from millstream.services.ingest.external_data import link_files
from millstream.services.ingest.independence import Proof, prove
from millstream.services.ingest.model_io import ModelTensor
from millstream.services.ingest.trial_inputs import Probe, find_probe
from millstream.services.ingest.trial_session import Array, Session, TrialError
from millstream.services.model.manifest import Batching

_NO_TRIAL = "no trial input would run"


class Subject(NamedTuple):
    """The model under check. `path`: its file; `files`: its weights, relative to the file.

    `compiled`: the folder for a rewrite; None: a model that is served in place stays as it is. `rows_max`: the largest
    batch.
    """

    model: onnx.ModelProto
    path: Path
    files: list[str]
    compiled: Path | None
    inputs: list[ModelTensor]
    outputs: list[ModelTensor]
    rows_max: int

    @property
    def names(self) -> list[str]:
        """Of the inputs that have rows."""
        return [port.name for port in self.inputs]


class BatchingDecision(NamedTuple):
    """`served`: the file to serve. `observed`: outputs of a run on one row, None if none succeeded.

    `decision`: whether requests share runs, and why.
    """

    served: Path
    observed: list[Array] | None
    decision: Batching
    notes: tuple[str, ...] = ()

    @property
    def batching(self) -> bool:
        return self.decision.decided != "off"


class _Unbatchable(Exception):
    """Why requests may not share a run, as the end of a sentence."""


def decide(subject: Subject, wanted: bool | None) -> tuple[BatchingDecision, Session]:
    """Load the model, analyse its graph, try it, and decide; returns the served file's session, too.

    Raises Failure(INVALID): it cannot be loaded, or `wanted` is impossible.
    """
    session = Session(subject.path, subject.inputs, subject.outputs)
    probe, failure = _probe(session, subject.inputs)
    observed = probe.observed if probe else None
    if wanted is False:
        return BatchingDecision(
            subject.path, observed, Batching(decided="off", reason="the configuration says so")
        ), session
    try:
        if _first_dimensions(subject, wanted):
            return _kept(subject, session, probe, failure, bool(wanted)), session
        leadings = _leadings(subject, probe, failure, bool(wanted))
        expected = _expected(session, subject, probe)
        del session  # a large model is in memory once
        return _rewritten(subject, leadings, expected, observed)
    except (_Unbatchable, Contradiction) as reason:
        if wanted:
            raise invalid(f"batching is not possible: {reason}") from reason
        why = str(reason)
    alone = BatchingDecision(
        subject.path, observed, Batching(decided="off", reason=why), (f"Requests run one at a time: {why}.",)
    )
    return alone, Session(subject.path, subject.inputs, subject.outputs)


def usable(subject: Subject, verdict: BatchingDecision, defaults: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Those of `defaults`, inputs that the model has values for, that a request may bring.

    Of a version whose requests share runs each must have rows of its own: proven and tried as for the other inputs.
    """
    if not verdict.batching:
        return list(defaults)
    offered = [port for port in defaults if port.dims and not isinstance(port.dims[0], int)]
    if not offered or verdict.served != subject.path:
        return []
    whole = subject._replace(inputs=[*subject.inputs, *offered])
    if not prove(whole.model, whole.names).proven:
        return []
    session = Session(whole.path, whole.inputs, whole.outputs)
    try:
        check(session, whole.outputs, _expected(session, whole, find_probe(session, whole.inputs)), whole.rows_max)
    except (TrialError, Contradiction, _Unbatchable):
        return []
    return offered


def _probe(session: Session, inputs: Sequence[ModelTensor]) -> tuple[Probe | None, str]:
    try:
        return find_probe(session, inputs), ""
    except TrialError as error:
        if error.memory:
            raise invalid(f"the model needs more memory than a check may use: {error}") from error
        return None, str(error)


def _first_dimensions(subject: Subject, wanted: bool | None) -> bool:
    """True: all are variable; False: some are fixed at 1, and may be rewritten. Raises _Unbatchable."""
    fixed = False
    if not subject.inputs:
        raise _Unbatchable("the model has no inputs")
    for what, ports in (("input", subject.inputs), ("output", subject.outputs)):
        for port in ports:
            if port.dims == ():
                raise _Unbatchable(f"{what} {port.name!r} is a scalar")
            first = port.dims[0]
            if isinstance(first, int) and first != 1:
                raise _Unbatchable(f"{what} {port.name!r} has a fixed first dimension of {first}")
            fixed = fixed or first == 1
    _check_symbols(subject.inputs, wanted)
    if fixed and subject.compiled is None:
        raise _Unbatchable("the first dimension is fixed at 1, and a model that is served in place is not rewritten")
    return not fixed


def _check_symbols(inputs: Sequence[ModelTensor], wanted: bool | None) -> None:
    symbols = {port.dims[0]: port.name for port in inputs if isinstance(port.dims[0], str)}
    for port in inputs:
        if inner := symbols.keys() & set(port.dims[1:]):
            raise _Unbatchable(f"the first dimension ({inner.pop()}) is also another dimension of input {port.name!r}")
    if len(symbols) > 1 and not wanted:
        shown = ", ".join(f"{symbol} of {name!r}" for symbol, name in sorted((str(s), n) for s, n in symbols.items()))
        raise _Unbatchable(
            f"the inputs may have different numbers of rows ({shown}); set batching to true to require one"
        )


def _kept(subject: Subject, session: Session, probe: Probe | None, failure: str, wanted: bool) -> BatchingDecision:
    """The verdict on the file as it is. Raises _Unbatchable, Contradiction."""
    proof = prove(subject.model, subject.names)
    if not proof.proven and not wanted:
        raise _Unbatchable(_unproven(proof))
    if probe is not None:
        expected = _expected(session, subject, probe)
        check(session, subject.outputs, expected, subject.rows_max)
        notes = _constant(subject, expected)
        return BatchingDecision(subject.path, probe.observed, _decision(proof), (*_requested(proof), *notes))
    if not wanted:
        raise _Unbatchable(f"{_NO_TRIAL} ({failure})")
    note = f"Requests share runs because the configuration says so; {_NO_TRIAL} ({failure})."
    return BatchingDecision(
        subject.path, None, Batching(decided="requested", reason=f"{_NO_TRIAL} ({failure})"), (note,)
    )


def _leadings(subject: Subject, probe: Probe | None, failure: str, wanted: bool) -> list[int]:
    """Ways to rewrite the file that are worth a trial: proven, or `wanted`. Raises _Unbatchable."""
    if probe is None:
        raise _Unbatchable(f"the fixed batch of 1 could not be made variable, as {_NO_TRIAL} ({failure})")
    proofs = {leading: prove(with_variable_rows(subject.model, leading), subject.names) for leading in LEADING}
    leadings = [leading for leading, proof in proofs.items() if proof.proven]
    if leadings or wanted:
        return leadings + [leading for leading in LEADING if wanted and leading not in leadings]
    raise _Unbatchable(f"the fixed batch of 1 stays, as {_unproven(proofs[LEADING[0]])}")


def _rewritten(
    subject: Subject, leadings: Collection[int], expected: Sequence[Expected], observed: list[Array] | None
) -> tuple[BatchingDecision, Session]:
    """The verdict on the first rewrite that agrees with the original. Raises _Unbatchable."""
    assert subject.compiled is not None
    reason = _Unbatchable("no rewrite was tried")
    for leading in leadings:
        try:
            model = with_variable_rows(subject.model, leading)
            proof = prove(model, subject.names)
            served = _save(model, subject, subject.compiled)
            session = Session(served, subject.inputs, subject.outputs)
            check(session, subject.outputs, expected, subject.rows_max)
        except (Failure, Contradiction) as failure:
            shutil.rmtree(subject.compiled.parent)
            reason = _Unbatchable(f"the fixed batch of 1 could not be made variable: {failure}")
            continue
        proven = "as the graph proves" if proof.proven else "in all trials"
        note = f"The fixed batch of 1 was made variable; {proven}, each row's outputs equal the original's."
        notes = (note, *_requested(proof), *_constant(subject, expected))
        return BatchingDecision(served, observed, _decision(proof), notes), session
    raise reason


def _expected(session: Session, subject: Subject, probe: Probe | None) -> list[Expected]:
    """What the original gives for rows alone. Raises Contradiction, and _Unbatchable if nothing runs."""
    expected = expect(session, subject.inputs, subject.outputs, probe) if probe else []
    if not expected:
        raise _Unbatchable("trial inputs run once but not again")
    return expected


def _decision(proof: Proof) -> Batching:
    return Batching(decided="proven") if proof.proven else Batching(decided="requested", reason=_unproven(proof))


def _unproven(proof: Proof) -> str:
    return f"it is not proven that rows are independent: {proof.culprit}: {proof.reason}"


def _requested(proof: Proof) -> tuple[str, ...]:
    """The note on a version that batches because that was asked for."""
    if proof.proven:
        return ()
    return (f"Requests share runs because the configuration says so; {_unproven(proof)}.",)


def _constant(subject: Subject, expected: Sequence[Expected]) -> tuple[str, ...]:
    """The note on outputs that trials say nothing about."""
    names = constant_outputs(subject.outputs, expected)
    if not names:
        return ()
    shown = ", ".join(repr(name) for name in names[:3]) + (", …" if len(names) > 3 else "")
    return (f"No trial input changes {shown}: that rows are independent rests on the graph alone.",)


def _save(model: onnx.ModelProto, subject: Subject, compiled: Path) -> Path:
    compiled.mkdir(parents=True)
    link_files(subject.files, subject.path.parent, compiled)
    path = compiled / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path
