"""Run the state machines with random seeds until the time is over or one of them fails.

python -m tests.explore [--minutes 10] [--seed N] [PATH …]        exit status 1 when a machine failed

Prints the seed of each round, and after a failure the command that repeats the round.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
import time
from pathlib import Path

from millstream.services.environment import child_environment
from tests.kit.state_machines import EXPLORE

ROOT = Path(__file__).parents[2]
MACHINES = "tests/property"
SEED_BITS = 31


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description="Explore the state machines.")
    parser.add_argument("--minutes", type=float, default=10, help="no round starts after them (default: 10)")
    parser.add_argument("--seed", type=int, help="one round, with this seed")
    parser.add_argument("paths", nargs="*", default=[MACHINES], help=f"default: {MACHINES}")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return 0 if run_round(arguments.seed, arguments.paths) else 1
    end = time.monotonic() + arguments.minutes * 60
    rounds = 0
    while not rounds or time.monotonic() < end:
        rounds += 1
        if not run_round(secrets.randbits(SEED_BITS), arguments.paths):
            return 1
    print(f"rounds: {rounds}, failures: 0")
    return 0


def run_round(seed: int, paths: list[str]) -> bool:
    """Run each machine once. Returns whether all passed."""
    print(f"seed {seed}", end=" ", flush=True)
    start = time.monotonic()
    options = ["-q", "--no-header", "-m", "state_machine", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *paths],
        cwd=ROOT,
        env=child_environment({EXPLORE: "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    passed = done.returncode == 0
    print(f"{'passed' if passed else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
    if not passed:
        only = "" if paths == [MACHINES] else f' ARGS="{" ".join(paths)}"'
        print(f"{done.stdout}\nTo repeat this round: make explore SEED={seed}{only}", flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
