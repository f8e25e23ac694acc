"""Find the folder of a model from the name that the user gives."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.hub.registry import MODELS, ModelEntry, nearest, shipped_draft


@dataclass(frozen=True)
class TargetFiles:
    """A target on disk: a folder in the Hugging Face layout."""

    name: str
    folder: Path
    entry: ModelEntry | None
    config: Mapping[str, Any] | None = None
    """The future content of config.json, if only the config was asked for and nothing is converted yet."""
    matrix_types: Mapping[str, int] = field(default_factory=dict)
    """With `config`: how many weights of matrices have each GGUF type or, if they are not converted to
    float32, their dtype."""

    @property
    def chat_template(self) -> str | None:
        """Where the tokenizer of a target with a short name lacks one."""
        return None if self.entry is None else self.entry.chat_template

    @property
    def eos_id(self) -> int | None:
        """Of a target with a short name whose files do not say it."""
        return None if self.entry is None else self.entry.eos_id


def resolve(
    target: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: bool = True,
    config_only: bool = False,
) -> TargetFiles:
    """Find `target` (a path, a short name or a hub id, in this order), and fetch it if it is not on disk.

    `revision` is for hub ids. With `config_only` no weights are fetched or converted. The files' content is
    never run as code.
    """
    path = Path(os.path.expanduser(target))
    local, entry = _is_local(target, path), _entry(target)
    if revision is not None and (local or (entry is not None and entry.target is None)):
        raise UserError(f"{target} has no revisions: they are for hub ids; leave out revision {revision!r}")
    if local:
        return _local(target, path, progress, config_only)
    if entry is not None and entry.target is None:
        from longspec.hub import embedded

        if config_only:
            folder = embedded.embedded_folder()
            return TargetFiles(target, folder, entry, embedded.CONFIG, embedded.MATRIX_TYPES)
        return TargetFiles(target, embedded.embedded_target(offline=offline, progress=progress), entry)
    hub_id = entry.target if entry is not None and entry.target is not None else target
    if hub_id.count("/") != 1:
        raise _unknown(target)
    from longspec.hub.download import download

    folder = download(hub_id, revision=revision, offline=offline, progress=progress, config_only=config_only)
    return TargetFiles(target, folder, entry)


def resolve_tokenizer(
    target: str, *, revision: str | None = None, offline: bool = False, progress: bool = True
) -> TargetFiles:
    """Find only the tokenizer of `target`; weights are not fetched."""
    path = Path(os.path.expanduser(target))
    entry = _entry(target)
    if _is_local(target, path) and path.is_dir() and revision is None:
        return TargetFiles(target, path, None)
    hub_id = entry.target if entry is not None else target
    if _is_local(target, path) or hub_id is None or hub_id.count("/") != 1:
        return resolve(target, revision=revision, offline=offline, progress=progress)
    from longspec.hub.download import download_tokenizer

    folder = download_tokenizer(hub_id, revision=revision, offline=offline, progress=progress)
    return TargetFiles(target, folder, entry)


def resolve_draft(
    draft: str, *, revision: str | None = None, offline: bool = False, progress: bool = True
) -> Path:
    """Find a draft: by its target's short name (in the package), by a folder or .pth file, or by a hub id,
    which is fetched if it is not on disk."""
    if (folder := shipped_draft(draft)) is not None:
        return folder
    path = Path(os.path.expanduser(draft))
    if (path / "checkpoints").is_dir() or (path / "stages.json").is_file():
        raise UserError(f"{draft} is a training run; make a draft of it: longspec export {draft} FOLDER")
    if path.exists():
        return path
    if draft.startswith(("/", ".", "~")) or draft.endswith(".pth") or draft.count("/") != 1:
        raise UserError(
            f"there is no draft {draft!r}: pass a draft folder, a .pth file or a hub id (org/name)"
        )
    from longspec.hub.download import download_draft

    return download_draft(draft, revision=revision, offline=offline, progress=progress)


def on_disk(entry: ModelEntry) -> bool:
    """Whether all files of a model are on this machine. Does not use the network."""
    if entry.target is None:
        from longspec.hub.cache import is_complete
        from longspec.hub.embedded import embedded_folder

        return is_complete(embedded_folder())
    from longspec.hub.download import downloaded

    return downloaded(entry.target)


def _is_local(target: str, path: Path) -> bool:
    if target.endswith(".gguf") or target.startswith(("/", ".", "~")) or target.count("/") > 1:
        return True
    # A folder with a short name as its name, but without a model in it, does not hide the short name.
    found = path / "config.json" if target in MODELS else path
    return target != "" and os.path.exists(found)


def _entry(target: str) -> ModelEntry | None:
    """The entry of a short name, or of the hub id that it stands for."""
    return MODELS.get(target) or next((entry for entry in MODELS.values() if entry.target == target), None)


def _local(target: str, path: Path, progress: bool, config_only: bool) -> TargetFiles:
    if not os.path.exists(path):
        raise UserError(f"there is no file or folder {path}")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"the folder {path} has no config.json: pass a Hugging Face model folder")
        return TargetFiles(target, path, None)
    if path.suffix != ".gguf" or not path.is_file():  # a pipe would be waited for
        raise UserError(f"{path} is neither a model folder nor a .gguf file")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path} cannot be read: check its permissions")
    from longspec.hub.gguf_convert import converted, read_gguf_config

    if config_only:
        return TargetFiles(target, path, None, *read_gguf_config(path))
    return TargetFiles(target, converted(path, progress=progress), None)


def _unknown(target: str) -> UserError:
    close = nearest(target)
    hint = f"did you mean {close!r}?" if close else f"known names: {', '.join(MODELS)}"
    return UserError(
        f"unknown target {target!r}: {hint} (or pass a folder, a .gguf file or a hub id like org/name)"
    )
