"""Who makes the inputs: atheris, guided by what they reach in the code, and Hypothesis where there is no atheris.

One process for each target: `python -m tests.fuzz.engines ENGINE TARGET SECONDS FOLDER`; new inputs go to FOLDER.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

INPUT_BYTES_MAX = 4096
SECONDS_MAX = 10  # for one input: more is a hang
MEMORY_MIB_MAX = 2048


def engine_here() -> str:
    """The name of the better engine that can be used."""
    return "atheris" if importlib.util.find_spec("atheris") else "hypothesis"


def run_atheris(target: str, seconds: int, folder: Path) -> None:
    """Does not return: libFuzzer ends the process, with a status other than 0 for a finding."""
    import atheris

    # only what answers requests: the rest of what is imported does nothing while it runs
    with atheris.instrument_imports(include=["millstream.gateway", "millstream.services"]):
        from tests.fuzz.targets import CORPUS, TARGETS

    words = folder / "words"
    words.write_text("".join(f'"{word}"\n' for word in WORDS))
    options = (
        f"-max_total_time={seconds}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-timeout={SECONDS_MAX}",
        f"-rss_limit_mb={MEMORY_MIB_MAX}",
        f"-artifact_prefix={folder}/finding-",
        f"-dict={words}",
        "-print_final_stats=1",
        "-verbosity=1",
    )
    (folder / "inputs").mkdir(exist_ok=True)
    atheris.Setup([sys.argv[0], *options, str(folder / "inputs"), str(CORPUS / target)], TARGETS[target])
    atheris.Fuzz()


def run_hypothesis(target: str, seconds: int, folder: Path) -> None:
    """Pieces of the corpus and of the dictionary, put together anew. Raises what the target raises."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    from tests.fuzz.targets import TARGETS, seeds

    corpus = [path.read_bytes() for path in seeds(target)]
    place = st.integers(0, 200)
    piece = st.one_of(
        st.builds(lambda whole, at, size: whole[at : at + size], st.sampled_from(corpus), place, st.integers(0, 2000)),
        st.sampled_from([word.encode() for word in WORDS]),
        st.binary(max_size=8),
    )
    until = time.monotonic() + seconds
    tried = 0

    @settings(
        max_examples=200,
        deadline=SECONDS_MAX * 1000,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(piece, max_size=12).map(b"".join))
    def attempt(data: bytes) -> None:
        nonlocal tried
        tried += 1
        (folder / "finding-last").write_bytes(data)
        TARGETS[target](data)

    while time.monotonic() < until:
        attempt()
    (folder / "finding-last").unlink()
    print(f"stat::number_of_executed_units: {tried}", file=sys.stderr)


#: what a parser looks for and mutation is slow to find; all of it printable, as libFuzzer's dictionaries want it
WORDS = (
    *("inputs", "outputs", "name", "shape", "datatype", "data", "parameters", "id", "binary_data_size", "binary_data"),
    *("binary_data_output", "classification", "shared_memory_region", "sequence_id", "timeout", "priority", "triton_"),
    *("FP32", "FP16", "FP64", "BF16", "INT64", "UINT8", "BOOL", "BYTES", "NaN", "Infinity", "true", "false", "null"),
    *("[[", "]]", "{}", "1e400", "-0.0", "18446744073709551616", "gzip", "deflate", "identity", "POST ", "GET "),
    *("/v2/models/m/infer", "/versions/1", " HTTP/1.1", "Content-Length: ", "Transfer-Encoding: chunked", "Upgrade: "),
    *("Connection: close", "Connection: Upgrade", "Expect: 100-continue", "Content-Encoding: ", "Accept-Encoding: "),
    *("Inference-Header-Content-Length: ",),
)

if __name__ == "__main__":
    chosen, named, limit, where = sys.argv[1:]
    {"atheris": run_atheris, "hypothesis": run_hypothesis}[chosen](named, int(limit), Path(where))
