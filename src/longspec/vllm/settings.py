"""What `--speculative-config` says about a draft of ours, in words that vLLM knows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.errors import UserError, check_known, flag, shown, whole_number

METHOD = "longspec"
PROPOSER = "longspec.vllm.proposer.DraftProposer"
# Where vLLM's config keeps what plugins want to know: it has no other free field.
SECTION = "longspec"
_DEFAULT_TOKENS = 4
_KEYS = ("method", "model", "revision", "num_speculative_tokens", "enforce_eager")


@dataclass(frozen=True)
class ChainSettings:
    """A draft's folder, and how many tokens it proposes in a round."""

    folder: Path
    num_tokens: int
    eager: bool | None = None
    """Whether to launch the draft's operations one by one; None: as the target's."""

    def speculative_config(self) -> dict[str, Any]:
        """The settings as vLLM's own method for proposers of other packages."""
        own = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": self.num_tokens}
        return own if self.eager is None else own | {"enforce_eager": self.eager}

    def additional_config(self) -> dict[str, Any]:
        return {SECTION: {"draft": str(self.folder)}}


def read_settings(given: Mapping[str, Any] | None) -> ChainSettings | None:
    """Our settings in a speculative config; None if it asks for something else."""
    if given is None or not _is_ours(given):
        return None
    from longspec.hub import resolve_draft
    from longspec.models.draft_files import read_draft_config

    model = given.get("model")
    if not isinstance(model, str):
        raise UserError(
            f"speculative config: model is {shown(model)}; name a draft folder, a file or a hub id"
        )
    for name in given:
        check_known("key of a speculative config with a longspec draft", name, _KEYS)
    folder = resolve_draft(model, revision=given.get("revision"))
    deepest = read_draft_config(folder).max_lag
    num_tokens = given.get("num_speculative_tokens")
    num_tokens = min(_DEFAULT_TOKENS, deepest) if num_tokens is None else num_tokens
    num_tokens = whole_number("num_speculative_tokens", num_tokens)
    if not 1 <= num_tokens <= deepest:
        raise UserError(
            f"num_speculative_tokens is {num_tokens}; the draft {model} was trained for 1 to {deepest}"
        )
    eager = given.get("enforce_eager")
    return ChainSettings(
        folder.absolute(), num_tokens, None if eager is None else flag("enforce_eager", eager)
    )


def _is_ours(given: Mapping[str, Any]) -> bool:
    """Whether the config names our method, or no method and a folder that we wrote."""
    method, model = given.get("method"), given.get("model")
    if method is not None or not isinstance(model, str):
        return method == METHOD
    from longspec.models.draft_files import read_draft_record

    folder = Path(os.path.expanduser(model))
    return (folder / "config.json").is_file() and read_draft_record(folder) is not None
