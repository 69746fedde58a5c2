"""Debian's Prometheus with this project's rules, on a port of its own choice, scraping what a test runs."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from tests.kit.tools import program
from tests.kit.wait import wait_until

FOLDER = Path(__file__).parents[2] / "deploy/prometheus"
_LISTENING = re.compile(r'msg="Listening on" address=(\S+)')


class LivePrometheus:
    """A running Prometheus; used as a context manager. Tests that start one are marked with needs("prometheus").

    Args:
        folder: an empty folder for its configuration and data.
        targets: addresses by job.
        interval: between two scrapes of a target, and between two evaluations of the rules; also the longest scrape. A
            busy machine may need most of a second for one.
        rules: whether it evaluates the rules of deploy/prometheus.
        options: further options of its command.
        scrapes: further scrape configurations, as in prometheus.yml: those with TLS or a key.
    """

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, Sequence[str]],
        *,
        interval: str = "1s",
        rules: bool = True,
        options: Sequence[str] = (),
        scrapes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        configuration = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
            "rule_files": [str(FOLDER / name) for name in rule_files()] if rules else [],
            "scrape_configs": [
                {
                    "job_name": job,
                    "static_configs": [{"targets": list(addresses), "labels": {"installation": "a-installation"}}],
                }
                for job, addresses in targets.items()
            ]
            + [dict(scrape) for scrape in scrapes],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        self.process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                "--web.listen-address=127.0.0.1:0",
                *options,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self.url = ""
        self.reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        assert self.process.stderr is not None
        ready = False
        for line in self.process.stderr:
            self.log.append(line)
            if found := _LISTENING.search(line):
                self.url = f"http://{found[1]}"
            ready = ready or "ready to receive web requests" in line
            if ready and self.url:
                break
        if not self.url:
            self.__exit__()
            raise AssertionError("".join(self.log))
        self.reader = threading.Thread(target=self.log.extend, args=(self.process.stderr,))
        self.reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()
        if self.reader is not None:
            self.reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of a reply of its API."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as reply:
            document = json.load(reply)
        assert document["status"] == "success"
        return document["data"]

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that an expression has now."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Ask until there is an answer, and return it."""
        return wait_until(lambda: self.ask(expression), what=f"{expression} has data")


def rule_files() -> list[str]:
    """Return the names of the files of rules that the committed configuration loads."""
    patterns = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["rule_files"]
    return sorted(str(path.relative_to(FOLDER)) for pattern in patterns for path in FOLDER.glob(pattern))


def rules() -> list[dict[str, Any]]:
    """Return all recording rules and alerts."""
    return [
        rule
        for name in rule_files()
        for group in yaml.safe_load((FOLDER / name).read_text())["groups"]
        for rule in group["rules"]
    ]
