"""The face of the core: which modules a plug-in's source imports, whichever way it names them."""

from __future__ import annotations

import pytest

from tests.kit.face import imported

pytestmark = pytest.mark.plugins


def test_modules_are_told_from_what_they_hold() -> None:
    source = (
        "from millstream.services.errors import Code, Failure\n"
        "from millstream.services.metrics import catalogue\n"
        "import millstream.gateway.http.body\n"
        "from millstream.plugins.proof import analysis\n"
        "import json\n"
        "def later():\n"
        "    from millstream.workers.backends.base import Instance\n"
    )
    assert sorted(set(imported(source))) == [
        "gateway.http.body",
        "services.errors",
        "services.metrics.catalogue",
        "workers.backends.base",
    ]
