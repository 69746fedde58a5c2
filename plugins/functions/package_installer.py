"""python -m millstream.plugins.functions.package_installer READS WRITES ARGUMENTS… --parent PID: runs uv, confined.

It reaches the network and the given folders, and no other files; uv inherits that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from uv import find_uv_bin

from millstream.services.sandbox.confine import begin, confine


def main() -> None:
    begin(int(sys.argv[-1]))
    reads, writes = ([Path(one) for one in text.split(",")] for text in sys.argv[1:3])
    uv = Path(find_uv_bin()).resolve()
    python = Path(sys.executable)
    prefixes = [Path(sys.prefix), Path(sys.base_prefix), python.parent, python.resolve().parent]
    network = [
        Path(name) for name in ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/usr/share")
    ]
    layers = confine([*reads, *prefixes, *network, uv.parent], writes, (uv, *prefixes, *writes), installs=True)
    if not layers.landlock:
        sys.exit("this kernel has no Landlock, without which nothing bounds what an installation writes")
    os.execv(uv, [str(uv), *sys.argv[3:-2]])  # noqa: S606


if __name__ == "__main__":
    main()
