"""All that this package uses of DeepSpeed; no other file imports it."""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspec.errors import INSTALL_TRAINING, UserError, reason_of, shown
from longspec.models.draft import GlideDraft
from longspec.models.target import Transformer
from longspec.train.parallel import check_tp, split_target
from longspec.train.schema import StageSettings

_TAG = "engine"
# Muon's updates are orthogonal matrices; at 30 times Adam's rate they are about as large as Adam's.
_MUON_LR, _MOMENTUM = 30.0, 0.95


@dataclass(frozen=True)
class Processes:
    """The number of processes that train together, and which one this is."""

    rank: int
    world_size: int
    tp_size: int

    @property
    def first(self) -> bool:
        """Whether this process writes the files and the messages."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """How many of them see different samples."""
        return self.world_size // self.tp_size

    @property
    def data_rank(self) -> int:
        """Processes with the same data rank see the same samples."""
        return self.rank // self.tp_size

    def least(self, value: int, device: torch.device) -> int:
        """The least of the values that the processes have."""
        if self.world_size == 1:
            return value
        shared = torch.tensor(value, device=device)
        dist.all_reduce(shared, dist.ReduceOp.MIN)
        return int(shared)


def join(device: torch.device, tp_size: int = 1) -> Processes:
    """Join the processes that a launcher started; without a launcher this process is the only one."""
    if not dist.is_initialized():
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        if "RANK" not in os.environ:
            os.environ.update(alone, MASTER_PORT=str(_free_port()))
        # Otherwise DeepSpeed looks for a GPU and warns that it found none.
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        deepspeed = _deepspeed()
        backend = "nccl" if device.type == "cuda" else "gloo"
        deepspeed.init_distributed(dist_backend=backend, verbose=False, auto_mpi_discovery=False)
        if backend == "gloo":
            atexit.register(_leave)
    return Processes(dist.get_rank(), dist.get_world_size(), tp_size)


def _leave() -> None:
    """End gloo's threads, because a thread that still runs at exit aborts the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def local_device(name: str) -> torch.device:
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


def zero_stage(settings: dict[str, Any]) -> int:
    zero = settings.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, dict) else zero
    if stage not in (0, 1, 2, 3):
        raise UserError(
            f"deepspeed.config: zero_optimization is {shown(zero)}; a stage from 0 to 3 is needed in it"
        )
    return int(stage)


@contextlib.contextmanager
def _settings_explained() -> Iterator[None]:
    """Say whose settings they are that DeepSpeed cannot use."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, KeyError, AssertionError) as error:
        raise UserError(f"DeepSpeed refuses the settings in deepspeed.config: {reason_of(error)}") from error


class TrainingEngine:
    """The draft's optimizer over all processes, and the target as they share it."""

    def __init__(
        self,
        target: Transformer,
        draft: GlideDraft,
        settings: dict[str, Any],
        stage: StageSettings,
        processes: Processes,
        device: torch.device,
    ) -> None:
        self.processes, self.device = processes, device
        self._module, self._target = draft, target
        zero = zero_stage(settings)
        check_tp(target.config, processes.tp_size, processes.world_size, zero)
        deepspeed = _deepspeed()
        if stage.optimizer == "muon" and device.type == "cpu":
            # DeepSpeed compiles Muon, which on a CPU needs a C++ compiler that may be missing.
            torch.compiler.set_stance("force_eager")
        # DeepSpeed's optimizers print to standard output, which is for the program's results.
        with contextlib.redirect_stdout(io.StringIO()), _settings_explained():
            self.draft, self._optimizer, _, _ = deepspeed.initialize(
                model=draft,
                model_parameters=[weight for weight in draft.parameters() if weight.requires_grad],
                config=_config(settings, stage, draft, device),
            )
        self.run_target: Callable[..., Tensor] = target
        self.whole: Callable[[Tensor], Tensor] = lambda heads: heads
        self._partitioned = zero == 3
        if self._partitioned:
            # Without an optimizer this only shards the frozen weights and gathers each layer as it runs.
            self.run_target = deepspeed.initialize(model=target, config=_inference_config(settings, draft))[0]
        elif processes.tp_size > 1:
            self.whole = split_target(target, processes.tp_size, device)

    @contextlib.contextmanager
    def gather(self, weights: list[Tensor]) -> Iterator[None]:
        """Gather frozen weights that ZeRO-3 has sharded, for as long as the context lasts."""
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
        """The sum over the processes that see different samples."""
        if self.processes.world_size > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
            values = values / self.processes.tp_size
        return values

    def weights(self) -> dict[str, Tensor]:
        """The draft's weights in fp32 on the CPU; every process must call this."""
        from deepspeed.utils import safe_get_full_fp32_param

        found = {}
        for name, parameter in self._module.named_parameters():
            full = safe_get_full_fp32_param(parameter)
            found[name] = (parameter if full is None else full).detach().float().cpu().clone()
        return found

    def save(self, folder: Path) -> None:
        """Write what `load` needs; every process its part."""
        try:
            self.draft.save_checkpoint(str(folder), tag=_TAG, save_latest=False)
        except RuntimeError as error:
            if "inline_container" not in str(error):
                raise
            # torch's own writer, which does not say why; hardly anything but the disk can be the reason.
            free = shutil.disk_usage(folder).free
            raise UserError(
                f"cannot write {folder}: its disk has {free / 1e6:,.1f} MB left; make room and go on with "
                "resume=latest"
            ) from error

    def load(self, folder: Path) -> None:
        path, _ = self.draft.load_checkpoint(str(folder), tag=_TAG)
        if path is None:
            raise UserError(f"the checkpoint {folder} has no state of this optimizer")

    def wait(self) -> None:
        if self.processes.world_size > 1:
            dist.barrier()


def _config(
    settings: dict[str, Any], stage: StageSettings, draft: GlideDraft, device: torch.device
) -> dict[str, Any]:
    """The user's DeepSpeed settings with what the trainer knows filled in."""
    offload = "offload_optimizer" in settings.get("zero_optimization", {})
    adam = {
        "lr": 0.0,  # set at every step
        "betas": [stage.beta1, stage.beta2],
        "weight_decay": stage.weight_decay,
    }
    # DeepSpeed's own Adam is compiled first, which pays only where the optimizer is offloaded.
    adam |= {"torch_adam": True} if not (offload and device.type == "cuda") else {}
    optimizer = {"type": "AdamW", "params": adam}
    muon = stage.optimizer == "muon"
    if muon:
        optimizer = {"type": "Muon", "params": adam | {"momentum": _MOMENTUM, "ns_method": "standard"}}
    ours = {
        "train_micro_batch_size_per_gpu": stage.micro_batch,
        "gradient_accumulation_steps": stage.accumulation * stage.lags,
        # Muon normalises its updates itself; clipping would shrink them to nothing.
        "gradient_clipping": 0.0 if muon else stage.clip,
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
    # DeepSpeed causes warnings in other libraries that users can do nothing about.
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(f"training needs DeepSpeed: {INSTALL_TRAINING} ({error})") from error
    # DeepSpeed's shared-memory transport for CPUs takes over a minute to compile; gloo is enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
