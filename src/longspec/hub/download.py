"""Fetch models from the Hugging Face hub, with the hub's own cache."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspec.errors import UserError, reason_of
from longspec.records import ShardIndex, read_record

DRAFT_WEIGHTS = ("model.safetensors", "draft_model_weights.pth", "pytorch_model.bin")
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def download(
    hub_id: str, *, revision: str | None, offline: bool, progress: bool, config_only: bool = False
) -> Path:
    """Fetch config, tokenizer and weights of a target, unless the hub's cache has them."""

    def patterns(files: list[str]) -> list[str]:
        if "config.json" not in files:
            raise UserError(f"{hub_id} has no config.json: it is not a model that longspec can run")
        return ["config.json"] if config_only else [*_SMALL_FILES, _weight_pattern(hub_id, files)]

    def complete(folder: Path) -> bool:
        if not (folder / "config.json").is_file():
            return False
        return config_only or (_has_tokenizer(folder) and _has_weights(folder))

    return _fetch(hub_id, revision, offline, progress, patterns, complete)


def download_tokenizer(hub_id: str, *, revision: str | None, offline: bool, progress: bool) -> Path:
    """Fetch a target's config and tokenizer, without its weights."""
    return _fetch(hub_id, revision, offline, progress, lambda files: _SMALL_FILES, _has_tokenizer)


def download_draft(hub_id: str, *, revision: str | None, offline: bool, progress: bool) -> Path:
    """Fetch a draft's weights, and its config if it has one."""

    def patterns(files: list[str]) -> list[str]:
        weights = next((name for name in DRAFT_WEIGHTS if name in files), None)
        if weights is None:
            raise UserError(f"{hub_id} is not a draft: it has none of {', '.join(DRAFT_WEIGHTS)}")
        return ["config.json", weights]

    def complete(folder: Path) -> bool:
        return any((folder / name).is_file() for name in DRAFT_WEIGHTS)

    return _fetch(hub_id, revision, offline, progress, patterns, complete)


def _fetch(
    hub_id: str,
    revision: str | None,
    offline: bool,
    progress: bool,
    patterns: Callable[[list[str]], list[str]],
    complete: Callable[[Path], bool],
) -> Path:
    """Fetch the files that `patterns` chooses from the list of all; offline, use only the cache."""
    import huggingface_hub as hub
    from huggingface_hub import constants

    if offline or constants.HF_HUB_OFFLINE:
        folder = _cached(hub_id, revision, complete)
        if folder is None:
            at = f" at revision {revision!r}" if revision else ""
            raise UserError(
                f"{hub_id}{at} is not complete in the local hub cache, and offline is set:"
                " run once without offline, or pass a local folder"
            )
        return folder
    options: dict[str, Any] = {} if progress and sys.stderr.isatty() else {"tqdm_class": _silent_bar()}
    try:
        info = hub.HfApi().model_info(hub_id, revision=revision, timeout=15)
        wanted = patterns([sibling.rfilename for sibling in info.siblings or []])
        # Sub-folders have other formats and files of the training, never the model itself.
        found = hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"], **options
        )
    except UserError:
        raise
    except Exception as error:
        if (reason := _explain(error, hub_id, revision)) is None:
            raise
        if _is_network(error) and (known := _cached(hub_id, revision, complete)) is not None:
            return known
        raise UserError(reason) from error
    return Path(found)


def downloaded(hub_id: str) -> bool:
    """Whether the hub's cache has all files of the newest known version."""
    return _cached(hub_id, None, lambda folder: _has_tokenizer(folder) and _has_weights(folder)) is not None


def _cached(hub_id: str, revision: str | None, complete: Callable[[Path], bool]) -> Path | None:
    """The cached snapshot if it is `complete`, else None. Does not use the network."""
    import huggingface_hub as hub

    try:
        # Ask for one file only, because the hub calls a snapshot incomplete if any file is missing.
        found = hub.snapshot_download(
            hub_id, revision=revision, local_files_only=True, allow_patterns=["config.json"]
        )
    except Exception:
        # Missing, an impossible name, an unreadable cache: the same to the caller.
        return None
    folder = Path(found)
    return folder if complete(folder) else None


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def _has_weights(folder: Path) -> bool:
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (folder / stem).is_file():
            return True
        try:
            index = read_record(folder / f"{stem}.index.json", ShardIndex)
            if all((folder / name).is_file() for name in set(index.weight_map.values())):
                return True
        except (UserError, OSError):  # OSError: an impossible name
            continue
    return False


def _weight_pattern(hub_id: str, files: list[str]) -> str:
    """Safetensors if the repository has them; pickled files only if not."""
    top = [name for name in files if "/" not in name]
    if any(name.startswith("model") and name.endswith(".safetensors") for name in top):
        return "model*.safetensors"
    if any(name.startswith("pytorch_model") and name.endswith(".bin") for name in top):
        return "pytorch_model*.bin"
    raise UserError(f"{hub_id} has neither model*.safetensors nor pytorch_model*.bin weights")


def _is_network(error: Exception) -> bool:
    # By name, because the HTTP library of huggingface_hub is httpx in some versions and httpx2 in others.
    kinds = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("httpx")}
    return "TransportError" in kinds or isinstance(error, ConnectionError | TimeoutError)


def _explain(error: Exception, hub_id: str, revision: str | None) -> str | None:
    """What went wrong, in one line for the user; None if the user cannot fix it."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{hub_id} is gated: accept its terms on its hub page and log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{hub_id} has no revision {revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no model {hub_id} on the hub, or it is private: check the name, or `hf auth login`"
    if isinstance(error, errors.HFValidationError):
        return f"{hub_id!r} is not a valid hub id: use org/name"
    if _is_network(error) or isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return f"cannot reach the hub for {hub_id}: check the network, or pass a local folder or .gguf file"
    if isinstance(error, errors.HfHubHTTPError):
        return f"the hub refused {hub_id}: {reason_of(error)}"
    if isinstance(error, OSError):
        return f"cannot store {hub_id}: {error.strerror or error}; set HF_HOME to a folder with room"
    return None


def _silent_bar() -> type:
    from huggingface_hub import utils

    base: Any = utils.tqdm  # type: ignore[attr-defined]

    class SilentBar(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))

    return SilentBar
