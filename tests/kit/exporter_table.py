"""Makes the table of docs/batching.md on what exporters write. python -m tests.kit.exporter_table FOLDER

FOLDER has models that the scripts of tests/frameworks/exporters wrote, as "exporter; model.onnx".
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from millstream.services.ingest.inspection import inspect
from millstream.services.ingest.report import CheckedModel, CheckTask

#: the models of the table, by the names in files, with their headings
COLUMNS = {
    "mlp": "MLP",
    "cnn": "CNN",
    "lstm": "LSTM",
    "gru": "GRU, RNN",
    "encoder": "masked transformer",
    "pooling": "mean of embeddings",
    "resnet": "ResNet",
    "autoencoder": "autoencoder",
    "classifier": "softmax",
    "trees": "trees",
    "pipeline": "scaler",
}
_SAME = {"rnn": "gru"}
_NODE = re.compile(r' \(node "[^"]*"\)')


class Decision(NamedTuple):
    """How the check decided on a model, and why."""

    exporter: str
    model: str
    checked: CheckedModel

    @property
    def proven(self) -> bool:
        return self.checked.batching.decided == "proven"


def decide(path: Path) -> Decision:
    """Check one file, in this process. Raises Failure if it is refused."""
    exporter, _, model = path.stem.partition("; ")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        task = CheckTask(
            folder=Path(folder), batching=None, unpacked_bytes_max=0, memory_bytes_max=0, cpu_s_max=0, rows_max=64
        )
        return Decision(exporter, model, inspect(task, Path(shutil.copy(path, source / "model.onnx"))))


def rows(decisions: list[Decision]) -> list[str]:
    """Return a line for each exporter, and one for each further model."""
    cells: dict[str, dict[str, str]] = {}
    further: list[str] = []
    for one in decisions:
        column = _SAME.get(one.model, one.model)
        if column in COLUMNS:
            cells.setdefault(one.exporter, {})[column] = "proven" if one.proven else "alone"
        if column not in COLUMNS or not one.proven:
            reason = "proven" if one.proven else f"alone: {_NODE.sub('', one.checked.batching.reason)}"
            further.append(f"| {one.exporter} | {one.model} | {reason} |")
    lines = [f"| {name} | {' | '.join(found.get(column, '') for column in COLUMNS)} |" for name, found in cells.items()]
    return [*lines, *further]


def table(folder: Path) -> str:
    """Return both tables for the models in `folder`."""
    lines = rows([decide(path) for path in sorted(folder.glob("*; *.onnx"))])
    wide = [line for line in lines if line.count("|") == len(COLUMNS) + 2]
    heading = f"| exporter | {' | '.join(COLUMNS.values())} |\n|{'---|' * (len(COLUMNS) + 1)}"
    further = ["| exporter | model | decision |", "|---|---|---|", *(line for line in lines if line not in wide)]
    return "\n".join([heading, *wide, "", *further])


def main(folder: Path) -> None:
    print(table(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
