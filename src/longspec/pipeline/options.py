"""What `longspec draft` can be asked for. No torch here, because `--help` reads this class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.hub.registry import DEFAULT_TARGET
from longspec.option import check_options, option

_DEFAULT_SECONDS = 3600.0


@dataclass(frozen=True)
class DraftOptions:
    """What draft to make, from what, and at what cost."""

    output: Path
    target: str = DEFAULT_TARGET
    seconds: float | None = None
    """The time that all may take; None is an hour, unless `tokens` is given."""
    tokens: int | None = None
    """How many tokens the target writes, however long that takes."""
    prompts: Path | None = option(
        None, "your users' prompts: JSONL with 'prompt', 'turns' or 'messages', or text with one in each line"
    )
    documents: Path | None = option(
        None, "text of your domain: JSONL with 'text' (also .gz, .xz, .parquet), or one text file"
    )
    licence: str = option("unknown", "of --documents, for the draft's card", metavar="TEXT")
    draft: str | None = option(None, "train on from this draft: a folder, or a hub id", metavar="DRAFT")
    seed: int = option(0, "another one gives other text and another draft", least=0, most=2**31 - 1)
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_options(self)
        if self.seconds is not None and self.tokens is not None:
            raise UserError("give a budget or a number of tokens, and not both")
        if self.seconds is None and self.tokens is None:
            object.__setattr__(self, "seconds", _DEFAULT_SECONDS)
        for name, value in (("budget", self.seconds), ("tokens", self.tokens)):
            if value is not None and not 0 < value < 1e15:
                raise UserError(f"{name} is {value}; it must be above 0")
        for name in ("prompts", "documents"):
            path = getattr(self, name)
            if path is not None and not path.exists():
                raise UserError(f"--{name}: there is no file {path}")

    @property
    def asked(self) -> dict[str, Any]:
        """What must be the same when an output folder is continued."""
        given = {name: getattr(self, name) for name in ("seconds", "tokens", "draft", "seed", "dtype")}
        files = {
            name: None if (path := getattr(self, name)) is None else str(path.resolve())
            for name in ("prompts", "documents")
        }
        return {"target": self.target, "licence": self.licence} | given | files
