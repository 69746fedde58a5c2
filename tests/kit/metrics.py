"""Reads a metrics page as Prometheus would."""

from __future__ import annotations

from functools import cached_property

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


class Page:
    """Samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def samples(self) -> list[Sample]:
        return _samples(self.text)

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all samples with this name and these labels; 0 if there is none.

        Only lines that begin with the name are parsed: tests ask for one number of a large page many times.
        """
        lines = [line for line in self.text.split("\n") if line.startswith(name)]
        return sum(
            sample.value
            for sample in _samples("".join(f"{line}\n" for line in lines))
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def label_values(self, label: str) -> set[str]:
        """Return all values of a label."""
        return {sample.labels[label] for sample in self.samples if label in sample.labels}

    def series(self) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        """Return name and labels of every series."""
        return {(sample.name, tuple(sorted(sample.labels.items()))) for sample in self.samples}


def _samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
