"""Reads a metrics page as Prometheus would."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


class Page:
    """Samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all samples with this name and these labels; 0 if there is none."""
        return sum(
            sample.value for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    def label_values(self, label: str) -> set[str]:
        """Return all values of a label."""
        return {sample.labels[label] for sample in self.samples if label in sample.labels}

    def series(self) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        """Return name and labels of every series."""
        return {(sample.name, tuple(sorted(sample.labels.items()))) for sample in self.samples}
