"""Export a run as a draft folder for decoding, with a model card that says how it was made."""

from __future__ import annotations

import io
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import yaml

from longspec import hub
from longspec.atomic import check_folder, unfinished, write_whole
from longspec.data.shards import Source, merged, read_info
from longspec.errors import UserError
from longspec.models.draft_files import (
    PUBLISHED_FILE,
    DraftRecord,
    read_draft_config,
    read_draft_record,
    read_tensors,
)
from longspec.models.placement import pick_device, pick_dtype
from longspec.records import read_yaml
from longspec.train.checkpoints import newest_of, read_state, stage_runs
from longspec.train.report import read_metrics
from longspec.train.run_settings import CONFIG, RunSettings, read_settings

TRAINING = "training.yaml"
_PRIVATE = ("run", "resume", "saving", "logger", "stages")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja"),
)


@dataclass(frozen=True)
class Stage:
    """One stage of a draft's training: its settings and its results."""

    settings: RunSettings
    step: int
    tokens: int
    loss: float | None
    tau: float | None
    """Of a chain on held-out text."""
    sources: list[Source]


def export(run: Path, output: Path, dtype: str = "auto") -> Path:
    """Write the draft of a run's newest checkpoint to `output`: completely or not at all."""
    from safetensors.torch import save

    checkpoint = newest_of(run)
    check_folder(output)
    if output.exists() and any(output.iterdir()):
        raise UserError(f"{output} is not empty: give a new folder")
    stages = _stages(stage_runs(run)[-1])
    last = stages[-1].settings
    with unfinished(output) as building:
        building.mkdir()
        tensors = read_tensors(checkpoint / "draft")
        wanted = last["target"]["dtype"] if dtype == "auto" else dtype
        export_dtype = pick_dtype(wanted, pick_device("auto"))
        cast = {name: t.to(export_dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        write_whole(building / "model.safetensors", save(cast, {"format": "pt"}))
        pickled = io.BytesIO()
        torch.save(cast, pickled)
        write_whole(building / PUBLISHED_FILE, pickled.getvalue())
        shutil.copy(checkpoint / "draft" / "config.json", building)
        _copy_tokenizer(last["target"]["path"], building)
        training = yaml.safe_dump_all([asdict(stage) for stage in stages], sort_keys=False)
        write_whole(building / TRAINING, training.encode())
        record = read_draft_record(checkpoint / "draft")
        if record is None:
            raise UserError(f"{checkpoint / 'draft'} has no config.json of a draft")
        write_whole(building / "README.md", model_card(stages, record).encode())
    return output


def _stages(run: Path) -> list[Stage]:
    """The known stages that led to a run's draft, first to last."""
    runs: list[Path] = []
    before: list[Stage] = []
    following: Path | None = run
    while following is not None and (following / CONFIG).is_file() and following not in runs:
        runs.insert(0, following)
        start = read_settings(following)["draft"]["path"]
        following = None if start is None else Path(start)
        if following is not None and (following / TRAINING).is_file():
            before = read_yaml(following / TRAINING, Stage)  # an exported draft lists its own stages
            break
        if following is not None and following.is_dir():
            following = stage_runs(following)[-1] if stage_runs(following) else None
    return [*before, *map(_stage, runs)]


def _stage(run: Path) -> Stage:
    config = read_settings(run)
    sources = []
    for folder in config["data"]["train"]:
        try:
            sources += read_info(Path(folder)).sources
        except UserError:  # moved or removed since then
            sources.append(Source(f"{folder} (no longer there)", "unknown", 0, 0))
    checkpoint = newest_of(run)
    state, metrics = read_state(checkpoint), read_metrics(run / "metrics.jsonl")
    losses = [line["loss"] for line in metrics if "loss" in line]
    taus = [line["eval_tau"] for line in metrics if "eval_tau" in line]
    # A continued draft kept its own shape, whatever the settings say.
    shape = asdict(read_draft_config(checkpoint / "draft"))
    return Stage(
        settings=_public_settings(config, shape),
        step=state.step,
        tokens=state.tokens,
        loss=losses[-1] if losses else None,
        tau=taus[-1] if taus else None,
        sources=sources,
    )


def _public_settings(config: RunSettings, shape: dict[str, Any]) -> RunSettings:
    """The settings without this machine's folders, and with the draft's real shape."""
    kept: dict[str, Any] = {name: value for name, value in config.items() if name not in _PRIVATE}
    folders, start = config["data"]["train"], config["draft"]["path"]
    kept["data"] = config["data"] | {"train": [Path(folder).name for folder in folders]}
    kept["draft"] = {"path": start and Path(start).name, **shape}
    return cast("RunSettings", kept)


def _copy_tokenizer(target: str, folder: Path) -> None:
    source = hub.resolve(target).folder
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, folder)


def model_card(stages: list[Stage], draft: DraftRecord) -> str:
    target = stages[-1].settings["target"]["path"]
    chain = (draft.acceptance or {}).get("chain", [])
    lines = [
        f"# A GLIDE draft for {target}",
        "",
        f"One decoder layer that drafts for `{target}`. Use it with longspec:",
        "",
        "```",
        f'longspec generate --target {target} --draft THIS_FOLDER "Why is the sky blue?"',
        "```",
        "",
        "## Shape",
        "",
        *(f"- {name}: {value}" for name, value in draft.draft.items()),
        "",
        "## Training",
        "",
        "| stage | tokens per sequence | steps | tokens | learning rate | last loss | tau of a chain |",
        "|---|---|---|---|---|---|---|",
        *(_row(stage) for stage in stages),
        "",
    ]
    if chain:
        shares = ", ".join(f"{share:.3f}" for share in chain)
        lines += [f"Share of rounds with the token at depth 1, 2, ... accepted, held out: {shares}.", ""]
    lines += ["## Data", "", "| source | licence | documents | tokens |", "|---|---|---|---|"]
    # A dataset that several stages use counts once.
    for source in merged(dict.fromkeys(source for stage in stages for source in stage.sources)):
        documents, tokens = f"{source.num_documents:,}", f"{source.num_tokens:,}"
        lines.append(f"| {source.name} | {source.licence} | {documents} | {tokens} |")
    lines += ["", "The settings and the outcome of every stage are in `training.yaml`.", ""]
    return "\n".join(lines)


def _row(stage: Stage) -> str:
    settings = stage.settings["stage"]
    cells = (
        settings["name"],
        f"{settings['seq_length']:,}",
        f"{stage.step:,}",
        f"{stage.tokens:,}",
        f"{settings['lr']:g}",
        "" if stage.loss is None else f"{stage.loss:.3f}",
        "" if stage.tau is None else f"{stage.tau:.2f}",
    )
    return f"| {' | '.join(cells)} |"
