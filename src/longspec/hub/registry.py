"""The models that have a short name: targets, their drafts, and chat templates that their tokenizers lack."""

import difflib
from dataclasses import dataclass
from pathlib import Path

import longspec

DEFAULT_TARGET = "smollm2-135m"

# FastChat's "vicuna_v1.1" conversation, also for LongChat, because their tokenizers have no template.
VICUNA_CHAT_TEMPLATE = (
    "{%- if messages and messages[0]['role'] == 'system' -%}"
    "{%- set system = messages[0]['content'] -%}{%- set turns = messages[1:] -%}"
    "{%- else -%}"
    '{%- set system = "A chat between a curious user and an artificial intelligence assistant. '
    "The assistant gives helpful, detailed, and polite answers to the user's questions.\" -%}"
    "{%- set turns = messages -%}"
    "{%- endif -%}"
    "{{- bos_token + system + ' ' -}}"
    "{%- for turn in turns -%}"
    "{%- if turn['role'] == 'user' -%}{{- 'USER: ' + turn['content'] + ' ' -}}"
    "{%- elif turn['role'] == 'assistant' -%}{{- 'ASSISTANT: ' + turn['content'] + '</s>' -}}"
    "{%- else -%}{{- raise_exception('unknown role ' + turn['role'] + ': use user or assistant') -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class ModelEntry:
    """A model with a short name. None means: as the model's own files say."""

    name: str
    target: str | None
    """Hub id; None for the embedded default, which comes from PyPI (`longspec.hub.embedded`)."""
    draft: str | None
    """Hub id. A draft in the package (`shipped_draft`) is preferred."""
    context: int
    eos_id: int | None = None
    chat_template: str | None = None


def _published(
    name: str, target: str, context: int, *, eos_id: int | None = None, chat_template: str | None = None
) -> ModelEntry:
    """A target with its published draft, which has the same model name."""
    draft = "sail/longspec-" + target.split("/")[1]
    return ModelEntry(name, target, draft, context, eos_id, chat_template)


MODELS: dict[str, ModelEntry] = {
    entry.name: entry
    for entry in (
        ModelEntry(DEFAULT_TARGET, target=None, draft=None, context=8192),
        _published("vicuna7b", "lmsys/vicuna-7b-v1.5-16k", 16384, chat_template=VICUNA_CHAT_TEMPLATE),
        _published("vicuna13b", "lmsys/vicuna-13b-v1.5-16k", 16384, chat_template=VICUNA_CHAT_TEMPLATE),
        _published("longchat7b", "lmsys/longchat-7b-v1.5-32k", 32768, chat_template=VICUNA_CHAT_TEMPLATE),
        _published("longchat13b", "lmsys/longchat-13b-16k", 16384, chat_template=VICUNA_CHAT_TEMPLATE),
        _published("llama8b", "gradientai/Llama-3-8B-Instruct-262k", 262000, eos_id=128009),
        _published("qwq", "Qwen/QwQ-32B-Preview", 32768, eos_id=151645),
    )
}


def nearest(name: str) -> str | None:
    """The short name that is most similar to `name`; None if none is."""
    matches = difflib.get_close_matches(name.lower(), MODELS, n=1, cutoff=0.5)
    return matches[0] if matches else None


def shipped_draft(name: str) -> Path | None:
    """The folder of the draft in the package for the target with this short name, if there is one."""
    if name not in MODELS:
        return None
    # All folders of the package, because an extension of it may bring drafts too.
    folders = (Path(place) / "drafts" / name for place in longspec.__path__)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def default_draft(entry: ModelEntry | None) -> str | None:
    """The default draft of a target, as a name for `resolve_draft`."""
    if entry is None:
        return None
    return entry.name if shipped_draft(entry.name) is not None else entry.draft
