"""The log level of a process: what decides it, and that documents of any content do no harm."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from millstream.services.errors import Failure
from millstream.services.process.log_level import LogLevel
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.log_levels import InstallationLevel
from millstream.services.queue.url import RedisAddress


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("millstream")]
    before = [logger.level for logger in loggers]
    logging.getLogger().setLevel(logging.INFO)
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def effective() -> int:
    return logging.getLogger("millstream.x").getEffectiveLevel()


def test_document_sets_the_level_of_its_kind_until_it_is_reset(tmp_path: Path) -> None:
    path = tmp_path / "levels.json"
    level = LogLevel("worker", path, lambda: None)
    level.check()
    assert effective() == logging.INFO
    for content, expected in (
        ({"worker": "debug"}, logging.DEBUG),
        ({"worker": "error", "gateway": "debug"}, logging.ERROR),
        ({"gateway": "debug"}, logging.INFO),
    ):
        path.write_text(json.dumps(content))
        level.check()
        assert effective() == expected
    path.write_text(json.dumps({"worker": "debug"}))
    level.check()
    path.unlink()
    level.check()
    assert effective() == logging.INFO


@pytest.mark.parametrize("content", ["", "{", "[]", '{"worker": 3}', '{"worker": "loud"}', '{"worker": ["debug"]}'])
def test_document_of_another_kind_is_no_level(tmp_path: Path, content: str) -> None:
    path = tmp_path / "levels.json"
    path.write_text(content)
    LogLevel("worker", path, lambda: None).check()
    assert effective() == logging.INFO


def test_verbose_level_of_triton_counts_where_the_document_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "levels.json"
    level = LogLevel("gateway", path, lambda: None)
    level.set_verbose(True)
    assert effective() == logging.DEBUG
    path.write_text('{"gateway": "warning"}')
    level.check()
    assert effective() == logging.WARNING
    path.unlink()
    level.check()
    assert effective() == logging.DEBUG
    level.set_verbose(False)
    assert effective() == logging.INFO


def test_libraries_do_not_become_verbose(tmp_path: Path) -> None:
    LogLevel("gateway", tmp_path / "none", lambda: None).set_verbose(True)
    assert logging.getLogger("grpc").getEffectiveLevel() == logging.INFO


def test_machine_goes_before_installation_and_unreachable_redis_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "levels.json"
    unreachable = InstallationLevel(RedisAddress.unix(str(tmp_path / "none")), InstallationKeys("test"), "worker").read
    reads: list[Callable[[], str | None]] = [partial(str, "warning")]

    def read() -> str | None:
        return reads[-1]()

    level = LogLevel("worker", path, read)
    level.check()
    assert effective() == logging.WARNING
    with pytest.raises(Failure):
        unreachable()
    reads.append(unreachable)
    level.check()
    assert effective() == logging.WARNING
    path.write_text('{"worker": "debug"}')
    level.check()
    assert effective() == logging.DEBUG
    path.unlink()
    level.check()
    assert effective() == logging.WARNING
