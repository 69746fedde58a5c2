"""Children that are forked while gRPC's threads run start as usual: its fork handlers crashed some of them."""

from __future__ import annotations

import subprocess
import threading
from concurrent import futures

import grpc

FORKS = 60


def test_children_start_while_grpc_calls_are_made():
    """Without GRPC_ENABLE_FORK_SUPPORT=0 (tests/conftest.py) about 3 % of the children end by SIGSEGV or SIGABRT."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    enough = threading.Event()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/unknown/method")

        def make_calls() -> None:
            while not enough.is_set():
                try:
                    call(b"")
                except grpc.RpcError as error:
                    assert error.code() is grpc.StatusCode.UNIMPLEMENTED

        callers = [threading.Thread(target=make_calls) for _ in range(2)]
        for caller in callers:
            caller.start()
        try:
            ends = {subprocess.run(["true"], preexec_fn=lambda: None, check=False).returncode for _ in range(FORKS)}
        finally:
            enough.set()
            for caller in callers:
                caller.join()
    server.stop(None).wait()
    assert ends == {0}
