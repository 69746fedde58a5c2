"""The page Compile races: races of compiled forms, their verdicts, and what became of these."""

from __future__ import annotations

from deploy.grafana.chart import Chart, Page, Variable
from deploy.grafana.queries import OF_MODEL

_RACES = (
    Chart(
        "Races waiting and running",
        "Races of compiled forms that wait for a worker, or run.",
        "short",
        (("max by (state) (millstream_races_waiting)", "{{state}}"),),
    ),
    # Totals, since races are rare: the rate of a counter does not show its first event.
    Chart(
        "Races ended",
        "Until now, by outcome. Interrupted races go on later.",
        "short",
        (("sum by (outcome) (millstream_races_ended_total)", "{{outcome}}"),),
    ),
    Chart(
        "Time of a race",
        "Mean of all races until now, until the verdict.",
        "s",
        (("sum(millstream_race_duration_seconds_sum) / sum(millstream_race_duration_seconds_count)", "race"),),
    ),
)

_FORMS = (
    Chart(
        "Compiled forms taken",
        "How often workers began to serve a model with a compiled form.",
        "short",
        ((f"sum by (model, pool) (millstream_variants_swapped_total{{{OF_MODEL}}})", "{{model}} {{pool}}"),),
    ),
    Chart(
        "Verdicts taken back",
        "Because a compiled form failed or was slow. The reason is in the worker's log.",
        "short",
        ((f"sum by (model, pool) (millstream_variants_undone_total{{{OF_MODEL}}})", "{{model}} {{pool}}"),),
    ),
)

RACES = Page(
    name="races",
    title="Millstream: Compile races",
    about="Races of compiled forms, their verdicts, and what became of these.",
    variables=(Variable("model", "millstream_requests_total"),),
    rows=(("Races", _RACES), ("Compiled forms", _FORMS)),
)
