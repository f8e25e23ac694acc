"""Choose device and dtype and check the memory before anything is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from longspec.config import DraftConfig, ModelConfig
from longspec.errors import UserError, whole_number
from longspec.models.weights import Precision

# Memory for the interpreter, libraries, activations of a prefill chunk and the logits.
OVERHEAD = 700 * 2**20
LEAST_CONTEXT = 512
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str | torch.device) -> torch.device:
    """The torch device called `name`; "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:0")
    if device.type == "cpu":
        if device.index:
            raise UserError(f"there is no device {name!r}; a CPU has one name: cpu")
        return torch.device("cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"there is no device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def pick_devices(name: str | torch.device, num_ranks: int = 1) -> tuple[torch.device, ...]:
    """A device for each of so many ranks: those that a list such as "cuda:0,cuda:2" names, or as many GPUs
    as needed from the named one on, or the CPU for all of them."""
    if whole_number("tensor_parallel", num_ranks) < 1:
        raise UserError(f"tensor_parallel is {num_ranks}; it must be at least 1")
    names = name.split(",") if isinstance(name, str) else [name]
    found = [pick_device(one) for one in names]
    if len(found) == 1 and found[0].type == "cuda" and num_ranks > 1:
        first, there = found[0].index or 0, torch.cuda.device_count()
        if first + num_ranks > there:
            raise UserError(
                f"tensor_parallel {num_ranks} needs {num_ranks} GPUs from cuda:{first} on, but torch sees "
                f"{there}; lower tensor_parallel, or name the devices (--device cuda:0,cuda:1)"
            )
        found = [torch.device("cuda", index) for index in range(first, first + num_ranks)]
    found *= num_ranks if len(found) == 1 else 1
    if len(found) != num_ranks:
        raise UserError(f"device {name!r} names {len(found)} devices, but tensor_parallel is {num_ranks}")
    check_equal([device_name(one) for one in found] if num_ranks > 1 else [])
    return tuple(found)


def check_equal(names: Sequence[str]) -> None:
    """Refuse ranks on different devices: the slowest would hold up the others, and sums would differ."""
    for rank, one in enumerate(names):
        if one != names[0]:
            raise UserError(
                f"rank {rank} would run on {one} and rank 0 on {names[0]}; tensor_parallel needs equal "
                "devices: name some that are (--device cuda:0,cuda:1)"
            )


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels are launched on the current device: make it this one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")


def pick_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype called `name`; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    name = str(name).removeprefix("torch.")
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes that a target needs, and those that are free on the device."""

    weights: int
    kv_per_token: int
    free: int

    @property
    def context_that_fits(self) -> int:
        """How many tokens of context fit next to the weights; 0 if not even the weights fit."""
        return max(0, (self.free - self.weights - OVERHEAD) // self.kv_per_token)


def plan_memory(config: ModelConfig, precision: Precision, *devices: torch.device) -> MemoryPlan:
    """Compute what the target needs in `precision`, and read what is free on the device. With several
    devices, what each rank needs of its own."""
    num_ranks, device = len(devices), devices[0]
    if num_ranks > 1 and precision.rounding is not None:
        raise UserError(f"weights {precision.weights!r} do not go with tensor_parallel {num_ranks}; use auto")
    if num_ranks > 1 and config.quantisation is not None:
        raise UserError(f"a quantised checkpoint does not go with tensor_parallel {num_ranks}; use one rank")
    share = config.shared_by(num_ranks)
    per_token = share.kv_bytes_per_token(precision.kv_dtype.itemsize)
    return MemoryPlan(precision.weight_bytes(share, device), per_token, room_on(device, devices))


def room_on(device: torch.device, devices: Sequence[torch.device]) -> int:
    """The bytes that one of the ranks on a device may take."""
    return free_memory(device) // devices.count(device)


def draft_weights(config: ModelConfig, draft: DraftConfig, dtype: torch.dtype, num_ranks: int = 1) -> int:
    """The bytes of a draft's weights and of its copy of rows of the target's head, on each rank."""
    own = draft.shared_by(num_ranks).num_parameters(config.shared_by(num_ranks))
    return (own + -(-draft.draft_vocab // num_ranks) * config.hidden_size) * dtype.itemsize


def check_fits(name: str, config: ModelConfig, precision: Precision, *devices: torch.device) -> MemoryPlan:
    """Refuse a target that does not fit on a device, or in equal parts on several; say what would fit."""
    device, num_ranks = devices[0], len(devices)
    plan = plan_memory(config, precision, *devices)
    if plan.context_that_fits >= min(LEAST_CONTEXT, config.max_length):
        return plan
    half = replace(precision, dtype=torch.bfloat16, matrix_bytes=None)
    half_bytes = half.weight_bytes(config.shared_by(num_ranks), device)
    parts = f" in {num_ranks} parts" if num_ranks > 1 else ""
    hint = f"a smaller target, or a device with {gigabytes(plan.weights + OVERHEAD)} free"
    if precision.weights == "float32" and half_bytes < min(plan.weights, plan.free - OVERHEAD):
        hint = f"--dtype bfloat16 ({gigabytes(half_bytes)})"
    raise UserError(
        f"{name} does not fit on {device}{parts}: its weights take "
        f"{gigabytes(plan.weights)} in {precision.kept_as} and each "
        f"token of context {plan.kv_per_token / 1024:.0f} KiB, but {gigabytes(plan.free)} are free; "
        f"what would fit: {hint}"
    )


def gigabytes(num_bytes: float) -> str:
    if num_bytes < 1e5:
        return f"{num_bytes / 1e3:.1f} kB"
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def free_memory(device: torch.device) -> int:
    """The bytes that can still be allocated on the device."""
    if device.type == "cuda":
        # We can use what torch has reserved but not allocated.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = _meminfo("MemAvailable")
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and used is not None:
        free = min(free, limit - used + (_cgroup_inactive_files() or 0))
    return free


def total_memory(device: torch.device) -> int:
    """All bytes of the device, used or free; for a CPU at most the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limit = _cgroup("memory.max")
    return min(_meminfo("MemTotal"), limit) if limit is not None else _meminfo("MemTotal")


@contextlib.contextmanager
def memory_explained(asked: str, way_out: str) -> Iterator[None]:
    """Turn an allocator's error about memory into a `UserError` that says what the memory was for."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not out_of_memory(error):
            raise
        raise UserError(f"there is not enough memory for {asked}; {way_out}") from error


def out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The CPU's allocator, cuBLAS and mmap raise a RuntimeError or OSError; only the text tells the cause.
    signs = ("DefaultCPUAllocator", "ALLOC_FAILED", "Cannot allocate memory")
    return any(sign in str(error) for sign in signs)


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise AssertionError(f"/proc/meminfo has no {field}")


def _cgroup(name: str) -> int | None:
    """A number from the container's cgroup; None if there is none."""
    try:
        return int(Path("/sys/fs/cgroup", name).read_text())
    except (OSError, ValueError):
        return None


def _cgroup_inactive_files() -> int | None:
    """Bytes of cached files, which count as used but which the kernel frees when memory is needed."""
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), None)
