"""Reading a metrics page as Prometheus would."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


class Page:
    """Samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name that have these labels; 0 if there is none."""
        return sum(
            sample.value for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    def label_values(self, label: str) -> set[str]:
        """All values that a label has anywhere."""
        return {sample.labels[label] for sample in self.samples if label in sample.labels}

    def series(self) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        """Which series there are: name and labels."""
        return {(sample.name, tuple(sorted(sample.labels.items()))) for sample in self.samples}
