"""The digits example: the files in the folder are what the training makes, and the demo judges what it is told."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from millstream.client.address import ServerAddress
from millstream.examples.digits import demo, train
from millstream.examples.digits.demo import ACCURACY_MIN, HERE

Answer = Callable[[np.ndarray], tuple[int, object]]


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(HERE / "digits.onnx", options, providers=["CPUExecutionProvider"])


class Backlog(ThreadingHTTPServer):
    """The standard library's queue of five resets some of sixteen connections that arrive together."""

    request_queue_size = 128


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """A server whose infer route gives what `answer` makes of the pixels; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # head and body in one packet: two would wait for the client's delayed acknowledgement
        wbufsize = -1

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v2/models/digits/infer"
            (tensor,) = request["inputs"]
            pixels = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
            status, document = answer(pixels)
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None: ...

    with Backlog(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def labelled(label: int) -> tuple[int, object]:
    return 200, {"outputs": [{"name": "label", "datatype": "INT64", "shape": [1], "data": [label]}]}


def test_no_held_out_image_was_trained_on() -> None:
    digits, held_out = train.split()
    seen = {image.tobytes() for image in digits.images}
    assert not [image for image in held_out.images if image.tobytes() in seen]


def test_the_model_in_the_folder_reads_the_held_out_images(session: onnxruntime.InferenceSession) -> None:
    _, held_out = train.split()
    stored = np.load(HERE / "held_out.npz")
    np.testing.assert_array_equal(stored["images"], held_out.images)
    np.testing.assert_array_equal(stored["labels"], held_out.labels)
    labels, probabilities = session.run(["label", "probabilities"], {"pixels": held_out.images})
    assert (labels == held_out.labels).mean() >= ACCURACY_MIN
    np.testing.assert_array_equal(probabilities.argmax(axis=1), labels)


def test_training_again_gives_the_files_of_the_folder(
    tmp_path: Path, session: onnxruntime.InferenceSession, capsys: pytest.CaptureFixture[str]
) -> None:
    train.main(tmp_path)
    said = float(capsys.readouterr().out.split()[2])
    assert (tmp_path / "request.json").read_bytes() == (HERE / "request.json").read_bytes()
    again = onnxruntime.InferenceSession(tmp_path / "digits.onnx", providers=["CPUExecutionProvider"])
    assert [spec.name for spec in again.get_outputs()] == [spec.name for spec in session.get_outputs()]
    assert [spec.shape[1:] for spec in again.get_inputs()] == [[64]]
    _, held_out = train.split()
    accuracy = (again.run(["label"], {"pixels": held_out.images})[0] == held_out.labels).mean()
    assert accuracy == pytest.approx(said, abs=0.005)
    assert accuracy >= ACCURACY_MIN


def test_the_request_shows_a_two(session: onnxruntime.InferenceSession) -> None:
    (tensor,) = json.loads((HERE / "request.json").read_text())["inputs"]
    pixels = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
    assert session.run(["label"], {tensor["name"]: pixels})[0].tolist() == [2]


def test_the_demo_counts_what_is_right(
    session: onnxruntime.InferenceSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(pixels: np.ndarray) -> tuple[int, object]:
        return labelled(int(session.run(["label"], {"pixels": pixels})[0][0]))

    with answering(answer) as url:
        assert demo.run(ServerAddress(url), connections=4, json_output=True) == 0
    outcome = json.loads(capsys.readouterr().out)
    labels = np.load(HERE / "held_out.npz")["labels"]
    given = session.run(["label"], {"pixels": np.load(HERE / "held_out.npz")["images"].astype(np.float32)})[0]
    assert outcome["accuracy"] == pytest.approx((given == labels).mean())
    assert (outcome["images"], outcome["connections"]) == (len(labels), 4)
    assert 0 < outcome["p50_ms"] <= outcome["p95_ms"] <= outcome["p99_ms"]
    assert outcome["rate"] > 0


def test_the_demo_fails_when_the_answers_are_poor(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(lambda pixels: labelled(3)) as url:
        assert demo.run(ServerAddress(url)) == 1
    shown = capsys.readouterr().out
    assert "accuracy" in shown
    assert "0.1" in shown


@pytest.mark.parametrize(
    ("status", "document", "said"),
    [(404, {"error": "no model"}, "404: no model"), (200, {"outputs": []}, "no label"), (500, ["?"], "no label")],
)
def test_the_demo_says_what_the_server_answered(status: int, document: object, said: str) -> None:
    with answering(lambda pixels: (status, document)) as url, pytest.raises(demo.DemoError, match=said):
        demo.run(ServerAddress(url), connections=1)


def test_the_demo_says_that_nobody_is_there() -> None:
    with answering(lambda pixels: labelled(0)) as url:
        pass
    with pytest.raises(demo.DemoError, match="a connection failed under load: Connect call failed"):
        demo.run(ServerAddress(url))


def test_the_demo_says_that_a_connection_was_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(1)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(demo.DemoError, match="closed a connection without a reply"):
            demo.run(ServerAddress(f"http://127.0.0.1:{listener.getsockname()[1]}"), connections=1)
        thread.join()
