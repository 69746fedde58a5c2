"""The `millstream` command with real processes: each command, its JSON, its errors, and a clean shutdown."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from millstream.services.environment import child_environment
from tests.kit import models
from tests.kit.command_line import DIGITS, ROOT, WAIT_S, Millstream, end, until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Millstream, subprocess.Popen[str]]]:
    one = Millstream(tmp_path_factory.mktemp("cli") / "home")
    with one.up() as process:
        until(process, "ready http://127.0.0.1:")
        yield one, process
        assert end(process) == 0


@pytest.fixture(scope="module")
def millstream(running: tuple[Millstream, subprocess.Popen[str]]) -> Millstream:
    return running[0]


@pytest.mark.needs("curl")
def test_up_prints_its_processes_and_a_working_curl_command(tmp_path):
    millstream = Millstream(tmp_path / "home")
    with millstream.up("--pool", "cpu=1,threads=1", "--gateways", "2") as process:
        url, said = until(process, "ready ")
        text = "\n".join(said)
        assert "2 processes" in text
        assert "cpu: 1 worker with 1 thread" in text
        assert "digits version 1, answers in" in text
        curl = next(line[line.index("curl") :] for line in said if "curl" in line)
        assert url in curl
        answer = subprocess.run(curl, shell=True, cwd=ROOT, capture_output=True, check=True, timeout=WAIT_S)
        assert json.loads(answer.stdout)["outputs"][0]["data"] == [2]

        refused = millstream.fails("up", "--http-port", "0")
        assert str(process.pid) in refused
        assert url in refused
        assert end(process, signal.SIGTERM) == 0
    left = [path.name for path in (millstream.home / "run").rglob("*") if not path.is_dir()]
    assert left == ["lock", "token"]
    assert "is `millstream up` running?" in millstream.fails("models", "--endpoint", url)


def test_preloaded_models_are_pushed_once(tmp_path):
    millstream = Millstream(tmp_path / "home")
    said = []
    for _ in range(2):
        with millstream.up("--preload", f"mine={DIGITS / 'digits.onnx'}", "--no-example", "--json") as process:
            _, before = until(process, '{"event": "ready"')
            said.append([event for event in map(json.loads, before) if event["event"] == "model"])
            names = [model["name"] for model in millstream.json("models")]
            assert end(process) == 0
        assert names == ["mine"]
    assert said == [
        [{"event": "model", "name": "mine", "version": 1, "pushed": True}],
        [{"event": "model", "name": "mine", "version": 1, "pushed": False}],
    ]


def test_the_admin_api_needs_the_key(tmp_path):
    millstream = Millstream(tmp_path / "home", key="a-secret")
    with millstream.up() as process:
        until(process, "ready ")
        assert millstream.json("models")[0]["name"] == "digits"
        assert "digits" in Millstream(millstream.home).ok("models"), "the home's token needs no key"
        url = (millstream.home / "run/url").read_text().strip()
        stranger = Millstream(tmp_path / "elsewhere")
        assert "MILLSTREAM_ADMIN_KEY" in stranger.fails("models", "--endpoint", url)
        assert "MILLSTREAM_ADMIN_KEY" in stranger.fails("models", "--endpoint", url, "--key", "wrong")
        assert "digits" in stranger.ok("models", "--endpoint", url, "--key", "a-secret")
        assert "digits" in stranger.ok("--endpoint", url, "--key", "a-secret", "models")
        assert "version 1" in stranger.ok("predict", "digits", "--endpoint", url, "--input", DIGITS / "request.json")
        assert end(process) == 0


def test_push_describe_predict_and_rm(millstream):
    assert "1/1" in millstream.ok("models")
    pushed = millstream.ok("push", "mine", DIGITS / "digits.onnx")
    assert "mine version 1  ready" in pushed
    assert "pixels FP32 [-1, 64]" in pushed
    copied, curl = [shlex.split(line) for line in pushed.splitlines()[-2:]]
    assert copied == ["millstream", "predict", "mine", "--example"]
    assert curl[:2] == ["curl", "-s"]
    assert "mine version 1" in millstream.ok(*copied[1:])
    assert "mine version 1" in millstream.ok("predict", "mine", stdin=curl[curl.index("-d") + 1])
    second = millstream.json("push", "mine", DIGITS / "digits.onnx", "--config", '{"rows_max": 8}', "--version", 7)
    assert (second["version"], second["state"], second["rows_max"]) == (7, "ready", 8)
    third = millstream.json("push", "mine", DIGITS / "digits.onnx", "--config", '{"rows_max": 9}', "--no-activate")
    assert (third["version"], third["active"], third["existing"]) == (8, False, False)
    same = millstream.ok("push", "mine", DIGITS / "digits.onnx", "--no-activate")
    assert same.startswith("version 1 is this file already\nmine version 1  ready")
    again = millstream.json("push", "mine", DIGITS / "digits.onnx", "--config", '{"rows_max": 8}', "--version", 7)
    assert (again["version"], again["active"], again["existing"]) == (7, True, True)

    described = millstream.ok("describe", "mine")
    assert "version 7 is serving" in described
    assert "rows: 1 in " in described
    assert "up to 8 rows per run, proven" in described
    assert millstream.json("describe", "mine")["serving"] == 7

    assert "mine version 7" in millstream.ok("predict", "mine", "-i", DIGITS / "request.json")
    assert "mine version 1" in millstream.ok("predict", "mine", "-i", DIGITS / "request.json", "--version", 1)

    assert "already exists" in millstream.fails("push", "mine", DIGITS / "digits.onnx", "--version", 7)
    assert "--yes" in millstream.fails("rm", "mine", "--version", 1, code=2)
    assert millstream.ok("rm", "mine", "--version", 1, "--yes") == "deleted mine version 1\n"
    assert [version["version"] for version in millstream.json("describe", "mine")["versions"]] == [7, 8]
    assert millstream.json("rm", "mine", "--yes") == {"deleted": {"model": "mine", "version": None}}
    assert "unknown model" in millstream.fails("describe", "mine")


def test_activate_and_rm_force(millstream):
    for version in (1, 2):
        millstream.ok("push", "both", DIGITS / "digits.onnx", "--version", version)
    assert millstream.json("describe", "both")["serving"] == 2
    assert millstream.ok("activate", "both", 1) == "both version 1 is serving\n"
    assert millstream.json("activate", "both", 2)["serving"] == 2
    assert millstream.ok("activate", "both", 2, "--no-wait").startswith("both version 2 ")
    assert "version 7" in millstream.fails("activate", "both", 7)
    said = millstream.fails("rm", "both", "--version", 2, "--yes")
    assert "activate another version first, or delete it with ?force=true (here: --force)" in said
    assert millstream.ok("rm", "both", "--version", 2, "--force") == "deleted both version 2\n"
    assert "both version 1" in millstream.ok("predict", "both", "--example")
    assert "delete the model, or its only version with ?force=true (here: --force)" in millstream.fails(
        "rm", "both", "--version", 1, "--yes"
    )
    assert millstream.ok("rm", "both", "--version", 1, "-f") == "deleted both version 1\n"
    assert "both" not in {model["name"] for model in millstream.json("models")}


def test_rm_asks_on_a_terminal(millstream):
    millstream.ok("push", "asked", DIGITS / "digits.onnx")
    for answer, code in (("n", 1), ("y", 0)):
        ended, said = millstream.in_terminal(["rm", "asked"], 80, keys=f"{answer}\n")
        assert "Delete asked with all its versions? [y/N]" in said
        assert ended == code
    assert "asked" not in millstream.ok("models")


def test_push_waits_or_not(millstream):
    pushed = millstream.ok("push", "later", DIGITS / "digits.onnx", "--no-wait")
    assert "later version 1" in pushed
    other = ["push", "later", DIGITS / "digits.onnx", "--no-activate", "--config"]
    refused = millstream.fails(*other, '{"pools": ["cup"]}', code=1)
    assert "there is no pool 'cup'; the pool is cpu" in " ".join(refused.split())
    millstream.ok("rm", "later", "--force")


def test_predict_with_an_example(millstream, tmp_path):
    said = millstream.ok("predict", "digits", "--example")
    curl = said.splitlines()[0]
    assert curl.startswith("curl -s http://127.0.0.1:")
    assert "probabilities  FP32 [1, 10]" in said
    both = millstream.json("predict", "digits", "--example")
    assert both["request"]["inputs"][0]["shape"] == [1, 64]
    sent = tmp_path / "request.json"
    sent.write_text(json.dumps(both["request"]))
    assert json.loads(millstream.ok("predict", "digits", "-i", sent, "--json")) == both["reply"]
    assert shlex.split(curl)[-1] == json.dumps(both["request"])
    assert "exclude each other" in millstream.fails("predict", "digits", "--example", "-i", sent, code=2)
    assert "exclude each other" in millstream.fails("predict", "digits", "--example", "-i", "-", code=2)
    assert "is not found" in millstream.fails("predict", "nope", "--example")


def test_bash_completes_commands_and_options(millstream):
    folder = Path(sys.executable).parent
    script = """
        eval "$(_MILLSTREAM_COMPLETE=source_bash millstream)"
        complete_words() { COMP_WORDS=(millstream "$@"); COMP_CWORD=$#; _millstream_completion millstream; }
        complete_words desc; echo "${COMPREPLY[*]}"
        complete_words push x --no-act; echo "${COMPREPLY[*]}"
    """
    environment = millstream.environment()
    environment["PATH"] = f"{folder}:{environment['PATH']}"
    command = ["bash", "-c", script]

    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert (done.stdout.splitlines(), done.stderr) == (["describe", "--no-activate"], "")


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        (lambda path: models.identities(path, ("FP32", "INT64", "BOOL", "BYTES", "UINT8", "FP64")), "curl -s"),
        (lambda path: models.identities(path, ("FP16", "INT8")), "POST http"),
        (lambda path: models.identity(path, "FP32", ("N", 5000)), "POST http"),
        (models.variable_length, "curl -s"),
    ],
    ids=["all-json", "half", "wide", "variable"],
)
def test_examples_for_models_of_many_kinds(millstream, tmp_path, request, model, shown):
    name = request.node.callspec.id
    millstream.ok("push", name, model(tmp_path / "model.onnx"))
    said = millstream.ok("predict", name, "--example", "--output", tmp_path / "out.npz")
    assert said.startswith(shown)
    assert f"\n{name} version 1\n" in said
    document = millstream.json("predict", name, "--example")
    assert document["reply"]["model_name"] == name
    assert (document["request"] is None) == (shown == "POST http")
    with np.load(tmp_path / "out.npz") as saved:
        assert sorted(saved.files) == sorted(output["name"] for output in document["reply"]["outputs"])
    millstream.ok("rm", name, "--force")


def test_logs_are_shown_filtered_and_followed(millstream):
    everything = millstream.ok("logs", "-n", 10_000).splitlines()
    processes = {line.split()[0] for line in everything}
    assert {"cpu-0", "gateway-0", "redis"} <= processes
    assert {line.split()[0] for line in millstream.ok("logs", "worker").splitlines()} == {"cpu-0"}
    assert {line.split()[0] for line in millstream.ok("logs", "gateway").splitlines()} == {"gateway-0"}
    assert len(millstream.ok("logs", "redis", "-n", 1).splitlines()) == 1
    lines = [json.loads(line) for line in millstream.ok("logs", "cpu", "--json").splitlines()]
    assert {line["process"] for line in lines} == {"cpu-0"}
    assert any("digits" in line["text"] for line in lines)
    assert "no process 'gatway' has a log in " in (said := millstream.fails("logs", "gatway"))
    assert said.endswith("; did you mean 'gateway' or 'gateway-0'?")

    command = [sys.executable, "-m", "millstream.services.cli", "logs", "-f", "-n", "1", "worker"]
    with subprocess.Popen(
        command, cwd=ROOT, env=millstream.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("cpu-0 ")
            millstream.ok("push", "followed", DIGITS / "digits.onnx", "--version", 77)
            for line in process.stdout:
                if "followed" in line and "77" in line:
                    break
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert (process.returncode, stderr) == (130, "")
    millstream.ok("rm", "followed", "--force")


def test_tables_in_terminals_of_all_widths(millstream):
    name = "a-name-of-more-than-forty-characters-is-long-but-allowed"
    millstream.ok("push", name, DIGITS / "digits.onnx")
    code, narrow = millstream.in_terminal(["models"], 40)
    assert code == 0
    assert f"{name}\n  version   1\n  state     ready\n  role      serving\n  size      " in narrow
    _, wide = millstream.in_terminal(["models"], 160)
    assert wide.splitlines()[0].split() == ["MODEL", "VERSION", "STATE", "ROLE", "SIZE", "POOLS", "WORKERS", "UPLOADED"]
    assert f"\n{name}         1   ready   serving   " in wide
    _, said = millstream.in_terminal(["describe", "digits"], 40)
    assert "\n  outputs   label INT64 [-1],\n            probabilities FP32 [-1, 10]\n" in said
    assert max(map(len, said.splitlines()[:-1])) <= 40
    assert "\x1b" not in narrow + wide + said
    millstream.ok("rm", name, "--yes")


def test_describe_shows_how_batching_was_decided(millstream, tmp_path):
    mixing = models.row_mixing(tmp_path / "mixing.onnx")
    assert "batching  off: " in millstream.ok("push", "mixing", mixing)
    described = millstream.ok("describe", "mixing")
    assert "off: the fixed batch of 1 stays, as it is not proven that rows are independent: ReduceSum" in described
    version = millstream.json("describe", "mixing")["versions"][0]
    assert (version["batching"], version["batching_decided"]) == (False, "off")
    assert "ReduceSum" in version["batching_reason"]
    unasked = millstream.json("push", "mixing", DIGITS / "digits.onnx", "--config", '{"batching": false}')
    assert (unasked["batching_decided"], unasked["batching_reason"]) == ("off", "the configuration says so")
    millstream.ok("rm", "mixing", "--yes")


def test_load_and_unload(millstream):
    millstream.ok("push", "idle", DIGITS / "digits.onnx")
    assert millstream.ok("unload", "idle") == "unloaded idle\n"
    assert "unloaded" in next(line for line in millstream.ok("models").splitlines() if line.startswith("idle"))
    assert "`millstream load idle` serves it again" in millstream.ok("describe", "idle")
    assert "'idle' is not found: it is unloaded" in millstream.fails("predict", "idle", "-i", DIGITS / "request.json")
    assert millstream.json("load", "idle", "--config", '{"max_batch_size": 8}')["loaded"] == "idle"
    assert millstream.json("describe", "idle")["versions"][0]["rows_max"] == 8
    assert "version 1" in millstream.ok("predict", "idle", "-i", DIGITS / "request.json")
    assert millstream.json("unload", "idle") == {"unloaded": "idle"}
    assert "loaded idle in" in millstream.ok("load", "idle")
    assert millstream.json("describe", "idle")["versions"][0]["rows_max"] == 64
    millstream.ok("rm", "idle", "--yes")


def test_predict_reads_and_writes_arrays(millstream, tmp_path):
    with np.load(DIGITS / "held_out.npz") as held_out:
        images, labels = held_out["images"][:50].astype(np.float32), held_out["labels"][:50]
    np.save(tmp_path / "images.npy", images)
    np.savez(tmp_path / "images.npz", pixels=images)
    for source in ("images.npy", "images.npz"):
        output = tmp_path / "out.npz"
        said = millstream.ok("predict", "digits", "--input", tmp_path / source, "--output", output)
        assert "probabilities  FP32 [50, 10]" in said
        with np.load(output) as outputs:
            assert outputs["probabilities"].shape == (50, 10)
            assert np.mean(outputs["label"] == labels) > 0.9
    one = json.dumps(images[0].tolist())
    reply = json.loads(millstream.ok("predict", "digits", "--json", stdin=one))
    assert reply["outputs"][0]["data"] == [int(labels[0])]
    assert f"[{labels[0]}]" in millstream.ok("predict", "digits", stdin=one)


def test_bench(millstream):
    outcome = millstream.json("bench", "digits", "--seconds", "0.5", "--connections", 4, "--rows", 2)
    assert outcome["requests"] > 0
    assert outcome["rate"] > 0
    assert 0 < outcome["p50_ms"] <= outcome["p95_ms"] <= outcome["p99_ms"]
    assert outcome["errors"] == {}
    batches = outcome["batch_rows"]
    # Readiness probes, of one row each, may be among them: a busy machine leaves the model idle now and then. A worker
    # counts a batch after it sent the replies: the last one of each connection may not be counted yet.
    assert round(batches["mean"] * batches["batches"], 6) >= (outcome["requests"] - 4) * 2
    assert abs(sum(batches["up_to"].values()) - batches["batches"]) <= 1, "the page may be read within an update"
    assert "requests/s" in millstream.ok("bench", "digits", "-s", "0.3", "-c", 2)


def test_restart(millstream):
    said = millstream.ok("restart", "gateways")
    assert "gateway-0" in said
    assert "restarted 1 process in" in said
    assert [one["process"] for one in millstream.json("restart")["replaced"]] == ["cpu-0", "gateway-0"]
    assert millstream.json("demo")["accuracy"] >= 0.97


def test_demo_and_version(millstream):
    assert millstream.json("demo")["accuracy"] >= 0.97
    assert millstream.ok("version").startswith("millstream ")
    assert set(millstream.json("version")) == {"version", "revision", "python", "system"}


def test_a_broken_model_is_rejected_and_leaves_no_trace(millstream, tmp_path):
    before = millstream.json("models")
    (tmp_path / "text.onnx").write_text("this is not a model")
    (tmp_path / "cut.onnx").write_bytes((DIGITS / "digits.onnx").read_bytes()[:1000])
    (tmp_path / "noise.onnx").write_bytes(b"\0noise" * 100)
    for name, says in (("text", "is text, not an ONNX"), ("cut", "was cut short"), ("noise", "not an ONNX model")):
        assert says in millstream.fails("push", "broken", tmp_path / f"{name}.onnx")
    assert [model["name"] for model in millstream.json("models")] == [model["name"] for model in before]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["describe", "nope"], "'nope' is not found"),
        (["predict", "nope", "-i", DIGITS / "request.json"], "'nope' is not found"),
        (["predict", "digits"], "neither JSON nor"),
        (["bench", "nope"], "'nope' is not found"),
        (["rm", "nope", "--yes"], "'nope'"),
        (["push", "x", DIGITS / "digits.onnx", "--config", '{"rows": 1}'], "rows"),
        (["push", "x", ROOT / "docs"], "there is no model in this folder: nothing in it is known as one"),
        (["demo", "--endpoint", "http://127.0.0.1:1"], "is `millstream up` running?"),
        (["load", "nope"], "failed to load 'nope', failed to poll from model repository"),
        (["load", "digits", "--config", '{"max_batch_size": -1}'], "max_batch_size -1 is negative"),
        (["load", "digits", "--config", '{"max_batch_size": 65537}'], "max_batch_size 65537 is more than 65536"),
        (["unload", "nope"], "'nope' is not found"),
        (["restart", "--home", "/nowhere"], "no server is running in /nowhere: start it with `millstream up`"),
    ],
)
def test_failures_are_one_line(millstream, arguments, says):
    assert says in millstream.fails(*arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["predict", "digits", "-i", "/nowhere.npy"], "No such file"),
        (["push", "a b", DIGITS / "digits.onnx"], "not allowed"),
        (["push", "a/b", DIGITS / "digits.onnx"], "use 1 to 128 letters, digits"),
        (["push", "x", "/nowhere.onnx"], "no such file"),
        (["push", "x", "/dev/null"], "neither a file nor a folder"),
        (["push", "x", DIGITS / "digits.onnx", "--config", "{"], "not JSON"),
        (["push", "x"], "missing argument 'FILE' (see `millstream push --help`)"),
        (["push", "x", "y", "--version", "0"], "'--version': it must be greater than or equal to 1"),
        (["nope"], "there is no command 'nope' (see `millstream --help`)"),
        (["modles"], "there is no command 'modles'; did you mean 'models'?"),
        (["desc"], "there is no command 'desc'; did you mean 'describe'"),
        (["x" * 100_000], "there is no command 'xxx"),
        (["push", "x", "y", "--verson", "3"], "there is no option --verson; did you mean '--version'"),
        (["models", "-x"], "there is no option -x (see `millstream models --help`)"),
        (["--lines", "3", "logs"], "there is no option --lines: put it after the command"),
        (["models", "--endpoint", "nope"], "http://127.0.0.1:8000, nor an endpoint of"),
        (["models", "--endpoint", "ftp://x"], "http://HOST:PORT"),
        (["up", "--preload", "x=/nowhere.onnx"], "there is no file"),
        (["up", "--preload", "x"], "NAME=PATH"),
        (["up", "--http-port", "x"], "--http-port"),
        (["up", "--http-port", "70000"], "--http-port"),
        (["up", "--pool", "cpu"], "NAME=WORKERS"),
        (["up", "--drain-s", "0"], "--drain-s: "),
        (["restart", "redis"], "'redis' is not one of 'all', 'gateways', 'workers'"),
        (["up", "--triton-repository", "/nowhere"], "--triton-repository /nowhere: the folder does not exist"),
        (["up", "--repository", "/nowhere"], "--triton-repository /nowhere: the folder does not exist"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(tmp_path, arguments, says):
    said = Millstream(tmp_path).run(*arguments)
    assert (said.returncode, said.stdout, said.stderr.count("\n")) == (2, "", 1), said
    assert says in said.stderr.removeprefix("error: ")


def test_a_server_that_is_not_millstream_is_reported(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with subprocess.Popen(
            [sys.executable, "-m", "millstream.services.cli", "models", "--endpoint", f"http://127.0.0.1:{port}"],
            cwd=ROOT,
            env=Millstream(tmp_path).environment(),
            stderr=subprocess.PIPE,
            text=True,
        ) as client:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
                _, said = client.communicate(timeout=WAIT_S)
    assert client.returncode == 1
    assert "not a Millstream server" in said


def test_the_error_names_an_invalid_variable():
    done = subprocess.run(
        [sys.executable, "-m", "millstream.services.cli", "models"],
        cwd=ROOT,
        env=child_environment({"MILLSTREAM_GATEWAYS": "many"}),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: MILLSTREAM_GATEWAYS: ")


@pytest.mark.parametrize(
    "command",
    [
        "up",
        "restart",
        "push",
        "models",
        "describe",
        "doctor",
        "predict",
        "load",
        "unload",
        "rm",
        "bench",
        "demo",
        "version",
    ],
)
def test_the_help_of_every_command_has_an_example(tmp_path, command):
    said = Millstream(tmp_path).ok(command, "--help")
    assert "Examples" in said
    assert f"millstream {command}" in said
    assert "--json" in said
