"""The Triton backend against NVIDIA's Triton server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from millstream.services.errors import Code, Failure
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Terminated
from tests.contract.backend_cases import EVERY, remote_model, same, some
from tests.kit.triton_server import TritonServer, triton_server
from tests.kit.wait import wait_until

pytestmark = pytest.mark.needs("tritonserver")

NUMBERS = [datatype for datatype in EVERY if datatype != "BYTES"]  # see triton_server
SLOW_S = 3.0
ROW = some("FP32", 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with triton_server(tmp_path_factory.mktemp("triton")) as server:
        for datatype in NUMBERS:
            server.add(f"identity-{datatype.lower()}", datatype)
        server.add("slow", run_s=SLOW_S)
        server.start()
        yield server


@pytest.mark.parametrize("datatype", NUMBERS)
def test_a_datatype_comes_back_as_it_went_in(server: TritonServer, tmp_path: Path, datatype: str) -> None:
    model = remote_model(tmp_path, server.url, f"identity-{datatype.lower()}")
    instance = get_backend("triton").load(model, same(datatype), "cpu", 1)
    for rows in (1, 0, 5):
        given = some(datatype, rows)
        (taken,) = instance.run({"x": given})
        assert (taken.dtype, taken.shape) == (given.dtype, given.shape)
        assert taken.tolist() == given.tolist()
    instance.close()


def test_a_model_that_it_lacks_is_unavailable_and_another_signature_is_refused(
    server: TritonServer, tmp_path: Path
) -> None:
    with pytest.raises(Failure, match="missing") as caught:
        get_backend("triton").load(remote_model(tmp_path, server.url, "missing"), same(), "cpu", 1)
    assert caught.value.code is Code.UNAVAILABLE
    with pytest.raises(Failure, match="is FP32, and the signature says INT64") as refused:
        get_backend("triton").load(remote_model(tmp_path, server.url, "identity-fp32"), same("INT64"), "cpu", 1)
    assert refused.value.code is Code.MODEL


def test_a_run_ends_with_its_deadline_and_when_it_is_terminated(server: TritonServer, tmp_path: Path) -> None:
    late = remote_model(tmp_path, server.url, "slow", timeout_s=0.2)
    instance = get_backend("triton").load(late, same(), "cpu", 1)
    with pytest.raises(Failure) as caught:
        instance.run({"x": ROW})
    assert caught.value.code is Code.EXPIRED
    assert instance.lost == ""
    instance.close()
    instance = get_backend("triton").load(remote_model(tmp_path, server.url, "slow"), same(), "cpu", 1)
    stopper = threading.Timer(0.2, instance.terminate)
    stopper.start()
    with pytest.raises(Terminated):
        instance.run({"x": ROW})
    stopper.join()
    assert instance.lost == ""
    assert instance.run({"x": ROW})[0].tolist() == ROW.tolist()
    instance.close()


def test_a_run_may_take_longer_than_several_pings_of_the_connection(tmp_path: Path) -> None:
    """A server closes connections that ping more often than it allows: it sees three pings in this run."""
    with triton_server(tmp_path) as server:
        server.add("slower", run_s=35)
        server.start()
        instance = get_backend("triton").load(remote_model(tmp_path, server.url, "slower"), same(), "cpu", 1)
        assert instance.run({"x": ROW})[0].tolist() == ROW.tolist()
        instance.close()


def test_a_server_that_dies_is_noticed_without_a_run_and_found_again(tmp_path: Path) -> None:
    with triton_server(tmp_path) as server:
        server.add("same")
        server.start()
        model = remote_model(tmp_path, server.url, "same")
        instance = get_backend("triton").load(model, same(), "cpu", 1)
        assert instance.run({"x": ROW})[0].tolist() == ROW.tolist()
        server.kill()
        assert server.url in wait_until(lambda: instance.lost)
        with pytest.raises(Failure) as caught:
            instance.run({"x": ROW})
        assert caught.value.code is Code.UNAVAILABLE
        instance.close()
        server.start()
        again = get_backend("triton").load(model, same(), "cpu", 1)
        assert np.array_equal(again.run({"x": ROW})[0], ROW)
        again.close()
