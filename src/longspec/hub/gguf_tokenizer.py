"""Save the tokenizer of a GGUF file in the Hugging Face format."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspec.errors import UserError
from longspec.hub.gguf_config import Metadata
from longspec.prompts import tokenizer_explained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MAX_TOKEN = 4096  # characters; recovering merges takes time quadratic in a token's length

# How a byte-level vocabulary splits text before merging (`tokenizer.ggml.pre`). transformers does the first
# three groups right; it gives "smollm" the split of GPT-2, which `_mend` corrects.
_LLAMA3_SPLITS = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3", "tekken")
_QWEN_SPLITS = ("qwen2", "deepseek-r1-qwen", "megrez")
_GPT2_SPLITS = ("gpt-2", "default")
_DIGIT_SPLITS = ("smollm",)


def save_tokenizer(meta: Metadata, folder: Path) -> None:
    """Write tokenizer files, with the file's chat template, into `folder`."""
    tokens = meta.get("tokenizer.ggml.tokens")
    model, pre = meta.text("tokenizer.ggml.model"), meta.text("tokenizer.ggml.pre", "default")
    if model not in ("llama", "gpt2"):
        raise meta.refuse(f"the tokenizer {model!r}")
    if model == "gpt2" and pre not in (*_LLAMA3_SPLITS, *_QWEN_SPLITS, *_GPT2_SPLITS, *_DIGIT_SPLITS):
        raise meta.refuse(f"the pre-tokenizer {pre!r}")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise UserError(f"{meta.header.path}: the GGUF key 'tokenizer.ggml.tokens' is not a list of strings")
    if len(tokens) > meta.header.tensors["token_embd.weight"].shape[0]:
        raise UserError(f"{meta.header.path}: there are more tokens than rows in 'token_embd.weight'")
    if max(map(len, tokens), default=0) > _MAX_TOKEN:
        raise UserError(
            f"{meta.header.path}: a token is longer than {_MAX_TOKEN} characters: a damaged file?"
        )
    with tokenizer_explained(f"{meta.header.path}: its tokenizer cannot be read, it may be damaged", OSError):
        tokenizer = _load(meta.header.path)
        _mend(tokenizer, meta, model, pre)
        for how_it_was_loaded in ("is_local", "local_files_only"):
            tokenizer.init_kwargs.pop(how_it_was_loaded, None)
        tokenizer.save_pretrained(folder)


def _load(path: Path) -> "PreTrainedTokenizerFast":
    # Not AutoTokenizer, because it reads the whole header three times: 4 s instead of 0.4.
    from transformers import PreTrainedTokenizerFast

    # In its own folder, because tokenizer files next to the GGUF must not be used.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.gguf").symlink_to(path.absolute())
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            folder, gguf_file="model.gguf", local_files_only=True
        )
        return tokenizer


def _mend(tokenizer: "PreTrainedTokenizerFast", meta: Metadata, model: str, pre: str) -> None:
    """Correct what transformers leaves out when it reads a GGUF."""
    from tokenizers import normalizers, pre_tokenizers

    backend: Any = tokenizer.backend_tokenizer
    if model == "gpt2" and pre in _DIGIT_SPLITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if model == "gpt2" and pre in _QWEN_SPLITS:
        backend.normalizer = normalizers.NFC()
    # If the key is missing, llama.cpp adds bos for SentencePiece and Llama 3 vocabularies.
    add_bos = meta.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = model == "llama" or pre in _LLAMA3_SPLITS
    if add_bos and tokenizer.bos_token is not None:
        # The setter exists, but the type stubs have only the getter.
        tokenizer.add_bos_token = True  # type: ignore[misc]
