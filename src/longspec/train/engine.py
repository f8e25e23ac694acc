"""DeepSpeed, and all that this package asks of it. No other file imports it."""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspec.errors import UserError
from longspec.models.draft import GlideDraft
from longspec.models.target import Transformer
from longspec.train.parallel import check_tp, split_target

_TAG = "engine"
# Muon's updates are orthogonal matrices: so many times Adam's rate moves them about as far.
_MUON_LR, _MOMENTUM = 30.0, 0.95


@dataclass(frozen=True)
class Optimisation:
    """How the draft's weights are moved."""

    micro_batch: int
    accumulation: int
    weight_decay: float
    betas: tuple[float, float]
    clip: float
    muon: bool = False
    """Whether matrices are moved by Muon, and Adam is left the rest."""


@dataclass(frozen=True)
class Processes:
    """Those that train together, and which one this is."""

    rank: int
    world_size: int
    tp_size: int

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and speaks."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """How many of them see different samples."""
        return self.world_size // self.tp_size

    @property
    def data_rank(self) -> int:
        """Whose samples this one takes."""
        return self.rank // self.tp_size


def join(device: torch.device, tp_size: int = 1) -> Processes:
    """Meet the other processes that a launcher started; alone where none did."""
    if not dist.is_initialized():
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        if "RANK" not in os.environ:
            os.environ.update(alone, MASTER_PORT=str(_free_port()))
        # It would look for a GPU, and say that it found none.
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        deepspeed = _deepspeed()
        backend = "nccl" if device.type == "cuda" else "gloo"
        deepspeed.init_distributed(dist_backend=backend, verbose=False, auto_mpi_discovery=False)
        if backend == "gloo":
            atexit.register(_leave)
    return Processes(dist.get_rank(), dist.get_world_size(), tp_size)


def _leave() -> None:
    """Have gloo's threads end: one that still runs when the process does aborts it, after all is done."""
    if dist.is_initialized():
        dist.destroy_process_group()


def local_device(name: str) -> torch.device:
    """The device of this process among those of its machine."""
    from longspec.models.placement import pick_device

    device = pick_device(name)
    if device.type != "cuda":
        return device
    index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise UserError(
            f"process {index} of this machine has no GPU: torch sees {torch.cuda.device_count()}; start fewer"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


class TrainingEngine:
    """The draft's optimizer over all processes, and the target as they share it."""

    def __init__(
        self,
        target: Transformer,
        draft: GlideDraft,
        settings: dict[str, Any],
        optimisation: Optimisation,
        processes: Processes,
        device: torch.device,
    ) -> None:
        self.processes, self.device = processes, device
        self._module, self._target = draft, target
        zero = settings.get("zero_optimization", {}).get("stage", 0)
        check_tp(target.config, processes.tp_size, processes.world_size, zero)
        deepspeed = _deepspeed()
        if optimisation.muon and device.type == "cpu":
            # DeepSpeed has Muon compiled, for which a CPU needs a C++ compiler that may not be there.
            torch.compiler.set_stance("force_eager")
        # Its optimizers print what they do to standard output, which belongs to the program's results.
        with contextlib.redirect_stdout(io.StringIO()):
            self.draft, self._optimizer, _, _ = deepspeed.initialize(
                model=draft,
                model_parameters=[weight for weight in draft.parameters() if weight.requires_grad],
                config=_config(settings, optimisation, draft, device),
            )
        self.run_target: Callable[..., Tensor] = target
        self.whole: Callable[[Tensor], Tensor] = lambda heads: heads
        self._partitioned = zero == 3
        if self._partitioned:
            # Without an optimizer this only spreads the frozen weights and gathers each layer as it runs.
            self.run_target = deepspeed.initialize(model=target, config=_inference_config(settings, draft))[0]
        elif processes.tp_size > 1:
            self.whole = split_target(target, processes.tp_size, device)

    @property
    def is_sharded(self) -> bool:
        """Whether this process holds but a part of the target's layers."""
        return self._partitioned or self.processes.tp_size > 1

    @contextlib.contextmanager
    def gather(self, weights: list[Tensor]) -> Iterator[None]:
        """Make frozen weights whole that ZeRO-3 spread, while the context lasts."""
        if not self._partitioned:
            yield
            return
        unique = list({id(weight): weight for weight in weights}.values())
        with _deepspeed().zero.GatheredParameters(unique):
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch. DeepSpeed averages over those of a step and processes."""
        self.draft.backward(loss)

    def step(self, lr: float) -> None:
        """Count a micro-batch; after the last one of a step the weights move."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr * _MUON_LR if group.get("use_muon") else lr
        self.draft.step()

    def sum(self, values: Tensor) -> Tensor:
        """Added up over the processes that see different samples, without counting any twice."""
        if self.processes.world_size > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
            values = values / self.processes.tp_size
        return values

    def weights(self) -> dict[str, Tensor]:
        """The draft's weights in full precision, on the CPU; every process must ask."""
        from deepspeed.utils import safe_get_full_fp32_param

        found = {}
        for name, parameter in self._module.named_parameters():
            full = safe_get_full_fp32_param(parameter)
            found[name] = (parameter if full is None else full).detach().float().cpu().clone()
        return found

    def save(self, folder: Path) -> None:
        """Write what `load` needs; every process its part."""
        self.draft.save_checkpoint(str(folder), tag=_TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        path, _ = self.draft.load_checkpoint(str(folder), tag=_TAG)
        if path is None:
            raise UserError(f"the checkpoint {folder} has no state of this optimizer")

    def wait(self) -> None:
        """Until every process is here."""
        if self.processes.world_size > 1:
            dist.barrier()


def _config(
    settings: dict[str, Any], optimisation: Optimisation, draft: GlideDraft, device: torch.device
) -> dict[str, Any]:
    """The user's DeepSpeed settings with what the trainer knows filled in."""
    offload = "offload_optimizer" in settings.get("zero_optimization", {})
    adam = {
        "lr": 0.0,  # set at every step
        "betas": list(optimisation.betas),
        "weight_decay": optimisation.weight_decay,
    }
    # Off the GPU, DeepSpeed's own Adam would be compiled first; offloaded, it is worth it.
    adam |= {"torch_adam": True} if not (offload and device.type == "cuda") else {}
    optimizer = {"type": "AdamW", "params": adam}
    if optimisation.muon:
        optimizer = {"type": "Muon", "params": adam | {"momentum": _MOMENTUM, "ns_method": "standard"}}
    ours = {
        "train_micro_batch_size_per_gpu": optimisation.micro_batch,
        "gradient_accumulation_steps": optimisation.accumulation,
        # What Muon makes of the gradients has a size of its own, and would be clipped to nothing.
        "gradient_clipping": 0.0 if optimisation.muon else optimisation.clip,
        "optimizer": optimizer,
        "bf16": {"enabled": next(draft.parameters()).dtype == torch.bfloat16},
        "wall_clock_breakdown": False,
    }
    if ours["bf16"]["enabled"]:  # type: ignore[index]
        ours["data_types"] = {"grad_accum_dtype": "fp32"}
    if offload and device.type != "cuda":
        ours["zero_force_ds_cpu_optimizer"] = False
    return ours | settings


def _inference_config(settings: dict[str, Any], draft: GlideDraft) -> dict[str, Any]:
    zero = {
        name: value for name, value in settings["zero_optimization"].items() if name != "offload_optimizer"
    }
    half = next(draft.parameters()).dtype == torch.bfloat16
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "bf16": {"enabled": half}}


def _deepspeed() -> Any:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It reports on itself through warnings of other libraries that no user can act on.
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.", category=FutureWarning)
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(f"training needs DeepSpeed: pip install 'longspec[train]' ({error})") from error
    # Its shared-memory transport for CPUs would be compiled for over a minute; gloo does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
