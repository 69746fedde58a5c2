"""Writes docs/first-model.svg: a terminal in which a scikit-learn model is pushed, described and called.

Needs scikit-learn and pandas: `make pictures` runs it in the environment of the frameworks.
"""

from __future__ import annotations

import io
import pickle
import tempfile
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.text import Text
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from tests.kit.command_line import ROOT, Millstream
from tests.kit.stack import running_stack

PICTURE = ROOT / "docs" / "first-model.svg"
COLUMNS = 92


class _Coloured(Millstream):
    def environment(self) -> dict[str, str]:
        environment = super().environment() | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
        environment.pop("NO_COLOR")
        return environment


def _files(folder: Path) -> None:
    """Write the model, fitted on a table with text labels, and a table to classify."""
    data = load_iris(as_frame=True)
    table = data.data.set_axis(["sepal_length", "sepal_width", "petal_length", "petal_width"], axis="columns")
    labels = pd.Series(data.target_names[data.target])
    (folder / "iris.pkl").write_bytes(pickle.dumps(LogisticRegression(max_iter=500).fit(table, labels)))
    table.iloc[[0, 70, 120], ::-1].to_csv(folder / "flowers.csv", index=False)


def main() -> None:
    """Start the product, and write what the commands print."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _files(folder)
        with running_stack(folder / "home") as stack:
            command = _Coloured(stack.home)
            for line in (
                "push iris iris.pkl --allow-pickle",
                "describe iris",
                "predict iris --input flowers.csv",
            ):
                words = [folder / word if word.startswith(("iris.", "flowers.")) else word for word in line.split()]
                code, shown = command.in_terminal(words, COLUMNS)
                assert code == 0, shown
                console.print(Text.from_markup(f"[bold green]$[/] [bold]millstream {line}[/]"))
                console.print(Text.from_ansi(shown.replace("\r\n", "\n").replace(stack.url, "http://127.0.0.1:8000")))
    PICTURE.write_text(console.export_svg(title="Millstream"))


if __name__ == "__main__":
    main()
