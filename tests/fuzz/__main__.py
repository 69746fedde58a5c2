"""python -m tests.fuzz [--minutes 10] [--target json …]: feed the request parsers with malformed input.

Prints how many inputs each target took. Exits with 1 and the input's file if one was answered by other than a reply or
a clean refusal, or took too long: put it into tests/fuzz/corpus once it is mended, under a name that says what it is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from millstream.services.environment import child_environment
from tests.fuzz.engines import engine_here
from tests.fuzz.targets import TARGETS, seeds

_RUNS = re.compile(r"stat::number_of_executed_units: (\d+)")
#: what atheris says where it cannot tell which inputs reach something new
_BLIND = "Is the code instrumented"
_SHOWN_CHARACTERS = 4000
_START_S_MAX = 120  # beside the time of a target: to instrument the code, and to find the shortest input


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the request parsers.")
    parser.add_argument("--minutes", type=float, default=10, help="in all (default: 10)")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all, one after the other")
    arguments = parser.parse_args()
    targets = arguments.target or list(TARGETS)
    seconds = max(1, round(arguments.minutes * 60 / len(targets)))
    engine = engine_here()
    os.nice(19)
    print(f"{engine}, {seconds} s for each of {', '.join(targets)}", flush=True)
    clean = [_fuzz(engine, target, seconds) for target in targets]
    return 0 if all(clean) else 1


def _fuzz(engine: str, target: str, seconds: int) -> bool:
    """Whether nothing was found. The first finding ends the run of a target; its files stay."""
    folder = Path(tempfile.mkdtemp(prefix=f"millstream-fuzz-{target}-"))
    run = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.engines", engine, target, str(seconds), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=seconds + _START_S_MAX,
        env=child_environment({"TMPDIR": str(folder)}),
    )
    said = run.stdout.decode(errors="replace")
    runs = _RUNS.search(said)
    print(f"{target}: {runs[1] if runs else '?'} inputs, from {len(seeds(target))} of the corpus", flush=True)
    if _BLIND in said:
        print(f"{target}: the code that it reaches is not instrumented (engines.py)", flush=True)
        return False
    if run.returncode == 0:
        shutil.rmtree(folder)
        return True
    print(said[-_SHOWN_CHARACTERS:])
    print(f"{target}: FOUND {', '.join(map(str, folder.glob('finding-*'))) or f'status {run.returncode}'}", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main())
