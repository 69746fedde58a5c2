"""Makes the environment of `make test-frameworks`: every framework, in CPU builds, in versions that fit each other.

python -m tests.kit.framework_environment FOLDER    makes it; exit code 3 where this Python has no wheels of them all
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kit.torch_library import CPU_INDEX

REQUIREMENTS = Path(__file__).parents[1] / "frameworks" / "requirements.txt"
#: TensorFlow has no release for this Python and newer ones
PYTHON_MAX = (3, 14)
NOT_HERE = 3


def main(folder: Path) -> int:
    """Make the environment in `folder` and return the exit code."""
    if sys.version_info >= PYTHON_MAX:
        print("TensorFlow has no wheel for this Python: the tests of frameworks are left out.", file=sys.stderr)
        return NOT_HERE
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    quiet = ["--disable-pip-version-check", "--no-input", "--quiet", "--only-binary", ":all:", "--no-deps"]
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", *quiet, "--requirement", str(REQUIREMENTS)]
    for index in ([], ["--extra-index-url", CPU_INDEX]):  # the first may have torch's CPU build
        done = subprocess.run([*command, *index], check=False)
        if not done.returncode:
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
