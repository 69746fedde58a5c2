"""Metrics: what several processes count adds up, whatever way they end."""

import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from millstream.services.allowed_hosts import AllowedHosts
from millstream.services.metrics import catalogue, files
from millstream.services.metrics.catalogue import CATALOGUE, Kind
from millstream.services.metrics.files import ReadCache
from millstream.services.metrics.page import MetricsPage, serve
from millstream.services.metrics.record import (
    CHUNK_BYTES,
    HEADER_BYTES,
    MAGIC,
    Key,
    Totals,
    records,
    values_offset,
    write_record,
)
from millstream.services.metrics.registry import MetricsRegistry
from tests.kit import tools

ROOT = Path(__file__).parents[2]

# Counts one request and one observation for each line on stdin, and answers each with a line.
COUNTER = """
import sys
from pathlib import Path
from millstream.services.metrics import catalogue as c
from millstream.services.metrics.registry import MetricsRegistry
tally = MetricsRegistry(Path(sys.argv[1]), "gateway")
requests = tally.counter(c.REQUESTS, "digits", "1", "v2", "ok")
seconds = tally.histogram(c.REQUEST_DURATION, "digits", "1", "cpu", "v2")
tally.gauge(c.REQUESTS_IN_FLIGHT).set(3)
tally.gauge(c.INSTANCES_READY, "digits", "1", "cpu").set(2)
for line in sys.stdin:
    requests.add()
    seconds.observe(0.003)
    print("counted", flush=True)
"""

# Makes, counts and removes series as fast as it can, until it is killed.
BUSY = """
import sys
from pathlib import Path
from millstream.services.metrics import catalogue as c
from millstream.services.metrics.registry import MetricsRegistry
tally = MetricsRegistry(Path(sys.argv[1]), "worker")
mark = tally.counter(c.REDIS_RECONNECTS, "worker")
for i in range(10**9):
    tally.counter(c.REQUESTS, f"m{i % 3000}", "1", "v2", "ok").add()
    mark.add()
    tally.gauge(c.LANE_ROWS, "x" * (i % 120), "1", "cpu").set(i)
    tally.remove(c.LANE_ROWS, "x" * (i % 120), "1", "cpu")
    if i == 1000:
        print("busy", flush=True)
"""

# Starts, counts once and ends, n times over: each a process as far as the folder can see.
SHORT = """
import sys
from pathlib import Path
from millstream.services.metrics import catalogue as c
from millstream.services.metrics.registry import MetricsRegistry
for _ in range(int(sys.argv[2])):
    tally = MetricsRegistry(Path(sys.argv[1]), "worker")
    tally.counter(c.REDIS_RECONNECTS, "worker").add()
    tally.close()
"""


@contextmanager
def process(code: str, *arguments: object):
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def count(child, times):
    for _ in range(times):
        child.stdin.write("one\n")
        child.stdin.flush()
        assert child.stdout.readline() == "counted\n"


def kill(child):
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


def merged(directory):
    """What a process that has read nothing before reads."""
    totals = Totals()
    for part in files.read(directory, ReadCache()).values():
        totals.merge(part.series, alive=part.alive)
    return totals


def values(tally):
    """Text exposition -> {sample name with sorted labels: value}."""
    body, _ = MetricsPage(tally).render(None)
    return {
        sample.name + "".join(f",{name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
    }


def value_files(directory):
    return sorted(path.name for path in directory.iterdir() if path.suffix == files.VALUES_SUFFIX)


def test_series_are_counted_in_own_memory():
    tally = MetricsRegistry(None, "gateway")
    requests = tally.counter(catalogue.REQUESTS, "digits", "1", "v2", "ok")
    requests.add()
    requests.add(2.5)
    assert tally.counter(catalogue.REQUESTS, "digits", "1", "v2", "ok") is requests
    depth = tally.gauge(catalogue.LANE_ROWS, "digits", "1", "cpu")
    depth.set(7)
    depth.add(-2)
    shown = values(tally)
    assert shown["millstream_requests_total,model=digits,outcome=ok,protocol=v2,version=1"] == 3.5
    assert shown["millstream_lane_rows,model=digits,pool=cpu,version=1"] == 5
    assert shown["process_resident_memory_bytes"] > 1_000_000


def test_histogram_bounds_are_inclusive_and_cumulative():
    tally = MetricsRegistry(None, "worker")
    rows = tally.histogram(catalogue.BATCH_ROWS, "digits", "1", "cpu")
    rows.observe(1)
    rows.observe(2, 3)
    rows.observe(3)
    rows.observe(1024)
    rows.observe(5000)
    shown = values(tally)
    at = "millstream_batch_rows_bucket,le={},model=digits,pool=cpu,version=1".format
    assert [shown[at(le)] for le in ("1.0", "2.0", "4.0", "512.0", "1024.0", "+Inf")] == [1, 4, 5, 5, 6, 7]
    assert shown["millstream_batch_rows_sum,model=digits,pool=cpu,version=1"] == 1 + 6 + 3 + 1024 + 5000
    assert shown["millstream_batch_rows_count,model=digits,pool=cpu,version=1"] == 7


def test_many_series_grow_past_one_chunk(tmp_path):
    tally = MetricsRegistry(tmp_path, "gateway", models_max=3000)
    first = tally.counter(catalogue.REQUESTS, "m0", "1", "v2", "ok")
    for number in range(3000):
        tally.counter(catalogue.REQUESTS, f"m{number}", "1", "v2", "ok").add(number)
    first.add(0.5)
    assert tally.path.stat().st_size > 2 * CHUNK_BYTES
    shown = values(tally)
    assert shown["millstream_requests_total,model=m0,outcome=ok,protocol=v2,version=1"] == 0.5
    assert all(
        shown[f"millstream_requests_total,model=m{number},outcome=ok,protocol=v2,version=1"] == number
        for number in range(1, 3000)
    )


def test_series_beyond_the_bound_are_counted_as_other():
    tally = MetricsRegistry(None, "gateway", series_max=4)
    for number in range(10):
        tally.counter(catalogue.REQUESTS, f"m{number}", "1", "v2", "ok").add()
    shown = values(tally)
    requests = {name: value for name, value in shown.items() if name.startswith("millstream_requests_total")}
    assert requests["millstream_requests_total,model=other,outcome=other,protocol=other,version=other"] == 7
    assert len(requests) == 4
    assert sum(requests.values()) == 10
    assert shown["millstream_metrics_series_refused_total"] == 7


def test_removed_gauge_is_gone_and_its_place_is_used_again(tmp_path):
    tally = MetricsRegistry(tmp_path, "gateway")
    size = tally.path.stat().st_size
    for number in range(5000):
        old = tally.gauge(catalogue.LANE_ROWS, f"m{number}", "1", "cpu")
        old.set(number)
        tally.remove(catalogue.LANE_ROWS, f"m{number}", "1", "cpu")
    tally.gauge(catalogue.LANE_ROWS, "mnew", "1", "cpu").set(1)
    old.set(99)  # a gauge that is gone must not write over the one that has its place
    tally.remove(catalogue.LANE_ROWS, "never", "1", "cpu")
    lanes = {name: value for name, value in values(tally).items() if name.startswith("millstream_lane_rows")}
    assert lanes == {"millstream_lane_rows,model=mnew,pool=cpu,version=1": 1}
    assert tally.path.stat().st_size == size


def test_an_unlabelled_gauge_is_removed_too():
    tally = MetricsRegistry(None, "gateway")
    tally.gauge(catalogue.REQUESTS_IN_FLIGHT).set(2)
    tally.remove(catalogue.REQUESTS_IN_FLIGHT)
    assert "millstream_requests_in_flight" not in values(tally)


def test_counters_are_not_removed():
    tally = MetricsRegistry(None, "gateway")
    tally.counter(catalogue.REQUESTS_REFUSED, "lane_full").add()
    tally.remove(catalogue.REQUESTS_REFUSED, "lane_full")
    assert values(tally)["millstream_requests_refused_total,reason=lane_full"] == 1


def test_wrong_number_of_labels_is_refused():
    with pytest.raises(ValueError, match="millstream_requests_total has the labels"):
        MetricsRegistry(None, "gateway").counter(catalogue.REQUESTS, "digits")


def test_processes_add_up_and_outlive_kill(tmp_path):
    mine = MetricsRegistry(tmp_path, "gateway")
    with process(COUNTER, tmp_path) as first, process(COUNTER, tmp_path) as second:
        count(first, 5)
        count(second, 7)
        shown = values(mine)
        requests = "millstream_requests_total,model=digits,outcome=ok,protocol=v2,version=1"
        ready = "millstream_instances_ready,model=digits,pool=cpu,version=1"
        observed = "millstream_request_duration_seconds_count,model=digits,pool=cpu,protocol=v2,version=1"
        assert shown[requests] == shown[observed] == 12
        assert shown["millstream_requests_in_flight"] == 6  # each has its own
        assert shown[ready] == 2  # both see the same

        kill(first)
        shown = values(mine)
        assert shown[requests] == shown[observed] == 12
        assert shown["millstream_requests_in_flight"] == 3
        assert len(value_files(tmp_path)) == 2

        kill(second)
        shown = values(mine)
        assert shown[requests] == shown[observed] == 12
        assert shown[
            "millstream_request_duration_seconds_sum,model=digits,pool=cpu,protocol=v2,version=1"
        ] == pytest.approx(12 * 0.003)
        assert "millstream_requests_in_flight" not in shown
        assert ready not in shown
        assert value_files(tmp_path) == [mine.path.name]


def test_frozen_process_is_alive_and_holds_up_nobody(tmp_path):
    mine = MetricsRegistry(tmp_path, "gateway")
    with process(COUNTER, tmp_path) as child:
        count(child, 1)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert values(mine)["millstream_requests_in_flight"] == 3
        assert len(value_files(tmp_path)) == 2


def test_close_retires_counts_and_drops_gauges(tmp_path):
    ended, mine = MetricsRegistry(tmp_path, "worker"), MetricsRegistry(tmp_path, "gateway")
    ended.counter(catalogue.BATCHES_RECLAIMED, "cpu").add(4)
    ended.gauge(catalogue.WORKER_INFO, "w1", "cpu", "cpu").set(1)
    assert "millstream_worker_info,device=cpu,pool=cpu,worker=w1" in values(mine)
    ended.close()
    ended.close()
    shown = values(mine)
    assert shown["millstream_batches_reclaimed_total,pool=cpu"] == 4
    assert "millstream_worker_info,device=cpu,pool=cpu,worker=w1" not in shown


@pytest.mark.parametrize("attempt", range(5))
def test_killed_while_it_makes_and_removes_series(tmp_path, attempt):
    mine = MetricsRegistry(tmp_path, "gateway")
    with process(BUSY, tmp_path) as child:
        assert child.stdout.readline() == "busy\n"
        for _ in range(attempt):
            values(mine)
        kill(child)
    shown = values(mine)
    total = sum(value for name, value in shown.items() if name.startswith("millstream_requests_total"))
    assert total - shown["millstream_redis_reconnects_total,process=worker"] in {0, 1}
    assert total > 1000
    assert not [name for name in shown if name.startswith("millstream_lane_rows")]


def test_a_live_file_that_changes_is_read_whole(tmp_path):
    mine = MetricsRegistry(tmp_path, "gateway")
    with process(BUSY, tmp_path) as child:
        assert child.stdout.readline() == "busy\n"
        for _ in range(50):
            lanes = [
                (key.labels[0], value)
                for key, (value, *_) in mine.totals().items()
                if key.name == "millstream_lane_rows"
            ]
            # The gauge is set to i under a name of i % 120 characters: any mixture of two series would show. A reading
            # is no snapshot: a series that moves while it is read may show at both its places.
            assert all(value == 0 or len(label) == value % 120 for label, value in lanes)


@pytest.mark.parametrize("cut", [0, 5, 20, 64, 70, 100, 130])
def test_torn_file_counts_what_is_whole(tmp_path, cut):
    mine, torn = MetricsRegistry(tmp_path, "gateway"), MetricsRegistry(tmp_path, "worker")
    torn.counter(catalogue.REQUESTS_REFUSED, "lane_full").add(3)
    torn.close()
    torn.path.write_bytes(torn.path.read_bytes()[:cut])
    assert "millstream_requests_refused_total,reason=lane_full" not in values(mine)
    assert value_files(tmp_path) == [mine.path.name]


def test_torn_record_is_stepped_over(tmp_path):
    mine, torn = MetricsRegistry(tmp_path, "gateway"), MetricsRegistry(tmp_path, "worker")
    for reason in ("first", "second", "third"):
        torn.counter(catalogue.REQUESTS_REFUSED, reason).add(3)
    torn.close()
    torn.path.write_bytes(torn.path.read_bytes().replace(b'"second"', b'"se\x00\x00nd"'))
    refused = {name: value for name, value in values(mine).items() if name.startswith("millstream_requests_refused")}
    assert refused == {
        "millstream_requests_refused_total,reason=first": 3,
        "millstream_requests_refused_total,reason=third": 3,
    }


def test_torn_retired_file_starts_again(tmp_path):
    ended, mine = MetricsRegistry(tmp_path, "worker"), MetricsRegistry(tmp_path, "gateway")
    ended.counter(catalogue.BATCHES_RECLAIMED, "cpu").add(4)
    ended.close()
    assert values(mine)["millstream_batches_reclaimed_total,pool=cpu"] == 4
    retired = tmp_path / "retired"
    retired.write_bytes(retired.read_bytes()[:-3])
    mine = MetricsRegistry(tmp_path, "gateway")  # a power cut tore it: no process has read it before
    assert "millstream_batches_reclaimed_total,pool=cpu" not in values(mine)
    later = MetricsRegistry(tmp_path, "worker")
    later.counter(catalogue.BATCHES_RECLAIMED, "cpu").add(2)
    later.close()
    assert values(mine)["millstream_batches_reclaimed_total,pool=cpu"] == 2


def test_killed_between_taking_in_and_removing(tmp_path):
    """The retired file is in place and the dead one's still there: it counts once."""
    ended, mine = MetricsRegistry(tmp_path, "worker"), MetricsRegistry(tmp_path, "gateway")
    ended.counter(catalogue.BATCHES_RECLAIMED, "cpu").add(4)
    ended.close()
    kept = ended.path.read_bytes()
    files.retire(tmp_path)
    assert not ended.path.exists()
    ended.path.write_bytes(kept)
    assert merged(tmp_path) == mine.totals()
    assert values(mine)["millstream_batches_reclaimed_total,pool=cpu"] == 4
    assert value_files(tmp_path) == [mine.path.name]
    ended.close()


def test_retired_while_it_is_read(tmp_path, monkeypatch):
    """A file goes between the look at what is retired and the look at the files: it counts all the same, once."""
    ended, _mine = MetricsRegistry(tmp_path, "worker"), MetricsRegistry(tmp_path, "gateway")
    ended.counter(catalogue.BATCHES_RECLAIMED, "cpu").add(4)
    ended.close()
    token = files._token
    looks = []

    def look_then_retire(directory):
        looks.append(token(directory))
        files.retire(directory)
        return looks[-1]

    monkeypatch.setattr(files, "_token", look_then_retire)
    totals = merged(tmp_path)
    assert [values for key, values in totals.items() if key.name == "millstream_batches_reclaimed_total"] == [[4]]
    assert looks[0] == "" != looks[1] == looks[-1]


@pytest.mark.parametrize("split", range(8, 128, 8))
def test_place_goes_to_another_series_while_it_is_read(split):
    """Whatever part was read before the change: the old series, the new one or neither, never a mixture."""
    series = [Key(Kind.GAUGE_SUM, "millstream_lane_rows", (model, "1", "cpu"), 1) for model in ("old", "new")]
    chunk = bytearray(MAGIC.ljust(HEADER_BYTES, b"\0") + bytes(1024))
    contents = []
    for number, key in enumerate(series):
        write_record(memoryview(chunk), HEADER_BYTES, key.encode(), 1)
        begin = values_offset(HEADER_BYTES)
        memoryview(chunk)[begin : begin + 8].cast("d")[0] = number + 1.0
        contents.append(bytes(chunk))
    at = HEADER_BYTES + split
    read = list(records(memoryview(contents[0][:at] + contents[1][at:])))
    assert read in ([], [(series[0], (1.0,))], [(series[1], (2.0,))])
    assert list(records(memoryview(contents[1]))) == [(series[1], (2.0,))]


def test_names_of_files_that_were_never_claimed_are_cleaned_away(tmp_path):
    mine = MetricsRegistry(tmp_path, "gateway")
    (tmp_path / f"worker-1-abc{files.NEW_SUFFIX}").write_bytes(b"")
    values(mine)
    assert [path for path in tmp_path.iterdir() if path.suffix == files.NEW_SUFFIX] == []


def test_retiring_races_lose_and_double_nothing(tmp_path):
    """Short lives in several processes while several threads read and retire: every read is between what had ended
    when it began and what has begun, and never goes back."""
    mine = MetricsRegistry(tmp_path, "gateway")
    lives, children = 60, 4
    over = threading.Event()
    seen: list[list[float]] = [[], []]

    def scrape(into):
        while not over.is_set():
            into.append(
                sum(v[0] for key, v in mine.totals().items() if key.name == "millstream_redis_reconnects_total")
            )

    threads = [threading.Thread(target=scrape, args=(into,)) for into in seen]
    started = [
        subprocess.Popen([sys.executable, "-c", SHORT, str(tmp_path), str(lives)], cwd=ROOT) for _ in range(children)
    ]
    for thread in threads:
        thread.start()
    try:
        assert [child.wait() for child in started] == [0] * children
    finally:
        over.set()
        for thread in threads:
            thread.join()
    for reads in seen:
        assert reads
        assert reads == sorted(reads)
    assert values(mine)["millstream_redis_reconnects_total,process=worker"] == lives * children
    assert value_files(tmp_path) == [mine.path.name]


def exercised(directory=None):
    """A tally with every metric of the catalogue."""
    tally = MetricsRegistry(directory, "gateway")
    for metric in CATALOGUE:
        labels = [f'quote " backslash \\ {label}' for label in metric.labels]
        if metric.kind is Kind.COUNTER:
            tally.counter(metric, *labels).add(2)
        elif metric.kind is Kind.HISTOGRAM:
            tally.histogram(metric, *labels).observe(0.02)
        else:
            tally.gauge(metric, *labels).set(1)
    return tally


def test_catalogue_is_sound():
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert metric.name.startswith("millstream_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)


@pytest.mark.needs("promtool")
@pytest.mark.parametrize("alone", [True, False])
def test_promtool_is_content(tmp_path, alone):
    body, content_type = MetricsPage(exercised(None if alone else tmp_path)).render("text/plain")
    assert content_type.startswith("text/plain; version=0.0.4")
    done = subprocess.run([tools.program("promtool"), "check", "metrics"], input=body, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    shown = {family.name for family in parse_text(body.decode())}
    assert {metric.name.removesuffix("_total") for metric in CATALOGUE} <= shown


def test_openmetrics_by_accept_header():
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    body, content_type = MetricsPage(exercised()).render(accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    families = {family.name: family for family in parse_openmetrics(body.decode())}
    assert families["millstream_requests"].type == "counter"
    assert families["millstream_request_duration_seconds"].type == "histogram"


def test_worker_answers_scrapes_itself():
    tally = exercised()
    server, thread = serve(0, tally, AllowedHosts(), "127.0.0.1")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as reply:
            body = reply.read().decode()
        strange = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(strange)
        assert refused.value.code == 403
        assert b"MILLSTREAM_ALLOWED_HOSTS" in refused.value.read()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert "millstream_worker_busy_seconds_total" in body
