"""The watch of a gateway's certificate: what it takes, what it keeps, and what it says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from millstream.gateway.certificate_watch import CertificateWatch
from millstream.services.errors import Failure
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.tls.files import TlsFiles
from millstream.services.tls.identity import load_identity
from tests.kit.certificates import Authority, Pair, replace
from tests.kit.tls import CERTIFICATES

pytestmark = [pytest.mark.anyio, pytest.mark.needs("openssl")]
KEPT = "the certificate that was read before is still served"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def served(authority: Authority, tmp_path: Path) -> Pair:
    pair = Pair(tmp_path / "tls.crt", tmp_path / "tls.key")
    authority.issue().copy_to(pair)
    return pair


def watch_of(pair: Pair, client_ca: Path | None = None) -> CertificateWatch:
    return CertificateWatch(TlsFiles(*pair, client_ca), MetricsRegistry(None, "test"), ["http", "grpc"])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_a_new_pair_is_taken(authority: Authority, served: Pair, caplog: pytest.LogCaptureFixture) -> None:
    watch = watch_of(served)
    before = watch.identity
    await watch.look()
    assert watch.identity is before
    authority.issue(days=90).copy_to(served)
    await watch.look()
    assert watch.identity.validity.ends > before.validity.ends
    assert warnings(caplog) == []


async def test_a_bad_pair_is_warned_of_once(
    authority: Authority, served: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watch_of(served)
    before, key = watch.identity, served.key.read_bytes()
    for _ in range(2):
        replace(served.key, authority.issue().key.read_bytes())
        for _ in range(5):
            await watch.look()
    assert watch.identity is before
    assert [KEPT in line and "the key is not that of the certificate" in line for line in warnings(caplog)] == [
        True
    ] * 2
    replace(served.key, key)
    await watch.look()
    served.key.unlink()
    for _ in range(5):
        await watch.look()
    assert "No such file" in warnings(caplog)[2]
    assert watch.identity is before


async def test_a_certificate_that_comes_before_its_key_is_no_warning(
    authority: Authority, served: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watch_of(served)
    renewed = authority.issue()
    replace(served.certificate, renewed.certificate.read_bytes())
    await watch.look()
    replace(served.key, renewed.key.read_bytes())
    await watch.look()
    assert watch.identity.contents.certificate == renewed.certificate.read_bytes()
    assert warnings(caplog) == []


async def test_a_file_that_is_half_written_keeps_the_old_one(authority: Authority, served: Pair) -> None:
    watch = watch_of(served)
    before = watch.identity
    renewed = authority.issue()
    content = renewed.certificate.read_bytes()
    for size in (0, 100, len(content) // 2, len(content) - 30):
        served.certificate.write_bytes(content[:size])
        await watch.look()
        assert watch.identity is before
    renewed.copy_to(served)
    await watch.look()
    assert watch.identity is not before


async def test_a_swapped_folder_is_seen(authority: Authority, tmp_path: Path) -> None:
    """Kubernetes mounts a Secret as links through `..data`, and renames that link."""
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        authority.issue().copy_to(Pair(folder / "tls.crt", folder / "tls.key"))
    (tmp_path / "..data").symlink_to("one")
    links = Pair(tmp_path / "tls.crt", tmp_path / "tls.key")
    for link in links:
        link.symlink_to(f"..data/{link.name}")
    watch = watch_of(links)
    before = watch.identity
    (tmp_path / "..data_tmp").symlink_to("two")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")
    await watch.look()
    assert watch.identity.contents != before.contents


async def test_an_expired_pair_replaces_only_an_expired_one(
    authority: Authority, served: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watch_of(served)
    before = watch.identity
    authority.issue(days=-1).copy_to(served)
    for _ in range(3):
        await watch.look()
    assert watch.identity is before
    assert ["expired at" in line for line in warnings(caplog)] == [True]
    caplog.clear()
    late = watch_of(served)  # the machine's clock may be wrong: at the start it is served
    assert "it is served, and clients will refuse it" in warnings(caplog)[0]
    authority.issue(days=-1).copy_to(served)
    await late.look()
    assert late.identity.contents.certificate == served.certificate.read_bytes()


async def test_a_certificate_of_tomorrow_waits_for_its_day(
    authority: Authority, served: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    static = Pair(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")  # valid since before the test began
    static.copy_to(served)
    files = TlsFiles(*served)
    now = load_identity(files).validity.begins
    watch = CertificateWatch(files, MetricsRegistry(None, "test"), ["http"], lambda: now)
    before = watch.identity
    authority.issue().copy_to(served)
    for _ in range(3):
        await watch.look()
    assert watch.identity is before
    assert ["is not valid before" in line for line in warnings(caplog)] == [True]
    now = load_identity(files).validity.begins
    await watch.look()
    assert watch.identity.contents.certificate == served.certificate.read_bytes()


async def test_new_authorities_of_clients_are_taken(authority: Authority, served: Pair, tmp_path: Path) -> None:
    client_ca = tmp_path / "ca.pem"
    replace(client_ca, authority.certificate.read_bytes())
    watch = watch_of(served, client_ca)
    before = watch.identity
    replace(client_ca, b"nothing")
    await watch.look()
    assert watch.identity is before
    other = Authority(tmp_path, "other")
    replace(client_ca, other.certificate.read_bytes())
    await watch.look()
    (subject,) = [one["subject"] for one in watch.identity.context.get_ca_certs()]
    assert subject == ((("commonName", "other"),),)


def test_a_bad_pair_refuses_to_start(authority: Authority, served: Pair) -> None:
    replace(served.key, authority.issue().key.read_bytes())
    with pytest.raises(Failure, match="the key is not that of the certificate"):
        watch_of(served)
