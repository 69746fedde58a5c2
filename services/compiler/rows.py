"""Whether requests may share a run of a model: found out by running it. Imported by the checker process only.

first dimensions ─ all variable ────> keep the file    ┐
                 ─ some fixed at 1 ─> rewrite the file ┴> several rows at once == each row alone, on random inputs?
                 ─ anything else ───> no
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import onnx

from services.compiler.ports import Port
from services.compiler.rewrite import LEADING, with_variable_rows
from services.compiler.session import Array, Session, TrialError
from services.compiler.trial import Probe, Style, draw, equal, find_probe, rows_of, says_something
from services.compiler.weights import link_files
from services.errors import Failure, invalid

ROWS = 3
#: no further trial is begun after this time; the first one is always made
_TRIALS_S_MAX = 20.0


class Subject(NamedTuple):
    """The model under check. `path`: its file; `files`: its weights, relative to the file.

    `compiled`: the folder for a rewrite; None: a model that is served in place stays as it is.
    """

    model: onnx.ModelProto
    path: Path
    files: list[str]
    compiled: Path | None
    inputs: list[Port]
    outputs: list[Port]


class Verdict(NamedTuple):
    """`served`: the file to serve. `observed`: outputs of a run on one row, None if none succeeded."""

    served: Path
    batching: bool
    observed: list[Array] | None
    note: str | None


class _Trial(NamedTuple):
    inputs: list[Array]
    expected: list[list[Array]]  # the original's outputs for each row alone


class _Unproven(Exception):
    """Why rows may not share a run, as the end of a sentence."""


def decide(subject: Subject, wanted: bool | None) -> tuple[Verdict, Session]:
    """Load the model, try it, and decide; returns the served file's session, too.

    Raises Failure(INVALID): it cannot be loaded, or `wanted` is not provable.
    """
    session = Session(subject.path, subject.inputs, subject.outputs)
    probe, failure = _probe(session, subject.inputs)
    alone = Verdict(subject.path, False, probe.observed if probe else None, None)
    if wanted is False:
        return alone, session
    try:
        keep = _first_dimensions(subject, wanted)
        if not keep and subject.compiled is None:
            raise _Unproven("the first dimension is fixed at 1, and a model that is served in place is not rewritten")
        if probe is None:
            return _untried(alone, keep, failure), session
        trials = _trials(session, subject, probe)
        if keep:
            _prove(session, subject.outputs, trials)
            return alone._replace(batching=True), session
        del session  # a large model is in memory once
        assert subject.compiled is not None
        return _rewritten(subject, subject.compiled, trials, alone)
    except _Unproven as reason:
        if wanted:
            raise invalid(f"batching is not possible: {reason}") from reason
        why = f"Requests run one at a time: {reason}."
    return alone._replace(note=why), Session(subject.path, subject.inputs, subject.outputs)


def usable(subject: Subject, verdict: Verdict, defaults: Sequence[Port]) -> list[Port]:
    """Those of `defaults`, inputs that the model has values for, that a request may bring.

    Of a version whose requests share runs each must have rows of its own, which is tried as for the other inputs.
    """
    if not verdict.batching:
        return list(defaults)
    offered = [port for port in defaults if port.dims and not isinstance(port.dims[0], int)]
    if not offered:
        return []
    whole = subject._replace(inputs=[*subject.inputs, *offered], path=verdict.served)
    session = Session(whole.path, whole.inputs, whole.outputs)
    try:
        _prove(session, whole.outputs, _trials(session, whole, find_probe(session, whole.inputs)))
    except (TrialError, _Unproven):
        return []
    return offered


def _probe(session: Session, inputs: Sequence[Port]) -> tuple[Probe | None, str]:
    try:
        return find_probe(session, inputs), ""
    except TrialError as error:
        if error.memory:
            raise invalid(f"the model needs more memory than a check may use: {error}") from error
        return None, str(error)


def _first_dimensions(subject: Subject, wanted: bool | None) -> bool:
    """True: all are variable; False: some are fixed at 1. Raises _Unproven."""
    fixed = False
    if not subject.inputs:
        raise _Unproven("the model has no inputs")
    for what, ports in (("input", subject.inputs), ("output", subject.outputs)):
        for port in ports:
            if port.dims == ():
                raise _Unproven(f"{what} {port.name!r} is a scalar")
            first = port.dims[0]
            if isinstance(first, int) and first != 1:
                raise _Unproven(f"{what} {port.name!r} has a fixed first dimension of {first}")
            fixed = fixed or first == 1
    _check_symbols(subject.inputs, wanted)
    return not fixed


def _check_symbols(inputs: Sequence[Port], wanted: bool | None) -> None:
    symbols = {port.dims[0]: port.name for port in inputs if isinstance(port.dims[0], str)}
    for port in inputs:
        if inner := symbols.keys() & set(port.dims[1:]):
            raise _Unproven(f"the first dimension ({inner.pop()}) is also another dimension of input {port.name!r}")
    if len(symbols) > 1 and not wanted:
        shown = ", ".join(f"{symbol} of {name!r}" for symbol, name in sorted((str(s), n) for s, n in symbols.items()))
        raise _Unproven(f"the inputs may have different numbers of rows ({shown}); set batching to true to require one")


def _untried(alone: Verdict, keep: bool, failure: str) -> Verdict:
    if not keep:
        raise _Unproven(f"the fixed batch of 1 could not be made variable, as no trial input would run ({failure})")
    note = f"Requests share runs because the first dimensions are variable; no trial input would run ({failure})."
    return alone._replace(batching=True, note=note)


def _trials(session: Session, subject: Subject, probe: Probe) -> list[_Trial]:
    """Inputs of several rows, and what the original gives for each row alone."""
    trials: list[_Trial] = []
    start = time.monotonic()
    for style in dict.fromkeys((probe.style, Style.UNIFORM, Style.WIDE)):
        if trials and time.monotonic() - start > _TRIALS_S_MAX:
            break
        inputs = draw(subject.inputs, ROWS, probe.size, style)
        try:
            trials.append(_Trial(inputs, [session.run(row) for row in rows_of(inputs, ROWS)]))
        except TrialError:  # these values are not for this model; the probe's are
            continue
    outputs = [(port, array) for trial in trials for row in trial.expected for port, array in _named(subject, row)]
    if not any(says_something(port.datatype, array) for port, array in outputs):
        raise _Unproven("random inputs give no numbers to compare")
    return trials


def _named(subject: Subject, arrays: Sequence[Array]) -> Iterable[tuple[Port, Array]]:
    return zip(subject.outputs, arrays, strict=True)


def _prove(session: Session, outputs: Sequence[Port], trials: Sequence[_Trial]) -> None:
    """Compare several rows in one run, and the first row alone, with the original's rows. Raises _Unproven."""
    for trial in trials:
        try:
            together = session.run(trial.inputs)
            first = session.run(next(rows_of(trial.inputs, 1)))
        except TrialError as error:
            raise _Unproven(f"it does not run on {ROWS} rows ({error})") from error
        for index, port in enumerate(outputs):
            if not equal(port.datatype, first[index], trial.expected[0][index]):
                raise _Unproven(f"output {port.name!r} differs between two runs on the same row")
            if together[index].shape[:1] != (ROWS,):
                raise _Unproven(f"output {port.name!r} of {ROWS} rows has the shape {list(together[index].shape)}")
            for row in range(ROWS):
                if not equal(port.datatype, together[index][row : row + 1], trial.expected[row][index]):
                    raise _Unproven(f"output {port.name!r} of a row depends on the rows beside it")


def _rewritten(subject: Subject, compiled: Path, trials: Sequence[_Trial], alone: Verdict) -> tuple[Verdict, Session]:
    reason = _Unproven("no rewrite was tried")
    for leading in LEADING:
        try:
            served = _save(with_variable_rows(subject.model, leading), subject, compiled)
            session = Session(served, subject.inputs, subject.outputs)
            _prove(session, subject.outputs, trials)
        except (Failure, _Unproven) as failure:
            shutil.rmtree(compiled.parent)
            reason = _Unproven(f"the fixed batch of 1 could not be made variable: {failure}")
            continue
        note = "The fixed batch of 1 was made variable; on random inputs each row's outputs equal the original's."
        return alone._replace(served=served, batching=True, note=note), session
    raise reason


def _save(model: onnx.ModelProto, subject: Subject, compiled: Path) -> Path:
    compiled.mkdir(parents=True)
    link_files(subject.files, subject.path.parent, compiled)
    path = compiled / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path
