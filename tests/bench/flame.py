"""Draws where the gateway and a worker spend their processor time under load: a flame graph of each, as SVG.

python -m tests.bench.flame --to docs/flame-after [--root CHECKOUT --package "" --preload=--model]
py-spy ─> stacks, with those of C ─> without waits, and without the interpreter's own frames ─> rectangles
"""

from __future__ import annotations

import argparse
import html
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from tests.bench.load import json_payload, measure
from tests.bench.processes import tree
from tests.bench.servers import ROOT, Server
from tests.kit import models

SAMPLES_PER_S = 250
SECONDS = 12
PATH = "/v2/models/mlp/infer"
#: leaves of threads that wait
WAITS = frozenset({"epoll_pwait", "epoll_wait", "poll", "select", "recv", "recvmsg", "wait4", "nanosleep", "futex"})
MAIN = ("_run_module_as_main", "main")  # what the main thread's stack has; the others wait, or write metrics
WIDTH, HEIGHT, LEAST = 1200, 16, 0.004  # pixels; the least share that is drawn
OURS = re.compile(r"\((millstream|gateway|workers|services)/")
COLOURS = {"ours": "#f6c667", "python": "#f08a5d", "native": "#b8c0c8"}


class Frame(NamedTuple):
    """A rectangle: where it begins and how wide it is as shares of all, its depth, its text."""

    begin: float
    share: float
    depth: int
    text: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.flame", description="Draw flame graphs under load.")
    parser.add_argument("--to", required=True, metavar="PREFIX", help="writes PREFIX-gateway.svg and PREFIX-worker.svg")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout that runs, with this Python's packages")
    parser.add_argument("--package", default="millstream.", help="prefix of its packages; empty in early commits")
    parser.add_argument("--preload", default="--preload", help="its option that loads a model")
    parser.add_argument("--connections", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millstream-flame-") as name, _server(arguments, Path(name)) as process:
        folder = Path(name)
        assert process.stdout is not None
        try:
            ready = next(line for line in process.stdout if re.search(r"\bready http", line))
            threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
            server = Server(ready.split("ready ", 1)[1].split()[0], process.pid)
            recorders = {who: _record(process.pid, f"{arguments.package}{who}s", folder / who) for who in ("worker",)}
            recorders["gateway"] = _record(process.pid, f"{arguments.package}gateway", folder / "gateway")
            row = np.round(np.random.default_rng(5).standard_normal(64), 4).astype(np.float32)
            measure(server, PATH, json_payload(folder, "input", row), arguments.connections, SECONDS + 3)
            for who, recorder in recorders.items():
                if recorder.wait():
                    raise SystemExit(f"py-spy could not record the {who}")
                stacks = read((folder / who).read_text().splitlines())
                about = f"{who}: shares of its processor time at {arguments.connections} connections"
                Path(f"{arguments.to}-{who}.svg").write_text(drawn(stacks, about))
        finally:
            process.terminate()
    return 0


def _server(arguments: argparse.Namespace, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", f"{arguments.package}services.cli", "up", "--home", str(folder / "home")]
    command += ["--http-port", "0", "--grpc-port", "0", "--pool", "cpu=1,threads=1"]
    command += [arguments.preload, f"mlp={models.mlp(folder / 'mlp.onnx')}"]
    source = arguments.root / "src"
    paths = [str(source if source.exists() else arguments.root), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, paths))}
    return subprocess.Popen(command, cwd=arguments.root, env=environment, stdout=subprocess.PIPE, text=True)


def _drain(output: IO[str]) -> None:
    """Read on, so that no write of the server blocks."""
    with suppress(ValueError):  # it was closed
        for _ in output:
            pass


def _record(root: int, module: str, to: Path) -> subprocess.Popen[bytes]:
    found = [pid for pid in sorted(tree(root)) if module in _words(pid)]
    words = [
        "--native",
        "--rate",
        str(SAMPLES_PER_S),
        "--duration",
        str(SECONDS),
        "--format",
        "raw",
        "--output",
        str(to),
    ]
    spy = Path(sys.executable).with_name("py-spy")
    return subprocess.Popen([str(spy), "record", "--pid", str(found[0]), *words], stdout=subprocess.DEVNULL)


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


def read(lines: Iterable[str]) -> Counter[tuple[str, ...]]:
    """Return how often each stack of the main thread was seen, outermost frame first, in py-spy's raw format."""
    found: Counter[tuple[str, ...]] = Counter()
    for line in lines:
        text, _, count = line.rpartition(" ")
        frames = text.split(";")
        leaf = frames[-1].split(" (")[0]
        if leaf not in WAITS and any(frame.split(" (")[0] in MAIN for frame in frames):
            found[tuple(frame for frame in frames if not _is_interpreter(frame))] += int(count)
    return found


def _is_interpreter(frame: str) -> bool:
    """Whether a frame of C is the interpreter's own, or has no name: it says nothing."""
    return "libpython" in frame or frame.startswith(("0x", "_PyEval", "Py", "_Py", "object_", "vectorcall"))


def frames_of(stacks: Counter[tuple[str, ...]]) -> Iterator[Frame]:
    """Yield a rectangle for each frame that is wide enough, with the frames that it called above it."""
    total = stacks.total()
    pending = [(0, 0.0, stacks)]
    while pending:
        depth, begin, those = pending.pop()
        children: dict[str, Counter[tuple[str, ...]]] = {}
        for stack, count in those.items():
            if stack:
                children.setdefault(stack[0], Counter())[stack[1:]] += count
        for text in sorted(children):
            share = children[text].total() / total
            if share >= LEAST:
                yield Frame(begin, share, depth, text)
                pending.append((depth + 1, begin, children[text]))
            begin += share


def drawn(stacks: Counter[tuple[str, ...]], about: str) -> str:
    """Return the flame graph as SVG; the innermost frames are on top."""
    frames = [*frames_of(stacks)]
    levels = 1 + max(frame.depth for frame in frames)
    height = (levels + 2) * HEIGHT
    view = f'viewBox="0 0 {WIDTH} {height}" font-family="monospace" font-size="11"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {view}>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/><text x="4" y="12">{html.escape(about)}</text>',
    ]
    for frame in frames:
        x, width = frame.begin * WIDTH, frame.share * WIDTH
        y = height - (frame.depth + 1) * HEIGHT
        kind = "ours" if OURS.search(frame.text) else "python" if ".py:" in frame.text else "native"
        name, text = html.escape(frame.text), frame.text.split(" (")[0]
        shown = html.escape(text[: max(0, int(width / 6.7) - 1)])
        parts.append(
            f'<g><title>{name} {frame.share:.1%}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{HEIGHT - 1}" fill="{COLOURS[kind]}"/><text x="{x + 2:.1f}" y="{y + 11}">{shown}</text></g>'
        )
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    sys.exit(main())
