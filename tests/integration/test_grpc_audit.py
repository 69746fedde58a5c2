"""The audit log of the gRPC server: entries are written before the reply, and counted when the server stops."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.access.audit_trail import REFUSALS_A_MINUTE
from millstream.services.access.audit_log import AuditLog
from tests.kit.application import Application

pytestmark = pytest.mark.anyio

APPEND_S = 1.0  # how long an entry takes, where a reply must not come before it


async def load_nothing(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """Ask for the load of a model that does not exist; return the status."""
    load = channel.unary_unary(
        "/inference.GRPCInferenceService/RepositoryModelLoad",
        pb.RepositoryModelLoadRequest.SerializeToString,
        pb.RepositoryModelLoadResponse.FromString,
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await load(pb.RepositoryModelLoadRequest(model_name="nothing"))
    code: grpc.StatusCode = refused.value.code()
    return code


async def test_a_refusal_is_in_the_log_before_its_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = AuditLog.append

    def append_slowly(log: AuditLog, entry: dict[str, Any]) -> None:
        time.sleep(APPEND_S)
        append(log, entry)

    monkeypatch.setattr(AuditLog, "append", append_slowly)
    application = Application(tmp_path, grpc_port=0, open_control=True)
    async with application.grpc_channel() as channel:
        code = await load_nothing(channel)
        written = application.audit_text()
        assert f'"outcome":"{code.name}"' in written
    assert application.audit_text() == written, "one entry"


async def test_a_server_that_stops_says_how_many_calls_have_no_entry(tmp_path: Path) -> None:
    application = Application(tmp_path, grpc_port=0, open_control=True)
    async with application.grpc_channel() as channel:
        for _ in range(REFUSALS_A_MINUTE + 3):
            await load_nothing(channel)
        assert application.audit_text().count('RepositoryModelLoad"') == 2 * REFUSALS_A_MINUTE
        assert "left_out" not in application.audit_text()
    assert "3 refused calls within a minute have no entry" in application.audit_text()
