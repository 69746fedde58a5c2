"""Programs and libraries that tests need and that no trustworthy wheel contains.

python -m tests.kit.tools            one line that names what is missing, nothing if none is missing; always exit code 0
python -m tests.kit.tools packages   the Debian packages of what is missing
python -m tests.kit.tools install    install them, with sudo unless run as root

A test that needs one is marked `@pytest.mark.needs("promtool")`; tests/conftest.py skips it if promtool is missing.
Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kit import disk, torch_library, triton_wheel
from tests.kit.containers.namespaces import available as containers_available


@dataclass(frozen=True, slots=True)
class Tool:
    """A program, a shared library, or a condition that `works` checks.

    Args:
        name: of the program or condition, or the file name of the library.
        package: the Debian package that contains it; "" if there is none.
        advice: how to get it, or why it cannot be had.
        works: replaces the search for the program or library.
        obtainable: whether this machine could have it. Where it could not, CI leaves its tests out as well.
    """

    name: str
    package: str = ""
    advice: str = "make test-tools"
    works: Callable[[], bool] | None = None
    obtainable: bool = True

    @property
    def available(self) -> bool:
        if self.works is not None:
            return self.works()
        if ".so" not in self.name:
            return shutil.which(self.name, path=_search_path()) is not None
        try:
            ctypes.CDLL(self.name)
        except OSError:
            return False
        return True


#: The environment of clients that the tests use as they are; `make test` creates it before it runs them.
CLIENTS = Path(__file__).parents[2] / ".venv" / "clients"
#: kserve's newest release, in deploy/locks/clients.txt, is not for this Python and newer ones.
KSERVE_PYTHON_MAX = (3, 14)


def _clients_installed() -> bool:
    return (CLIENTS / "bin" / "python").exists()


def _kserve_installed() -> bool:
    return any(CLIENTS.glob("lib/python*/site-packages/kserve"))


TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "containers",
            advice="run the tests as root, where namespaces are allowed",
            works=containers_available,
            obtainable=os.geteuid() == 0,
        ),
        Tool("chromium", "chromium"),
        Tool("clients", advice="make .venv/.clients", works=_clients_installed),
        Tool("curl", "curl"),
        Tool("gcc", "build-essential"),  # compiles a driver library of GPUs
        Tool("h2load", "nghttp2-client"),
        Tool(
            "kserve",
            advice="make .venv/.clients, unless this Python is newer than kserve's last release",
            works=_kserve_installed,
            obtainable=sys.version_info < KSERVE_PYTHON_MAX,
        ),
        Tool("libb64.so.0d", "libb64-0d"),  # perf_analyzer links to it
        Tool("nginx", "nginx"),
        Tool("npm", "npm"),  # builds the console
        Tool("openssl", "openssl"),  # signs the certificates of TLS tests
        Tool("prometheus", "prometheus"),
        Tool("promtool", "prometheus"),
        Tool("setpriv", "util-linux"),
        Tool("systemd-analyze", "systemd"),
        Tool("torch", works=torch_library.available, obtainable=torch_library.obtainable()),
        Tool("tmpfs", advice="allow user namespaces, or run as root", works=disk.small_disk_available),
        Tool("tritonserver", works=triton_wheel.available, obtainable=triton_wheel.obtainable()),
    )
}


def program(name: str) -> str:
    """Return the path of a program of `TOOLS`. A test that calls this must be marked with `needs`."""
    found = shutil.which(TOOLS[name].name, path=_search_path())
    assert found is not None, f"{name} is missing: mark this test with needs({name!r})"
    return found


def missing(names: Iterable[str] = TOOLS) -> list[Tool]:
    """Return the tools of these names that are missing. Raises KeyError for a name that is not in `TOOLS`."""
    return [TOOLS[name] for name in names if not TOOLS[name].available]


def packages(tools: Iterable[Tool]) -> str:
    """Return the Debian packages of these tools, each once, separated by spaces."""
    return " ".join(sorted({tool.package for tool in tools if tool.package}))


def notice(tools: list[Tool]) -> str:
    """Return one line: what is missing, which tests are skipped, and what to do."""
    names = ", ".join(tool.name if tool.package else f"{tool.name} ({tool.advice})" for tool in tools)
    wanted = packages(tools)
    help_ = f"; `make test-tools` installs them (apt-get install {wanted})" if wanted else ""
    return f"Not here: {names}. The tests that need them are left out{help_}."


def install() -> str | None:
    """Install what is missing. Returns the reason if that failed, else None."""
    return _install_packages() or torch_library.install() or triton_wheel.install()


def _install_packages() -> str | None:
    wanted = packages(missing())
    if not wanted:
        return None
    by_hand = f"install these packages, or what they are called here: {wanted}"
    if shutil.which("apt-get") is None:
        return f"there is no apt-get here; {by_hand}"
    if os.geteuid() and shutil.which("sudo") is None:
        return f"this is not root and there is no sudo; as root: apt-get install {wanted}"
    root = ["sudo"] if os.geteuid() else []
    quiet = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "-qq", "--no-install-recommends"]
    for command in (["apt-get", "update", "-qq"], [*quiet, *wanted.split()]):
        if subprocess.run([*root, *command], check=False).returncode != 0:
            return f"`{' '.join(command)}` failed; {by_hand}"
    # A new process, since the loader of this one may remember which libraries were missing.
    again = subprocess.run([sys.executable, "-m", "tests.kit.tools", "packages"], capture_output=True, check=True)
    left = again.stdout.decode().strip()
    return f"apt-get succeeded, and still missing is what {left} should bring" if left else None


def _search_path() -> str:
    """Return PATH with the `sbin` beside each `bin`: Debian puts servers there, and omits it from users' PATH."""
    return os.pathsep.join(_with_sbin(os.environ.get("PATH", os.defpath).split(os.pathsep)))


def _with_sbin(folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        yield folder
        if Path(folder).name == "bin":
            yield str(Path(folder).with_name("sbin"))


def main(arguments: list[str]) -> int:
    if arguments == ["install"] and (failure := install()) is not None:
        print(f"The tools for the tests could not be installed: {failure}", file=sys.stderr)
        return 1
    tools = [tool for tool in missing() if tool.obtainable or arguments == []]
    if arguments == ["packages"]:
        print(packages(tools))
    elif tools:
        print(notice(tools))
    elif arguments == ["install"]:
        print(f"All tools for the tests are there: {', '.join(TOOLS)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
