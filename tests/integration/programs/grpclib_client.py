"""grpclib's client, which is on the package h2: unary calls, a stream, an error, a deadline, and a cancellation.

usage: python grpclib_client.py HOST PORT < {"infer": hex, "unknown": hex}       prints what it was answered, as JSON
"""

import asyncio
import json
import sys

from grpclib.client import Channel, StreamStreamMethod, UnaryUnaryMethod
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError

SERVICE = "/inference.GRPCInferenceService/"
CALLS = 50


class Bytes(CodecBase):  # type: ignore[misc]
    """Messages as they are on the wire."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: type[bytes]) -> bytes:
        return message

    def decode(self, data: bytes, message_type: type[bytes]) -> bytes:
        return data


async def main(host: str, port: str) -> None:
    sent = {name: bytes.fromhex(text) for name, text in json.load(sys.stdin).items()}
    async with Channel(host, int(port), codec=Bytes()) as channel:
        infer = UnaryUnaryMethod(channel, f"{SERVICE}ModelInfer", bytes, bytes)
        stream = StreamStreamMethod(channel, f"{SERVICE}ModelStreamInfer", bytes, bytes)
        found = {
            "many": [reply.hex() for reply in await asyncio.gather(*[infer(sent["infer"]) for _ in range(CALLS)])],
            "metadata": (await infer(sent["infer"], timeout=240, metadata={"x-request-id": "mine"})).hex(),
            "stream": [reply.hex() for reply in await stream([sent["infer"]] * 3)],
        }
        try:
            await infer(sent["unknown"])
        except GRPCError as error:
            found["error"] = [error.status.name, error.message]
        async with infer.open() as cancelled:
            await cancelled.send_request()
            await cancelled.cancel()
        found["after"] = (await infer(sent["infer"])).hex()
    print(json.dumps(found))


asyncio.run(main(*sys.argv[1:]))
