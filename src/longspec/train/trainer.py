"""The training loop: steps, checkpoints, evaluation, figures."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import set_seed

from longspec.atomic import clear_unfinished, write_whole
from longspec.data.collate import collate
from longspec.data.work import locked
from longspec.errors import UserError, check_same
from longspec.models.draft import GlideDraft
from longspec.models.draft_files import Fingerprint, save_draft
from longspec.models.placement import free_memory
from longspec.records import as_record
from longspec.train import checkpoints, evaluate
from longspec.train.build import Parts, build
from longspec.train.compiled import compile_layers
from longspec.train.engine import Processes, TrainingEngine, join, local_device, zero_stage
from longspec.train.layout import Layout, head_rows, lay_out
from longspec.train.losses import LossShares, one_chunk
from longspec.train.memory import fitting_micro_batch, must_recompute
from longspec.train.objective import Objective
from longspec.train.report import Logger, make_loggers, training_bar
from longspec.train.run_settings import CONFIG, read_settings
from longspec.train.samples import Order
from longspec.train.schema import StageSettings, TrainSettings

# Settings that may change when a run is resumed, because they do not change the weights.
_FREE = ("run", "resume", "evaluation", "saving", "logger", "stages")


@dataclass
class _Sums:
    """Figures since they were last reported."""

    loss: list[torch.Tensor] = field(default_factory=list)
    num_queries: float = 0.0
    probes: list[torch.Tensor] = field(default_factory=list)
    """[R, 3]: right, the target's own loss, lag."""
    num_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)


def learning_rate(stage: StageSettings, step: int, num_steps: int) -> float:
    """The learning rate of step 0, 1, ...: a linear rise, then a cosine down to `final_lr`."""
    rise = max(1, round(stage.warmup * num_steps))
    if step < rise:
        return stage.lr * (step + 1) / rise
    done = (step - rise) / max(1, num_steps - rise)
    return stage.lr * (stage.final_lr + (1 - stage.final_lr) * 0.5 * (1 + math.cos(math.pi * done)))


def train(config: DictConfig) -> Path:
    """Run one stage; returns the run's folder."""
    settings: TrainSettings = OmegaConf.to_object(config)  # type: ignore[assignment]
    device = local_device(settings.target.device)
    processes = join(device, settings.target.tp_size)
    zero = zero_stage(settings.deepspeed.config)
    _check_run(Path(settings.run), settings, config)
    parts = build(settings, device, zero == 3 or settings.target.tp_size > 1)
    set_seed(settings.seed)
    checkpoint = checkpoints.newest(Path(settings.run)) if settings.resume == "latest" else None
    before = 0 if checkpoint is None else checkpoints.read_state(checkpoint).micro_batch
    settings.stage = fit_into_memory(settings.stage, parts, processes, device, before)
    trainer = Trainer(settings, config, parts, processes, device)
    return trainer.run()


def fit_into_memory(
    stage: StageSettings, parts: Parts, processes: Processes, device: torch.device, before: int = 0
) -> StageSettings:
    """Divide the stage's batch into micro-batches that fit, unless the settings say how. If all levels of a
    micro-batch fit too, the draft keeps them."""
    target, draft = parts.pair.target, parts.pair.draft
    shapes = target.config, draft.config, target.dtype.itemsize
    # What is free here may not be free there: the processes must agree.
    free = processes.least(free_memory(device), device)
    if not stage.micro_batch:
        own, rest = divmod(stage.batch, processes.data_size)
        if rest:
            raise UserError(
                f"stage.batch {stage.batch} is not a multiple of the {processes.data_size} processes"
            )
        size = before or fitting_micro_batch(*shapes, stage.seq_length, own, free, device.type)
        stage = replace(stage, micro_batch=size, accumulation=own // size)
    draft.recompute_levels = must_recompute(*shapes, stage.micro_batch * stage.seq_length, free, device.type)
    return stage


def _check_run(run: Path, settings: TrainSettings, config: DictConfig) -> None:
    if settings.resume not in (None, "latest"):
        raise UserError(f"resume is {settings.resume!r}; the one choice is latest")
    checkpoints.check_place(run, (CONFIG,), settings.resume)
    if not (run / CONFIG).is_file():
        return
    if settings.resume is None:
        raise UserError(f"{run} already has a run: continue with resume=latest, or give another run=FOLDER")
    before: Any = read_settings(run)
    now: Any = OmegaConf.to_container(config, resolve=True)
    fixed = [name for name in now if name not in _FREE]
    check_same(run, {name: before.get(name) for name in fixed}, {name: now[name] for name in fixed})


class Trainer:
    """One stage of one run, in one of its processes."""

    def __init__(
        self,
        settings: TrainSettings,
        config: DictConfig,
        parts: Parts,
        processes: Processes,
        device: torch.device,
    ) -> None:
        self.settings, self.config, self.parts = settings, config, parts
        self.stage, self.processes, self.device = settings.stage, processes, device
        self.folder = Path(settings.run)
        target, draft = parts.pair.target, parts.pair.draft
        # Before the weights are sharded.
        self.fingerprint = Fingerprint.of(target)
        self.rows = head_rows(draft.vocab_ids, target.config.vocab_size)
        self.order = Order(len(parts.mixture) - settings.data.num_held_out, settings.seed)
        self.per_step = self.stage.micro_batch * self.stage.accumulation * processes.data_size
        self.num_steps = self.stage.num_steps or round(
            self.stage.epochs * self.order.num_sequences / self.per_step
        )
        if self.num_steps < 1:
            raise UserError(
                f"{self.order.num_sequences} sequences do not make one step of {self.per_step}: "
                "lower stage.batch (or stage.accumulation and stage.micro_batch), or set stage.num_steps"
            )
        self.engine = TrainingEngine(target, draft, settings.deepspeed.config, self.stage, processes, device)
        compiles = settings.compile and device.type == "cuda"
        chunk = compile_layers(target, draft) if compiles else one_chunk
        self.objective = Objective(
            target,
            draft,
            LossShares(self.stage.soft, self.stage.overlap),
            self.stage.lag_decay,
            self.engine.run_target,
            self.engine.draft,
            self.engine.gather,
            self.engine.whole,
            chunk,
        )
        self.acceptance: evaluate.Acceptance | None = None
        self.sums = _Sums()
        self.rate = 0.0
        self.started = time.perf_counter()
        self.seconds_before = 0.0
        """Of this stage, in earlier processes."""

    def run(self) -> Path:
        """Train and write the run's folder, which is locked so that no other process writes there."""
        with locked(self.folder) if self.processes.first else contextlib.nullcontext():
            self._run()
        return self.folder

    def _run(self) -> None:
        first = self._begin()
        texts = self._held_out()
        loggers = self._loggers(first)
        label = f"{self.settings.name} {self.stage.name}"
        with (
            training_bar(label, self.num_steps, first, self.processes.first) as update,
            ThreadPoolExecutor(1) as loader,
        ):
            if first == 0 and texts:
                self._evaluate(0, texts, loggers, update)
            self.sums.started = time.perf_counter()
            waiting = loader.submit(self._load, first) if first < self.num_steps else None
            for step in range(first, self.num_steps):
                assert waiting is not None
                waiting = self._step(step, waiting, loader)
                done = step + 1
                if self._stage_passed() >= 1:
                    self.num_steps = done
                over = self._time_passed(self.settings.saving.max_seconds) >= 1
                last = done == self.num_steps or over
                saves = last or done % self.settings.saving.save_steps == 0
                if saves or done % self.settings.saving.log_steps == 0:
                    self._log(done, loggers, update)
                every = self.settings.evaluation.every
                if texts and (last or (every and done % every == 0)):
                    self._evaluate(done, texts, loggers, update)
                if saves:
                    self._save(done)
                if last:
                    break
        for logger in loggers:
            logger.close()

    def _time_passed(self, limit: float) -> float:
        """The share of a limit that has passed, by the first process's clock; 0 if there is no limit."""
        if not limit:
            return 0.0
        passed = (time.perf_counter() - self.started) / limit if self.processes.first else 0.0
        # The sum is over processes with different samples; only one of the first process's group has a clock.
        shared = torch.tensor(passed * self.processes.tp_size, dtype=torch.float64)
        return float(self.engine.sum(shared))

    def _stage_passed(self) -> float:
        """The share of the stage's time that has passed, with that of the processes before this one."""
        limit = self.settings.saving.stage_seconds
        return self._time_passed(limit) + self.seconds_before / limit if limit else 0.0

    def _begin(self) -> int:
        """Make the folder, or load its newest checkpoint; returns the first step to do."""
        if self.processes.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            clear_unfinished(self.folder)
            checkpoints.sweep(self.folder, self.settings.saving.keep)
        checkpoint = checkpoints.newest(self.folder) if self.settings.resume == "latest" else None
        if self.processes.first and not (self.folder / CONFIG).is_file():
            resolved = OmegaConf.to_yaml(self.config, resolve=True)
            write_whole(self.folder / CONFIG, resolved.encode())
        self.engine.wait()
        if checkpoint is None:
            return 0
        state = checkpoints.read_state(checkpoint)
        if state.world_size != self.processes.world_size:
            raise UserError(
                f"the checkpoint {checkpoint} was written by {state.world_size} processes; resume with as "
                f"many, not {self.processes.world_size}"
            )
        with checkpoints.explained(checkpoint):
            self.engine.load(checkpoint)
        checkpoints.load_random_states(checkpoint / f"random-{self.processes.rank}.pt")
        if state.acceptance:
            self.acceptance = as_record(state.acceptance, evaluate.Acceptance, checkpoint)
        self.seconds_before = state.seconds
        if state.step == state.num_steps:  # its time was over before all steps were done
            self.num_steps = state.step
        return state.step

    def _load(self, step: int) -> list[list[Layout]]:
        """This process's micro-batches of a step, each laid out once for every lag, or for all lags that are
        learnt together."""
        stage, per_step = self.stage, self.per_step
        layouts = []
        for micro in range(stage.accumulation):
            begin = (
                step * per_step
                + (micro * self.processes.data_size + self.processes.data_rank) * stage.micro_batch
            )
            samples = range(begin, begin + stage.micro_batch)
            drawn = [self.parts.draws.lags_and_offset(self.settings.seed, sample) for sample in samples]
            sequences = [self.parts.mixture[self.order.index(sample)] for sample in samples]
            of_rows, offsets = zip(*drawn, strict=True)
            batch = collate(sequences, stage.collator, stage.mask_prompt)
            by_lag = list(zip(*of_rows, strict=True))
            groups = [by_lag] if self.parts.draws.all_lags else [[one] for one in by_lag]
            layouts.append(
                [lay_out(batch, lags, offsets, stage.num_sinks, self.rows, self.device) for lags in groups]
            )
        return layouts

    def _step(
        self, step: int, waiting: Future[list[list[Layout]]], loader: ThreadPoolExecutor
    ) -> Future[list[list[Layout]]] | None:
        """One optimizer step, during which the batches of the next step are loaded."""
        micro_batches = waiting.result()
        following = loader.submit(self._load, step + 1) if step + 1 < self.num_steps else None
        counts = [self._count(layout) for layouts in micro_batches for layout in layouts]
        num_queries = max(1.0, float(self.engine.sum(torch.tensor(float(sum(counts)), dtype=torch.float64))))
        # DeepSpeed averages over backward passes and processes; the loss is the mean over all queries.
        scale = len(counts) * self.processes.data_size / num_queries
        passed = self._stage_passed()
        progress = max(step, min(int(passed * self.num_steps), self.num_steps - 1))
        self.rate = learning_rate(self.stage, progress, self.num_steps)
        for layouts in micro_batches:
            read = self.objective.read(layouts[0])  # the target's pass does not depend on the lag
            self.sums.num_tokens += layouts[0].tokens.numel() * self.processes.data_size
            for layout in layouts:
                outcome = self.objective(layout, read)
                self.engine.backward(outcome.loss * scale)
                self.engine.step(self.rate)
                self.sums.loss.append(outcome.loss.detach())
                self.sums.probes.append(outcome.probes)
        self.sums.num_queries += num_queries
        return following

    def _count(self, layout: Layout) -> float:
        """The number of queries, each weighted as its loss is."""
        weights = self.objective.weights(len(layout.levels))
        return sum(weight * level.num_counted for weight, level in zip(weights, layout.levels, strict=True))

    def _log(self, step: int, loggers: list[Logger], update: Callable[..., None]) -> None:
        sums, self.sums = self.sums, _Sums()
        loss = float(self.engine.sum(torch.stack(sums.loss).double().sum())) / sums.num_queries
        probes = torch.cat(sums.probes).double()
        max_lag = self.parts.draws.max_lag
        table = torch.zeros(max_lag + 1, 3, dtype=torch.float64, device=probes.device)
        ones = torch.ones_like(probes[:, :1])
        table.index_add_(0, probes[:, 2].long(), torch.cat((probes[:, :2], ones), 1))
        table = self.engine.sum(table).cpu()
        seconds = time.perf_counter() - sums.started
        values = {
            "loss": loss,
            "target_loss": float(table[:, 1].sum() / table[:, 2].sum().clamp(min=1)),
            "acceptance": {
                f"lag_{lag}": float(table[lag, 0] / table[lag, 2])
                for lag in range(1, max_lag + 1)
                if table[lag, 2]
            },
            "lr": self.rate,
            "tokens": step * self.per_step * self.stage.seq_length,
            "tokens_per_second": sums.num_tokens / seconds,
            "seconds": seconds,
        }
        for logger in loggers:
            logger.log(step, values)
        update(step, values)

    def _evaluate(
        self,
        step: int,
        texts: list[evaluate.Continuation],
        loggers: list[Logger],
        update: Callable[..., None],
    ) -> None:
        begun = time.perf_counter()
        found = evaluate.chain_acceptance(self.objective, texts, self.settings.evaluation.gamma)
        self.acceptance = found
        values = {"eval_tau": found.tau, "eval_acceptance": found.chain}
        for logger in loggers:
            logger.log(step, values)
        update(step, values)
        # The steps since the last line count for its speed, the evaluation does not.
        self.sums.started += time.perf_counter() - begun

    def _held_out(self) -> list[evaluate.Continuation]:
        """The target's continuations of the held-out prompts; written once per run."""
        if not self.settings.evaluation.every:
            return []
        path = self.folder / "held_out.json"
        if path.is_file():
            return evaluate.load_continuations(path, self.parts.pair.target.config.vocab_size)
        mixture, wanted = self.parts.mixture, self.settings.evaluation
        held_out = [mixture[index] for index in range(self.order.num_sequences, len(mixture))]
        prompts = evaluate.prompts_of(held_out, wanted.prompt_tokens)
        target = self.parts.pair.target
        with self.engine.gather([target.embedding, target.head.weight]):
            texts = evaluate.continuations(target, prompts, wanted.new_tokens, self.parts.pair.eos_ids)
        self.engine.wait()
        if self.processes.first:
            evaluate.save_continuations(path, texts)
        return texts

    def _loggers(self, first: int) -> list[Logger]:
        if not self.processes.first:
            return []
        config: Any = OmegaConf.to_container(self.config, resolve=True)
        return make_loggers(self.folder, self.settings.logger, config, first)

    def _save(self, step: int) -> None:
        """Write a checkpoint, of which nothing is left if that fails; all processes take part."""
        try:
            self._write_checkpoint(step)
        except BaseException:
            if self.processes.first:
                checkpoints.sweep(self.folder, self.settings.saving.keep)
            raise

    def _write_checkpoint(self, step: int) -> None:
        building = checkpoints.building_folder(self.folder, step)
        if self.processes.first:
            building.mkdir(parents=True)
        self.engine.wait()
        self.engine.save(building)
        checkpoints.save_random_states(building / f"random-{self.processes.rank}.pt")
        weights = self.engine.weights()
        if self.processes.first:
            found = self.acceptance
            draft = GlideDraft(self.parts.pair.target.config, self.parts.pair.draft.config)
            buffers = {name: buffer.cpu() for name, buffer in self.parts.pair.draft.named_buffers()}
            draft.load_state_dict(weights | buffers)
            table = None if found is None else {"chain": found.chain}
            save_draft(draft, building / "draft", self.fingerprint, self.settings.target.path, table)
        self.engine.wait()
        if self.processes.first:
            passed = self.seconds_before + time.perf_counter() - self.started
            state = {
                "world_size": self.processes.world_size,
                "num_steps": self.num_steps,
                "micro_batch": self.stage.micro_batch,
                "seconds": passed if self.settings.saving.stage_seconds else 0.0,
                "tokens": step * self.per_step * self.stage.seq_length,
                "acceptance": None if self.acceptance is None else asdict(self.acceptance),
            }
            checkpoints.finish(self.folder, step, state, self.settings.saving.keep)
        self.engine.wait()
