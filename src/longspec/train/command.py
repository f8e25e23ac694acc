"""Train a draft for a target; settings are Hydra overrides.

longspec train 'data.train=[data/mine]' run=outputs/mine    SmolLM2, stage base, one process
longspec train experiment=smollm2_cpu_tiny stage=all        three stages in a row
longspec train experiment=smollm2_gpu stage=all --only long one of them, from the draft of the one before
longspec train target.path=./my-llama draft=glide_plus stage=base 'data.train=[data/mine]'
longspec train stage=long draft.path=outputs/mine 'data.train=[data/long]' run=outputs/mine-long
longspec train run=outputs/mine resume=latest ...           continue after a crash, with the same settings
longspec train --cfg job experiment=...                     print the settings and stop

The quotes keep a shell such as zsh from reading the brackets.
Several processes: torchrun --nproc-per-node 8 -m longspec.train ..., or the deepspeed launcher.
Groups: target, draft, stage (base, long, cot, all), data, deepspeed, logger, experiment.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspec.errors import INSTALL_TRAINING, UserError
from longspec.records import read_yaml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="NAME=VALUE", help="settings, as Hydra reads them")
    parser.add_argument(
        "--config-name",
        "-cn",
        default="train",
        metavar="NAME",
        help="a ready experiment, or train (the default)",
    )
    parser.add_argument(
        "--config-dir", "-cd", metavar="FOLDER", help="a folder with config groups of your own"
    )
    parser.add_argument("--only", metavar="STAGE", help="with stage=all: run only this stage")
    parser.add_argument("--cfg", choices=["job"], help="print the settings that would be used, and stop")
    # The deepspeed launcher passes it.
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("LOCAL_RANK", str(arguments.local_rank))
    overrides = list(arguments.overrides)
    if arguments.config_name != "train":
        overrides.insert(0, f"experiment={arguments.config_name}")
    if "stage=all" in overrides:
        overrides.remove("stage=all")
        return _run_stages(overrides, arguments)
    if arguments.only is not None:
        raise UserError(f"--only {arguments.only}: it picks one stage of several; give stage=all too")
    config = compose_config(overrides, arguments.config_dir)
    if arguments.cfg:
        _print_config(config)
        return 0
    _train(config)
    return 0


def _run_stages(overrides: list[str], arguments: argparse.Namespace) -> int:
    """Run the stages of the experiment; each starts from the draft of the previous one."""
    whole = compose_config(overrides, arguments.config_dir)
    if not whole.stages:
        raise UserError("stage=all: these settings name no stages")
    names = [str(name) for name in whole.stages]
    if arguments.only is not None and arguments.only not in names:
        raise UserError(f"--only {arguments.only}: these settings have the stages {', '.join(names)}")
    configs = _stage_configs(whole, overrides, arguments)
    if arguments.cfg:
        for config in configs:
            _print_config(config)
        return 0
    from longspec.train.checkpoints import STAGES, check_place, note_stages

    check_place(Path(whole.run), (STAGES, *names), whole.resume)
    if os.environ.get("RANK", "0") == "0":
        note_stages(Path(whole.run), names)
    for config in configs:
        if not _train(config):
            break
    return 0


def _stage_configs(whole: Any, overrides: list[str], arguments: argparse.Namespace) -> list[Any]:
    folder, previous = Path(whole.run), whole.draft.path
    # What chooses the experiment comes before a stage's own settings.
    chosen = [one for one in overrides if one.lstrip("+").startswith("experiment=")]
    values = [one for one in overrides if one not in chosen]
    configs = []
    for name, settings in whole.stages.items():
        # The user's overrides come last and win, but each stage has its own name and folder.
        own = [f"name={whole.name}_{name}", f"run={folder / str(name)}"]
        start = previous if arguments.only is None else _start_alone(whole, str(name))
        own += [] if start is None else [f"draft.path={start}"]
        if arguments.only in (None, name):
            every = [*chosen, *settings, *values, *own]
            configs.append(compose_config(every, arguments.config_dir))
        previous = folder / str(name)
    return configs


def _start_alone(whole: Any, name: str) -> Any:
    """The draft that a single stage starts from: the named one, or that of the stage before it."""
    names = [str(one) for one in whole.stages]
    if whole.draft.path is not None or name == names[0]:
        return whole.draft.path
    return Path(whole.run) / names[names.index(name) - 1]


def _train(config: Any) -> bool:
    """Run one stage; returns False if its time ran out before the end."""
    from longspec.train.checkpoints import progress_of
    from longspec.train.trainer import train

    folder = train(_complete(config))
    step, num_steps = progress_of(folder)
    if step < num_steps:
        _say(f"stopped at step {step} of {num_steps}: {folder}; continue with resume=latest")
        return False
    _say(f"done: {folder}")
    return True


def compose_config(overrides: Sequence[str], config_dir: str | None = None) -> Any:
    try:
        from hydra import compose, initialize_config_module
        from hydra.core.config_store import ConfigStore
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException
    except ImportError as error:
        raise UserError(f"training needs Hydra: {INSTALL_TRAINING} ({error})") from error
    from longspec.train.schema import TrainSettings

    ConfigStore.instance().store(name="schema", node=TrainSettings)
    extra = []
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise UserError(f"--config-dir {config_dir} is not a folder")
        for path in Path(config_dir).rglob("*.yaml"):
            read_yaml(path, dict[str, Any])  # Hydra does not say which file is no settings
        extra = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]
    try:
        with initialize_config_module("longspec.conf", version_base="1.3"):
            return compose("train", [*overrides, *extra])
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"settings: {_reason(error)}") from error


def _complete(config: Any) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        missing = sorted(OmegaConf.missing_keys(config))
    except OmegaConfBaseException as error:  # an environment variable, for one, that is not set
        raise UserError(f"settings: {_reason(error)}") from error
    if missing:
        raise UserError(f"settings: {missing[0]} must be given, as {missing[0]}=...")
    return config


def _reason(error: BaseException) -> str:
    """Hydra's message, without its advice to append unknown keys."""
    lines = [line.strip() for line in str(error).splitlines()]
    if error.__cause__ is not None:
        lines += [line.strip() for line in str(error.__cause__).splitlines()]
    if "Config search path:" in lines:
        lines = lines[: lines.index("Config search path:")]
    noise = ("To append", "full_key", "object_type", "reference_type")
    text = " ".join(dict.fromkeys(line for line in lines if line and not line.startswith(noise)))
    # `stage=all` is ours, and Hydra does not know that a list may have one entry.
    text = text.replace("options in 'stage': ", "options in 'stage': all ")
    return text.replace("str is not a ListConfig, list or tuple", "a list has brackets, as in [data/own]")


def _print_config(config: Any) -> None:
    from omegaconf import OmegaConf

    print(OmegaConf.to_yaml(config), end="")


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)
