"""Generators answer in parts, as they come, over every protocol that has parts."""

from __future__ import annotations

import asyncio
import json
import queue
import time
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from millstream.client.async_client import AsyncClient
from millstream.client.client import Client
from millstream.client.errors import ServerError
from millstream.services.errors import Failure
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack, running_stack, token_of

EXAMPLE = Path(__file__).parents[4] / "examples" / "python" / "countdown.py"
COUNT = """
from collections.abc import Iterator
import time

STREAMS = 4


def predict(text: str, count: int = 3, pause_s: float = 0.0) -> Iterator[str]:
    for number in range(count):
        if number:
            time.sleep(pause_s)
        yield f"{text} {number}"
"""


SLOW = '''
from collections.abc import Iterator
import os, pathlib, time

STREAMS = 2
made = 0


def predict(text: str, size: int = 10) -> Iterator[str]:
    """Yield for ever, and tell how much was made and how many runs ended."""
    global made
    try:
        if text == "hang":
            yield "first"
            while True:
                pass
        while True:
            made += 1
            yield text * size if text != "how many" else str(made)
    finally:
        print("ended", text, flush=True)
'''

FAILS = """
from collections.abc import Iterator


def predict(text: str) -> Iterator[str]:
    yield text
    raise ValueError("not " + text)
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("streams")
    with running_stack(folder, pools="cpu=1") as stack:
        for name, text in {"count": COUNT, "endless": SLOW, "fails": FAILS}.items():
            (folder / "service.py").write_text(text)
            stack.push(name, folder / "service.py")
        stack.push("countdown", EXAMPLE)
        yield stack


def events(stack: Stack, model: str, document: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
    url = f"http://127.0.0.1:{stack.port}/v2/models/{model}/generate_stream"
    request = urllib.request.Request(url, json.dumps(document).encode(), stack.headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        for line in reply:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def test_parts_come_as_events_while_the_function_runs(stack: Stack) -> None:
    parts = events(stack, "count", {"text": "part", "count": 3, "pause_s": 0.3})
    came = [(one["output"], time.monotonic()) for one in parts]
    assert [text for text, _ in came] == ["part 0", "part 1", "part 2"]
    assert came[1][1] - came[0][1] > 0.2, "each comes when it is there"


class Heard:
    """The answers of one stream over gRPC, as tritonclient hands them on."""

    def __init__(self, stack: Stack) -> None:
        self.client = grpcclient.InferenceServerClient(stack.grpc)
        self.answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        self.client.start_stream(
            lambda result, error: self.answers.put((result, error)),
            headers={name.lower(): value for name, value in stack.headers.items()},
        )

    def ask(self, model: str, request_id: str, text: str, *, empty_final: bool = True, **numbers: float) -> None:
        inputs = [grpcclient.InferInput("text", [1], "BYTES")]
        inputs[0].set_data_from_numpy(np.array([text.encode()], object))
        for name, value in numbers.items():
            array = np.array([value], np.int64 if isinstance(value, int) else np.float64)
            inputs.append(grpcclient.InferInput(name, [1], "INT64" if isinstance(value, int) else "FP64"))
            inputs[-1].set_data_from_numpy(array)
        self.client.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=empty_final)

    def next(self) -> tuple[Any, Exception | None]:
        return self.answers.get(timeout=60)

    def texts(self, requests: int) -> dict[str, list[str]]:
        """Return the parts of each request's answer; "." for its empty final response."""
        found: dict[str, list[str]] = {}
        ended = 0
        while ended < requests:
            result, error = self.next()
            assert error is None, error
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            ended += final
            text = "." if final else result.as_numpy("output")[0].decode()
            found.setdefault(response.id, []).append(text)
        return found


@contextmanager
def heard(stack: Stack) -> Iterator[Heard]:
    one = Heard(stack)
    try:
        yield one
    finally:
        one.client.stop_stream(cancel_requests=True)
        one.client.close()


def test_requests_of_one_stream_are_answered_beside_each_other_in_their_own_order(stack: Stack) -> None:
    with heard(stack) as stream:
        for number in range(4):
            stream.ask("count", str(number), f"r{number}", count=5, pause_s=0.02)
        found = stream.texts(4)
    assert found == {str(n): [*(f"r{n} {i}" for i in range(5)), "."] for n in range(4)}


def test_a_request_for_one_reply_is_refused_and_generate_takes_an_answer_of_one_part(stack: Stack) -> None:
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
    refused = stack.http.post("/v2/models/count/infer", json=body)
    assert refused.status_code == 400
    assert "answers in parts: call generate_stream, or ModelStreamInfer" in refused.json()["error"]
    with grpcclient.InferenceServerClient(stack.grpc) as client:
        text = grpcclient.InferInput("text", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"a"], object))
        with pytest.raises(InferenceServerException, match="answers in parts"):
            client.infer("count", [text], headers={name.lower(): value for name, value in stack.headers.items()})
    one = stack.http.post("/v2/models/count/generate", json={"text": "only", "count": 1})
    assert one.json()["output"] == "only 0"
    several = stack.http.post("/v2/models/count/generate", json={"text": "a", "count": 2})
    assert several.status_code == 400
    assert "call generate_stream" in several.json()["error"]


def test_an_answer_may_have_no_part(stack: Stack) -> None:
    assert list(events(stack, "count", {"text": "none", "count": 0})) == []
    with heard(stack) as stream:
        stream.ask("count", "none", "none", count=0)
        assert stream.texts(1) == {"none": ["."]}


def test_an_error_after_parts_ends_the_stream_with_it(stack: Stack) -> None:
    first, last = events(stack, "fails", {"text": "more"})
    assert first["output"] == "more"
    assert "ValueError: not more (service.py, line 7)" in last["error"]
    with heard(stack) as stream:
        stream.ask("fails", "a", "more")
        assert stream.next()[1] is None
        _, error = stream.next()
        assert "ValueError: not more" in str(error)
        stream.ask("count", "b", "goes on", count=1)
        assert stream.texts(1) == {"b": ["goes on 0", "."]}


def test_many_answers_at_once_of_an_asynchronous_generator(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "service.py"
    path.write_text(
        "import asyncio\nfrom collections.abc import AsyncIterator\n\n"
        "async def predict(text: str) -> AsyncIterator[str]:\n"
        "    for number in range(10):\n        await asyncio.sleep(0.05)\n        yield f'{text} {number}'\n"
    )
    stack.push("waits", path)
    began = time.monotonic()
    with heard(stack) as stream:
        for number in range(40):
            stream.ask("waits", str(number), f"r{number}")
        found = stream.texts(40)
    assert found == {str(n): [*(f"r{n} {i}" for i in range(10)), "."] for n in range(40)}
    assert time.monotonic() - began < 40 * 10 * 0.05 / 2, "they wait beside each other"


def test_a_reader_that_stops_stops_the_run_and_one_that_goes_ends_it(stack: Stack) -> None:
    reader = events(stack, "endless", {"text": "abcdefgh", "size": 128})  # 1 KiB a part
    for _ in range(3):
        next(reader)
    time.sleep(1.0)
    asker = events(stack, "endless", {"text": "how many"})
    made = int(next(asker)["output"])
    asker.close()
    assert made < 8 << 10, "the window and the buffers of sockets bound what is made ahead"
    reader.close()
    again = [events(stack, "endless", {"text": "z"}) for _ in range(2)]
    for one in again:  # both slots are free again
        assert next(one)["output"] == "z" * 10
        one.close()


def test_a_run_that_hangs_is_ended_when_its_caller_goes(stack: Stack) -> None:
    hangs = events(stack, "endless", {"text": "hang"})
    assert next(hangs)["output"] == "first"
    hangs.close()
    began = time.monotonic()
    others = [events(stack, "endless", {"text": "y"}) for _ in range(2)]
    assert [next(one)["output"] for one in others] == ["y" * 10] * 2
    assert time.monotonic() - began < 10
    for one in others:
        one.close()


def test_between_parts_the_timeout_of_the_request_holds(stack: Stack) -> None:
    document = {"text": "late", "count": 2, "pause_s": 30.0, "parameters": {"timeout": 500_000}}
    first, last = events(stack, "count", document)
    assert first["output"] == "late 0"
    assert "no part came" in last["error"]
    assert "after part 1" in last["error"]


def test_the_client_and_the_command_hand_parts_on_as_they_come(stack: Stack) -> None:
    inputs = {"text": ["hi"], "count": [3], "pause_s": [0.0]}
    url = f"http://127.0.0.1:{stack.port}"
    with Client(url, key=token_of(stack.home)) as client:
        parts = [part["output"].tolist() for part in client.stream("count", inputs)]
        assert parts == [["hi 0"], ["hi 1"], ["hi 2"]]
        first = client.stream("endless", {"text": ["q"]})
        assert next(first).array.tolist() == ["q" * 10]
        first.close()  # type: ignore[attr-defined]
        with pytest.raises(ServerError, match="not found"):
            next(client.stream("nothing", inputs))
        with pytest.raises(Failure, match="ValueError: not a"):
            list(client.stream("fails", {"text": ["a"]}))

    async def parts_of() -> list[str]:
        async with AsyncClient(url, key=token_of(stack.home)) as client:
            return [part.array[0] async for part in client.stream("count", inputs)]

    assert asyncio.run(parts_of()) == ["hi 0", "hi 1", "hi 2"]
    millstream = Millstream(stack.home)
    said = millstream.ok("predict", "countdown", "--stream", "--text", "lift-off in")
    assert said.split("\n")[:3] == ["lift-off in 3", "lift-off in 2", "lift-off in 1"]
    assert millstream.ok("predict", "count", "--stream", "--text", "so").strip() == "so 0so 1so 2"
    lines = millstream.ok("predict", "count", "--stream", "--json", "--text", "so").splitlines()
    assert [json.loads(line) for line in lines] == [{"output": [f"so {n}"]} for n in range(3)]
