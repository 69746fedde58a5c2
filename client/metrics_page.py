"""The metrics of a server, parsed from its page in Prometheus' text format."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from millstream.services.errors import Code, Failure


class Sample(NamedTuple):
    """One value: name of the series, its labels, and the number."""

    name: str
    labels: dict[str, str]
    value: float


class Metrics:
    """The samples of one metrics page. `text` is the page itself."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def samples(self) -> list[Sample]:
        """All samples in the page's order. Raises Failure(INTERNAL) for a page in another format."""
        from prometheus_client.parser import text_string_to_metric_families

        try:
            families = list(text_string_to_metric_families(self.text))
        except (ValueError, KeyError, IndexError) as error:
            raise Failure(Code.INTERNAL, f"/metrics is not a metrics page: {error}") from error
        return [Sample(one.name, dict(one.labels), one.value) for family in families for one in family.samples]

    def select(self, name: str, **labels: str) -> list[Sample]:
        """Return the samples of a series that have these labels."""
        return [one for one in self.samples if one.name == name and labels.items() <= one.labels.items()]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a series that have these labels; 0 if there is none."""
        return sum(one.value for one in self.select(name, **labels))

    def __repr__(self) -> str:
        return f"Metrics({len(self.text)} characters)"
