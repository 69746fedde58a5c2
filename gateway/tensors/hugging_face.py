"""Bodies of Hugging Face's endpoints and of its SageMaker containers, and what they answer. Pure.

{"inputs": "text", or texts, "parameters": {…}, "options": {…}} ─> texts
label, score ─> [{"label": …, "score": …}, …]

Source: huggingface/huggingface-inference-toolkit, handler.py; transformers, TextClassificationPipeline. Parameters are
those of a pipeline. One that would change the answer and is not done here is refused: the answer would be another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.tensors.outputs import OutputTensor, rows_of, text_of
from millstream.services.errors import invalid
from millstream.services.model.manifest import Manifest
from millstream.services.model.signature import LABEL, SCORE, Signature

#: what the public inference API does before it runs a model
_OPTIONS = frozenset({"use_cache", "wait_for_model", "use_gpu", "gpu", "dont_load_model"})


def gives_texts(document: object) -> bool:
    """Whether a JSON body has a text, or texts, as Hugging Face's clients send them."""
    inputs = document.get("inputs") if type(document) is dict else None
    return type(inputs) is str or (type(inputs) is list and set(map(type, inputs)) == {str})


def check_parameters(manifest: Manifest, document: Mapping[str, Any]) -> None:
    """Raise Failure(INVALID) for the parameters and options in a body that are not what the version does anyway.

    `document`: a body for which `gives_texts` holds.
    """
    options = _members(document, "options")
    unknown = next((name for name in options if name not in _OPTIONS), None)
    if unknown is not None:
        known = ", ".join(sorted(_OPTIONS))
        raise invalid(f"the option '{excerpt(unknown)}' is unknown; these have no effect: {known}")
    parameters = _members(document, "parameters")
    done = _done(manifest) if parameters else {}
    for name, value in parameters.items():
        if value is None or (name in done and value == done[name] and type(value) is type(done[name])):
            continue
        only = f": it is {done[name]}" if name in done else ""
        raise invalid(f"the parameter '{excerpt(name)}' is not supported{only}: leave it out")


def _done(manifest: Manifest) -> dict[str, Any]:
    """Return the parameters of a pipeline that answers as the version does."""
    imported = manifest.imported
    done: dict[str, Any] = {}
    if imported is not None and imported.importer == "Hugging Face":  # which cuts texts to the model's positions
        done["truncation"] = True
    signature = manifest.answered
    labels = _labels(signature)
    if labels is None:
        return done
    if manifest.config.classes is not None:
        done["function_to_apply"] = manifest.config.classes.scores
    shape = signature.outputs[labels[0]].shape
    return {**done, "top_k": shape[1] if len(shape) == 2 else 1}  # all classes, the best first; or the best


def write_labels(signature: Signature, outputs: Sequence[OutputTensor]) -> bytes | None:
    """Return labels and scores as a pipeline answers them; None if the version has none, or not one for each text.

    An object for each text; where all classes are answered, a list of objects for each.
    """
    found = _labels(signature)
    if found is None:
        return None
    labels, scores = (outputs[at] for at in found)
    if len(labels.shape) == 1:
        return _objects(labels, scores)
    rows = zip(rows_of(labels), rows_of(scores), strict=True)
    return b"[%b]" % b",".join([_objects(*row) for row in rows])


def _members(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    members = document.get(name)
    if members is not None and type(members) is not dict:
        raise invalid(f"'{name}' is an object")
    return members or {}


def _labels(signature: Signature) -> tuple[int, int] | None:
    """Return the positions of label and score, if each text has one of them, or one for each class."""
    names = [spec.name for spec in signature.outputs]
    if LABEL not in names or SCORE not in names:
        return None
    found = names.index(LABEL), names.index(SCORE)
    shape, other = (signature.outputs[at].shape for at in found)
    known = len(shape) == 1 or (len(shape) == 2 and shape[1] != -1)  # of tokens there may be any number
    return found if shape == other and known else None


def _objects(labels: OutputTensor, scores: OutputTensor) -> bytes:
    names = orjson.loads(text_of(labels))
    values = rows_of(scores)
    pairs = zip(names, values, strict=True)
    return b"[%b]" % b",".join([b'{"label":%b,"score":%b}' % (orjson.dumps(name), text_of(one)) for name, one in pairs])
