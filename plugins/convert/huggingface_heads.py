"""Decides which class of transformers a folder's model is, and what its head answers.

architecture in config.json ─> tables of transformers' auto classes ─> Head, or a refusal that names the task
id2label, problem_type ─> classes and their labels, as transformers' pipelines answer them
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from millstream.plugins.convert.huggingface_folder import Folder
from millstream.services.errors import Failure, invalid
from millstream.services.ingest.importers import ImportOptions
from millstream.services.model.classes import ANSWERED_MAX, Classes

LOGITS = "logits"
LABEL_CHARACTERS_MAX = 512
#: control characters, surrogates, separators of lines and paragraphs: a label is a line of text
_NO_TEXT = frozenset({"Cc", "Cs", "Zl", "Zp"})
_LABELS_NOTED = 20

Task = Literal["embeddings", "sequence-classification", "token-classification"]
#: what is imported: auto classes that load it, and their tables of the classes of each model_type
_LOADERS: Mapping[str, tuple[Task, str]] = {
    "AutoModel": ("embeddings", "MODEL_MAPPING_NAMES"),
    "AutoModelForTextEncoding": ("embeddings", "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES"),
    "AutoModelForSequenceClassification": (
        "sequence-classification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "AutoModelForTokenClassification": ("token-classification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
}


class Head(NamedTuple):
    """What a model is imported for. `loader`: an auto class; `code`: whether it runs the folder's own code."""

    task: Task
    loader: str
    code: bool = False


def find_head(transformers: Any, folder: Folder, options: ImportOptions) -> Head:
    """Return what the folder's model is. Raises Failure(INVALID) for others, and for code that is not allowed."""
    model_type = str(folder.config.get("model_type"))
    known = model_type in transformers.CONFIG_MAPPING
    head = (known and _of_tables(model_type, folder)) or _of_code(folder, known=known)
    if not head:
        raise _refusal(transformers, model_type, folder, known=known)
    if head.code and not options.allow_code:
        raise invalid(
            f"the folder's model is code of its own ({folder.code}), which is not run unless it is allowed: push it "
            "with --allow-code if you trust it"
        )
    return head


def _tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of transformers: model_type -> name of a class, or names."""
    from transformers.models.auto import modeling_auto

    return {name: table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")}


def _named(table: Mapping[str, Any], model_type: str) -> tuple[str, ...]:
    names = table.get(model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)


def _of_tables(model_type: str, folder: Folder) -> Head | None:
    tables = _tables()
    for loader, (task, table) in _LOADERS.items():
        classes = _named(tables[table], model_type)
        if loader == "AutoModel" and folder.config.get("is_encoder_decoder") is True:
            continue  # its states are those of the decoder
        # The modules of sentence-transformers, and a file that names no architecture, mean the model without a head.
        base = task == "embeddings" and (folder.pipeline is not None or not folder.architecture)
        if folder.architecture in classes or (base and classes):
            return Head(task, loader)
    return None


def _of_code(folder: Folder, *, known: bool) -> Head | None:
    """Return the head whose class is code of the folder: auto_map says which auto class loads it."""
    auto_map = folder.config.get("auto_map")
    classes = auto_map if isinstance(auto_map, dict) else {}
    loaders = [name for name, path in classes.items() if str(path).rpartition(".")[2] == folder.architecture]
    if not loaders and not known and "AutoModel" in classes:
        loaders = ["AutoModel"]
    loader = next((name for name in loaders if name in _LOADERS), None)
    return Head(_LOADERS[loader][0], loader, code=True) if loader is not None else None


def _refusal(transformers: Any, model_type: str, folder: Folder, *, known: bool) -> Failure:
    if not known and not folder.code:
        return invalid(
            f"transformers {transformers.__version__} does not know the model_type {model_type[:80]!a} of config.json: "
            "export the model to ONNX where it runs"
        )
    architecture = folder.architecture
    tables = {name: table for name, table in _tables().items() if name.startswith("MODEL_")}
    its_own = [name for name, table in tables.items() if architecture in _named(table, model_type)]
    if not its_own and any(architecture in _named(table, other) for table in tables.values() for other in table):
        return invalid(
            f"config.json names the model_type {model_type[:80]!a} and the architecture {architecture[:80]!a}, "
            "which is of another model_type"
        )
    tasks = [name.removeprefix("MODEL_").removesuffix("_MAPPING_NAMES") for name in its_own]
    tasks.sort(key=lambda task: task == "FOR_PRETRAINING")  # which repeats the others: language models are there, too
    what = f", a model {tasks[0].lower().replace('_', ' ')}" if tasks else ""
    if folder.config.get("is_encoder_decoder") is True:
        what = ", an encoder with a decoder"
    return invalid(
        f"config.json names the architecture {architecture[:80]!a}{what}: imported are models "
        "that transformers' AutoModel, AutoModelForSequenceClassification and AutoModelForTokenClassification load. "
        "Export another model yourself with torch.onnx.export(model, (inputs,), 'model.onnx', dynamo=True)"
    )


class Answer(NamedTuple):
    """What a head answers. `classes` None: its numbers."""

    classes: Classes | None
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def answer_of(config: Any, task: Task, count: int) -> Answer:
    """Return what a head answers, as transformers' pipelines do. Raises Failure(INVALID) for labels that do not fit.

    Args:
        config: of the loaded model.
        task: of its head.
        count: numbers that the head computes for a text, or for a token.
    """
    if task == "embeddings":
        return Answer(None)
    labels = _labels(getattr(config, "id2label", None) or {}, count)
    problem = getattr(config, "problem_type", None) if task == "sequence-classification" else None
    named = ", ".join(labels[:_LABELS_NOTED]) + (", …" if count > _LABELS_NOTED else "")
    if problem == "regression" or (count == 1 and problem is None):
        return Answer(None, notes=(f"`{LOGITS}` has the numbers that the model computes: {named}.",))
    scores: Literal["softmax", "sigmoid"] = "sigmoid" if problem == "multi_label_classification" else "softmax"
    what = "the best" if scores == "softmax" else f"the best {min(count, ANSWERED_MAX)}"
    note = f"Label and score of {what} of {count} classes are answered ({named}); `{LOGITS}` if a request names it."
    return Answer(Classes(output=LOGITS, scores=scores), labels, (note,))


def _labels(id2label: Mapping[Any, Any], count: int) -> tuple[str, ...]:
    """Return the label of each class. Raises Failure(INVALID)."""
    if sorted(id2label) != list(range(count)):
        missing = min(set(range(count)) - set(id2label), default=None)
        what = f"has no label for class {missing}" if missing is not None else f"has {len(id2label)} labels"
        raise invalid(f"id2label of config.json {what}, and the model has {count} classes, 0 to {count - 1}")
    labels = []
    for at in range(count):
        label = id2label[at]
        text = str(label).strip() if isinstance(label, str | int | float) else ""
        if not text or any(unicodedata.category(character) in _NO_TEXT for character in text):
            raise invalid(f"id2label of config.json: the label of class {at}, {str(label)[:80]!a}, is no line of text")
        if len(text) > LABEL_CHARACTERS_MAX:
            raise invalid(
                f"id2label of config.json: the label of class {at} has {len(text)} characters, more than "
                f"{LABEL_CHARACTERS_MAX}"
            )
        labels.append(text)
    return tuple(labels)
