"""Expressions that several charts share. Pure.

Gauges that several processes report of one fact are taken by maximum; gauges that each report in part are summed.
"""

from __future__ import annotations

import re

OF_MODEL = 'model=~"$model"'
OF_POOL = 'pool=~"$pool"'
FAILED = 'outcome=~"overloaded|unavailable|expired|memory|model|storage|internal"'
#: every expression of a page is of the installation that its reader has chosen
OF_INSTALLATION = 'installation=~"$installation"'
_SELECTED = re.compile(r"\b(millstream[\w:]*|up)\b(\{)?")
BY_PROCESS, OF_PROCESS = "instance, process", "{{instance}} {{process}}"  # machines have processes of the same name


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Return the per-second rate of a counter, summed by labels."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{f'{{{where}}}' if where else ''}[$__rate_interval]))"


def quantile(part: float, metric: str, by: str = "", where: str = "") -> str:
    """Return a quantile of a histogram, by labels."""
    return f"histogram_quantile({part}, {rate(f'{metric}_bucket', f'{by}, le' if by else 'le', where)})"


def mean(metric: str, by: str = "", where: str = "") -> str:
    """Return the mean of a histogram's observations, by labels."""
    return f"{rate(f'{metric}_sum', by, where)} / {rate(f'{metric}_count', by, where)}"


def of_process(metric: str) -> str:
    """Return a gauge of processes, one line for each."""
    return f"sum by ({BY_PROCESS}) (millstream_process_{metric})"


def instances_ready(where: str) -> str:
    """Return the ready instances by model, version and pool."""
    return f"max by (model, version, pool) (millstream_instances_ready{{{where}}})"


def of_installation(expression: str) -> str:
    """Return an expression with its metrics limited to the chosen installation."""
    return _SELECTED.sub(lambda found: f"{found[1]}{{{OF_INSTALLATION}{', ' if found[2] else '}'}", expression)
