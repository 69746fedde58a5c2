"""The worker pools of an installation as the setting `pools` describes them. Pure.

"gpu=1,device=cuda:0,threads=4,memory=16GiB,backend=onnxruntime,cpu=2" ─> parse_pools ─> PoolSpec of each pool
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import NamedTuple

from millstream.services.errors import Failure, invalid
from millstream.services.extras import backends
from millstream.services.model.names import check_name
from millstream.services.nearest_names import did_you_mean
from millstream.services.process.machine_share import parse_memory, parse_size

WORKERS_MAX = 1024
FIXED = -1  # the controller does not change the number of workers
THREADS_MAX = 1024
#: A pool whose name resembles an option's this much is refused: `threds=4` would start four more workers.
OPTION_RATIO = 0.8
_DEVICE = re.compile(r"(cpu|cuda|tensorrt)(:\d{1,3})?")
_OTHERS = frozenset({"gateway", "controller"})  # processes whose log files are named likewise
_DEVICES = {"gpu": "cuda", "tensorrt": "tensorrt"}  # of pools with these names; others are on the CPU


class PoolSpec(NamedTuple):
    """The workers of one pool. Options that are "" or 0 were not given.

    Args:
        workers: number of worker processes; the largest, if the controller decides.
        device: "cpu", "cuda[:N]" or "tensorrt[:N]".
        threads: of each worker; 0: an equal share of the CPUs.
        memory: of each worker, as a size.
        backend: inference library of its workers.
        device_memory: of the device, for each worker, as a size.
        workers_min: the smallest number of worker processes; FIXED: it is not changed.
    """

    workers: int
    device: str = "cpu"
    threads: int = 0
    memory: str = ""
    backend: str = ""
    device_memory: str = ""
    workers_min: int = FIXED

    @property
    def elastic(self) -> bool:
        """Whether the controller decides how many workers there are."""
        return self.workers_min != FIXED

    @property
    def least(self) -> int:
        """The smallest number of workers."""
        return self.workers_min if self.elastic else self.workers

    @property
    def initial(self) -> int:
        """Workers at the start: one also of a pool that may have none, so that models are checked and loaded."""
        return max(1, self.least)

    @property
    def size(self) -> str:
        """The number of workers as the setting names it."""
        return f"{self.workers_min}:{self.workers}" if self.elastic else str(self.workers)


#: Share of the memory of a device that its workers may use together; the rest is for the driver and the libraries.
DEVICE_SHARE = 0.9
DEVICE_BYTES_MIN = 64 << 20  # of a worker; CUDA's context alone takes more
OPTIONS = ("device", "threads", "memory", "backend", "device_memory")


def parse_pools(text: str) -> dict[str, PoolSpec]:
    """Parse pools as NAME=WORKERS or NAME=MIN:MAX, each followed by options as OPTION=VALUE, all separated by commas.

    Raises Failure(INVALID) with one line.
    """
    pools: dict[str, PoolSpec] = {}
    last = ""  # the pool to which the next option belongs
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key in OPTIONS:
            if not last:
                raise invalid(f"--pool {part}: an option follows its pool, like gpu=1,{key}={value or '…'}")
            pools[last] = _with_option(last, pools[last], key, value)
            continue
        low, high = _new_pool(part, key, value if equals else "", pools)
        last = key
        pools[last] = PoolSpec(high, device_of(last), workers_min=low if ":" in value else FIXED)
    if not pools:
        raise invalid("--pool: at least one pool is needed, like cpu=1")
    return pools


def device_of(pool: str) -> str:
    """Return the device of a pool that names none."""
    return _DEVICES.get(pool, "cpu")


def worker_counts(text: str) -> dict[str, int]:
    """Return the number of workers by pool, the largest where the controller decides. Raises Failure(INVALID)."""
    return {pool: spec.workers for pool, spec in parse_pools(text).items()}


def check_device_memory(pools: str) -> None:
    """Raise Failure(INVALID), one line, if a pool's limit of device memory is too small, or its device has none."""
    for name, spec in parse_pools(pools).items():
        if not spec.device_memory:
            continue
        where = f"--pool {name}={spec.size},device_memory={spec.device_memory}"
        if 0 < parse_size(spec.device_memory) < DEVICE_BYTES_MIN:
            raise invalid(f"{where}: too small for one worker, which needs {DEVICE_BYTES_MIN >> 20}MiB")
        if _device_number(spec.device) is None:
            hint = f"memory={spec.device_memory} limits its workers"
            raise invalid(f"{where}: the pool runs on the CPU, which has no memory of its own; {hint}")


def device_budget(pools: str, pool: str, device: str, total_bytes: int) -> int:
    """Return the memory of its device that a worker of `pool` may use; 0: no limit. Raises Failure(INVALID).

    Args:
        pools: the setting `pools`.
        pool: the pool of the worker.
        device: its device.
        total_bytes: the memory of that device; 0: it is a CPU, or unknown.
    """
    specs = parse_pools(pools)
    if pool in specs and specs[pool].device_memory:
        return parse_size(specs[pool].device_memory)
    number = _device_number(device)
    sharing = sum(spec.workers for spec in specs.values() if _device_number(spec.device) == number)
    return int(DEVICE_SHARE * total_bytes) // max(1, sharing)


def _device_number(device: str) -> int | None:
    """Return the number of a GPU; None for a CPU. A pool on CUDA and one on TensorRT share the GPU."""
    kind, _, number = device.partition(":")
    return None if kind == "cpu" else int(number or 0)


def memory_of_pools(pools: str, memory: str | None) -> str | None:
    """Return the setting `worker_memory` with the memory that pools name. Raises Failure(INVALID)."""
    named = [f"{pool}={spec.memory}" for pool, spec in parse_pools(pools).items() if spec.memory]
    if not named:
        return memory
    both = ",".join([*([memory] if memory else []), *named])
    parse_memory(both)  # raises for a pool whose memory is given twice
    return both


def _new_pool(part: str, name: str, number: str, pools: dict[str, PoolSpec]) -> tuple[int, int]:
    """Return the least and the largest number of workers of a pool that is valid. Raises Failure(INVALID)."""
    low, colon, high = number.partition(":")
    try:
        workers_min, workers = int(low), int(high if colon else low)
        check_name(name, "pool name")
    except (ValueError, Failure):
        workers_min = workers = 0
    if not 1 <= workers <= WORKERS_MAX:
        hint = did_you_mean(name, OPTIONS) if number and not number.isdecimal() else ""
        raise invalid(f"--pool {part}: write NAME=WORKERS with 1 to {WORKERS_MAX} workers, like cpu=2{hint}")
    if not 0 <= workers_min <= workers:
        raise invalid(f"--pool {part}: write NAME=MIN:MAX with MIN of 0 to MAX, like cpu=1:4")
    if name in _OTHERS:
        raise invalid(f"--pool {part}: a pool cannot be named {name}: its log files would be those of the {name}s")
    if option := get_close_matches(name, OPTIONS, 1, OPTION_RATIO):
        raise invalid(f"--pool {part}: did you mean the option {option[0]}={number}? No pool may be named so like one")
    if name in pools:
        raise invalid(f"--pool {part}: the pool {name} is named twice")
    return workers_min, workers


def _with_option(pool: str, spec: PoolSpec, option: str, value: str) -> PoolSpec:
    """Return a pool with one more option. Raises Failure(INVALID)."""
    where = f"--pool {pool}={spec.size},{option}={value}"
    given = getattr(spec, option)
    if given and not (option == "device" and given == device_of(pool)):
        raise invalid(f"{where}: {option} is given twice")
    if option == "device" and not _DEVICE.fullmatch(value):
        raise invalid(f"{where}: devices are cpu, cuda[:N] and tensorrt[:N]")
    if option == "backend":
        _check_backend(where, value)
    if option == "threads":
        if not value.isdecimal() or not 1 <= int(value) <= THREADS_MAX:
            raise invalid(f"{where}: threads are 1 to {THREADS_MAX}")
        return spec._replace(threads=int(value))
    if option in {"memory", "device_memory"}:
        try:
            parse_memory(f"{pool}={value}") if option == "memory" else parse_size(value)
        except Failure as failure:
            raise invalid(f"{where}: {failure.message.partition(': ')[2]}") from None
    return PoolSpec(**(spec._asdict() | {option: value}))


def _check_backend(where: str, name: str) -> None:
    known = sorted(backend.name for backend in backends().values() if backend.pools)
    if name not in known:
        raise invalid(f"{where}: backends are {', '.join(known)}{did_you_mean(name, known)}")
