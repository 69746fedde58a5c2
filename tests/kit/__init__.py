"""What tests, benchmarks and explorations share. Their processes find the plug-in of the tests as any other's."""

import os
import sys
from pathlib import Path

PLUGINS = str(Path(__file__).parent / "plugins")

if PLUGINS not in sys.path:
    sys.path.append(PLUGINS)
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), PLUGINS])
