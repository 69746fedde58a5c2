"""Leaves out the tests whose tools are missing, and names them at the end; where CI=true they fail instead, unless
the machine cannot have the tool.

@pytest.mark.needs("prometheus", "promtool")    names of tests.kit.tools.TOOLS
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter
from hypothesis import HealthCheck, settings

from tests.kit import tools
from tests.kit.shm_leftovers import remove_leftovers

# Tests use gRPC's clients in this process, whose fork handlers crash a child now and then between fork and exec. They
# are chosen when grpc is imported. Gateways use gRPC too, but start their children by vfork, which runs no handler.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Where this is set, every process that a test starts compiles a thousand modules anew: half a second for a gateway.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A server that a test ends is not behind a load balancer.
os.environ.setdefault("MILLSTREAM_DRAIN_DELAY_S", "0")

# Hypothesis fails an example that takes 0.2 s, which any example may on a busy machine. With CI=true it does not.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

pytest_plugins = ("tests.kit.fixtures",)

# A tree without plug-ins runs the tests of the core alone (tests/integration/test_core_alone.py).
WITH_PLUGINS = find_spec("millstream.plugins") is not None

PROPERTY = "left out for want of"  # of a test's report: also xdist's workers hand it over


def pytest_configure() -> None:
    """Signals as a terminal's shell leaves them: nohup and background jobs ignore some, and children inherit that."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Free the shared memory that killed runs left: it stays allocated until the machine restarts."""
    if not hasattr(session.config, "workerinput"):  # once, not in each of xdist's workers
        remove_leftovers(Path("/dev/shm"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files that import plug-ins where there are none."""
    imports = collection_path.suffix == ".py" and "\nfrom millstream.plugins" in collection_path.read_text()
    return True if imports and not WITH_PLUGINS else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what cannot run. An unknown name ends the run: the test would never be left out."""
    if not WITH_PLUGINS:
        items[:] = [item for item in items if not item.get_closest_marker("plugins")]
    known: dict[str, bool] = {}
    for item in items:
        names = [name for marker in item.iter_markers("needs") for name in marker.args]
        for name in names:
            if name not in tools.TOOLS:
                raise pytest.UsageError(f"{item.nodeid} needs {name!r}, which tests/kit/tools.py does not list")
            if name not in known:
                known[name] = tools.TOOLS[name].available
        lacking = [name for name in names if not known[name]]
        for name in lacking:
            item.user_properties.append((PROPERTY, name))
        if lacking and not (_complete() and _obtainable(lacking)):
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(lacking)}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture is made."""
    lacking = _lacking(item.user_properties)
    if lacking and _complete() and _obtainable(lacking):
        pytest.fail(f"CI runs every test, and this one needs {', '.join(lacking)}", pytrace=False)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """How many tests were left out, for want of what, and which: one line for each test function."""
    functions: defaultdict[str, Counter[str]] = defaultdict(Counter)
    tests = 0
    for report in terminalreporter.stats.get("skipped", []):
        lacking = _lacking(getattr(report, "user_properties", []))
        tests += bool(lacking)
        for name in lacking:
            functions[name][report.nodeid.partition("[")[0]] += 1
    if not tests:
        return
    terminalreporter.section(f"left out: {tests} {'test' if tests == 1 else 'tests'}", yellow=True)
    for name, counted in sorted(functions.items()):
        terminalreporter.line(f"{name} is missing ({tools.TOOLS[name].advice}):")
        for function, number in sorted(counted.items()):
            terminalreporter.line(f"    {function}" + (f" ({number})" if number > 1 else ""))


def _obtainable(names: list[str]) -> bool:
    return all(tools.TOOLS[name].obtainable for name in names)


def _lacking(properties: list[tuple[str, object]]) -> list[str]:
    return [str(value) for key, value in properties if key == PROPERTY]


def _complete() -> bool:
    """Whether nothing may be left out."""
    return os.environ.get("CI", "").lower() in {"1", "true"}
