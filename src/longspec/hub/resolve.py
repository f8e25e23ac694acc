"""From what the user calls a model to a folder with its files."""

import os
from dataclasses import dataclass
from pathlib import Path

from longspec.errors import UserError
from longspec.hub.registry import MODELS, ModelEntry, nearest


@dataclass(frozen=True)
class TargetFiles:
    """A target that is on disk: a folder in the Hugging Face layout."""

    name: str
    folder: Path
    entry: ModelEntry | None


def resolve(
    target: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: bool = True,
    config_only: bool = False,
) -> TargetFiles:
    """Find `target` (a path, a short name or a hub id, in this order), fetching it when it is not on disk.

    `revision` applies to hub ids; with `config_only` no weights are fetched from there. Nothing the files
    contain is ever run as code.
    """
    path = Path(os.path.expanduser(target))
    if _is_local(target, path):
        return TargetFiles(target, _local(path, progress), None)
    entry = MODELS.get(target)
    if entry is not None and entry.target is None:
        from longspec.hub.embedded import embedded_target

        return TargetFiles(target, embedded_target(offline=offline, progress=progress), entry)
    hub_id = entry.target if entry is not None and entry.target is not None else target
    if hub_id.count("/") != 1:
        raise _unknown(target)
    from longspec.hub.download import download

    folder = download(hub_id, revision=revision, offline=offline, progress=progress, config_only=config_only)
    return TargetFiles(target, folder, entry)


def resolve_draft(
    draft: str, *, revision: str | None = None, offline: bool = False, progress: bool = True
) -> Path:
    """Find a draft: a folder or .pth file, or a hub id, which is fetched when it is not on disk."""
    path = Path(os.path.expanduser(draft))
    if path.exists():
        return path
    if draft.startswith(("/", ".", "~")) or draft.endswith(".pth") or draft.count("/") != 1:
        raise UserError(
            f"there is no draft {draft!r}: pass a draft folder, a .pth file or a hub id (org/name)"
        )
    from longspec.hub.download import download_draft

    return download_draft(draft, revision=revision, offline=offline, progress=progress)


def on_disk(entry: ModelEntry) -> bool:
    """Whether a model of the table is here in full already. Asks no network."""
    if entry.target is None:
        from longspec.hub.cache import is_complete
        from longspec.hub.embedded import embedded_folder

        return is_complete(embedded_folder())
    from longspec.hub.download import downloaded

    return downloaded(entry.target)


def _is_local(target: str, path: Path) -> bool:
    if target.endswith(".gguf") or target.startswith(("/", ".", "~")) or target.count("/") > 1:
        return True
    # A folder that merely shares a short name, without a model in it, does not hide that name.
    found = path / "config.json" if target in MODELS else path
    return target != "" and os.path.exists(found)


def _local(path: Path, progress: bool) -> Path:
    if not os.path.exists(path):
        raise UserError(f"there is no file or folder {path}")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"the folder {path} has no config.json: pass a Hugging Face model folder")
        return path
    if path.suffix != ".gguf":
        raise UserError(f"{path} is neither a model folder nor a .gguf file")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path} cannot be read: check its permissions")
    from longspec.hub.gguf_convert import converted

    return converted(path, progress=progress)


def _unknown(target: str) -> UserError:
    close = nearest(target)
    hint = f"did you mean {close!r}?" if close else f"known names: {', '.join(MODELS)}"
    return UserError(
        f"unknown target {target!r}: {hint} (or pass a folder, a .gguf file or a hub id like org/name)"
    )
