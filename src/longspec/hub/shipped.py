"""Drafts that come with the package: a folder in `longspec/drafts` with the name of its target."""

from pathlib import Path

import longspec
from longspec.hub.registry import MODELS, ModelEntry


def shipped_draft(name: str) -> Path | None:
    """The folder of the draft that comes along for the target of this short name, if one does."""
    if name not in MODELS:
        return None
    # All places of the package: one that extends it may bring drafts too.
    folders = (Path(place) / "drafts" / name for place in longspec.__path__)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def default_draft(entry: ModelEntry | None) -> str | None:
    """What drafts for a target of the table unless the user says otherwise: a name for `resolve_draft`."""
    if entry is None:
        return None
    return entry.name if shipped_draft(entry.name) is not None else entry.draft
