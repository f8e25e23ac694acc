"""The published classes `LlamaGlide` and `Qwen2Glide`, as clients of the engine."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike, fspath
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from longspec import hub
from longspec.attention import choose_backend
from longspec.config import DraftConfig
from longspec.decoding.methods import VANILLA, MagicDec, Method, Seq, Tree
from longspec.decoding.sampling import Sampling
from longspec.engine.engine import Engine
from longspec.engine.make import make_engine
from longspec.engine.sequence import Sequence
from longspec.errors import UserError, shown, whole_number
from longspec.models.draft import DraftHead
from longspec.models.families import config_from_hf
from longspec.models.files import read_config
from longspec.models.pair import load_pair
from longspec.models.placement import pick_device, pick_dtype

# The names of `transformers`, and our backends for them.
_BACKENDS = {None: "auto", "flash_attention_2": "auto", "sdpa": "torch", "eager": "reference"}

# How many rows run at once; the others wait.
_ROWS = 64


class GlideModel(nn.Module):
    """A frozen target (`model`, with its `lm_head`) and the draft to be trained for it (`draft_model`)."""

    families: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        config: Any,
        target_model_path: str | PathLike[str],
        glide_path: str | PathLike[str] | None = None,
        *,
        torch_dtype: torch.dtype | str | None = None,
        attn_implementation: str | None = None,
        draft_config: DraftConfig | None = None,
        device: torch.device | str = "auto",
        seed: int | None = None,
    ) -> None:
        """Load the target, and the draft at `glide_path`, or make a new draft from `seed`.

        config is the target's Hugging Face config; None reads config.json.
        """
        super().__init__()
        name = fspath(target_model_path)
        shape = read_config(hub.resolve(name).folder) if config is None else config_from_hf(config)
        if shape.family not in self.families:
            raise UserError(
                f"{type(self).__name__} is for {' or '.join(self.families)}, but {name} is {shape.family}"
            )
        if attn_implementation not in _BACKENDS:
            raise UserError(
                f"attn_implementation {attn_implementation!r} is unknown; use one of {list(_BACKENDS)}"
            )
        device = pick_device(device)
        pair = load_pair(
            name, glide_path, draft_config, device, _dtype(torch_dtype, device), config=shape, seed=seed
        )
        self.model, self.draft_model, self.eos_ids = pair.target, pair.draft, pair.eos_ids
        self.model.attention = choose_backend(_BACKENDS[attn_implementation])
        self._engine: Engine | None = None

    @property
    def lm_head(self) -> nn.Module:
        """The target's head, which the draft uses too."""
        return self.model.head

    @classmethod
    def from_pretrained(
        cls,
        path: str | PathLike[str],
        state_dict: dict[str, Tensor] | None = None,
        draft_model_name_or_path: str | PathLike[str] | None = None,
        torch_dtype: torch.dtype | str | None = None,
        attn_implementation: str | None = None,
        ignore_mismatched_sizes: bool = False,
        **draft: Any,
    ) -> Self:
        """Load the target at `path` with a draft; other keywords are the `DraftConfig` of a new draft.

        state_dict has weights of the draft; with `ignore_mismatched_sizes`, those that do not fit are
        ignored.
        """
        config = DraftConfig(**draft) if draft else None
        loaded = cls(
            None,
            path,
            draft_model_name_or_path,
            torch_dtype=torch_dtype,
            attn_implementation=attn_implementation,
            draft_config=config,
        )
        if state_dict is not None:
            known = loaded.draft_model.state_dict()
            given = {name.removeprefix("draft_model."): value for name, value in state_dict.items()}
            if ignore_mismatched_sizes:
                given = {k: v for k, v in given.items() if k in known and known[k].shape == v.shape}
            loaded.draft_model.load_state_dict(given, strict=not ignore_mismatched_sizes)
        return loaded

    def vanilla_generate(
        self,
        input_ids: Tensor,
        prompt_length: Tensor,
        max_gen_len: int = 64,
        eos_id: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> tuple[Tensor, int, float]:
        """The target alone. Returns the tokens [B, max_gen_len], the rounds and the seconds."""
        found = self._generate(VANILLA, input_ids, prompt_length, max_gen_len, eos_id, temperature, seed)
        return found[0], found[2], found[3]

    def spec_generate(
        self,
        input_ids: Tensor,
        prompt_length: Tensor,
        gamma: int = 4,
        max_gen_len: int = 64,
        eos_id: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> tuple[Tensor, int, int, float, Tensor]:
        """The draft proposes a chain. Returns tokens, accepted, rounds, seconds, and which were drafted."""
        return self._generate(Seq(gamma), input_ids, prompt_length, max_gen_len, eos_id, temperature, seed)

    def tree_spec_generate(
        self,
        input_ids: Tensor,
        prompt_length: Tensor,
        tree_shape: list[int] | None = None,
        max_gen_len: int = 64,
        eos_id: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> tuple[Tensor, int, int, float, Tensor]:
        """The draft proposes a tree. Returns the same as `spec_generate`."""
        tree = Tree(tuple(tree_shape)) if tree_shape else Tree()
        return self._generate(tree, input_ids, prompt_length, max_gen_len, eos_id, temperature, seed)

    def magicdec_generate(
        self,
        input_ids: Tensor,
        prompt_length: Tensor,
        gamma: int = 4,
        max_gen_len: int = 64,
        eos_id: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> tuple[Tensor, int, int, float, Tensor]:
        """The target proposes itself (MagicDec). Returns the same as `spec_generate`."""
        return self._generate(
            MagicDec(gamma), input_ids, prompt_length, max_gen_len, eos_id, temperature, seed
        )

    def _generate(
        self,
        method: Method,
        input_ids: Tensor,
        prompt_length: Tensor,
        max_gen_len: int,
        eos_id: int | None,
        temperature: float,
        seed: int,
    ) -> tuple[Tensor, int, int, float, Tensor]:
        """Rows of `input_ids` [B, T] are prompts of `prompt_length` [B] tokens, padded on the right."""
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
            raise UserError(f"input_ids is {shown(input_ids)}; a tensor of token ids [B, T] is needed")
        if whole_number("max_gen_len", max_gen_len) < 1:
            raise UserError(f"max_gen_len is {max_gen_len}; it must be at least 1")
        eos_ids = self.eos_ids if eos_id is None else frozenset({eos_id})
        num_rows, width = input_ids.shape
        lengths = torch.as_tensor(prompt_length).expand(num_rows).tolist()
        wrong = next((length for length in lengths if not 1 <= length <= width), None)
        if wrong is not None:
            raise UserError(f"one of prompt_length is {wrong}; it must lie between 1 and {width}")
        sampling = Sampling(temperature=temperature)
        rows = [
            Sequence(ids[:length], max_gen_len, sampling, seed + index, eos_ids, method)
            for index, (ids, length) in enumerate(zip(input_ids.tolist(), lengths, strict=True))
        ]
        for _ in self._engine_for(rows).run_each(rows):
            pass
        # From the first token on, so that most of the prefill does not count.
        seconds = max(row.finished_at for row in rows) - min(row.first_at for row in rows)
        tokens = input_ids.new_zeros(len(rows), max_gen_len)
        drafted = torch.zeros_like(tokens)
        for index, row in enumerate(rows):
            tokens[index, : len(row.tokens)] = tokens.new_tensor(row.tokens)
            drafted[index, : len(row.tokens)] = tokens.new_tensor([depth > 0 for depth in row.depths])
        num_rounds = sum(row.num_rounds for row in rows)
        return tokens, int(drafted.sum()), num_rounds, seconds, drafted

    def _engine_for(self, rows: list[Sequence]) -> Engine:
        """The last engine, or a new one if that is too small.

        It forgets earlier texts, because weights may have changed since then.
        """
        longest, num_rows = max(row.limit for row in rows), min(len(rows), _ROWS)
        engine = self._engine
        if engine is not None and longest <= engine.max_length and num_rows <= engine.device.max_rows:
            engine.forget()
            return engine
        if engine is not None:
            longest, num_rows = max(longest, engine.max_length), max(num_rows, engine.device.max_rows)
        engine = self._engine = None  # freed before the next one measures the free memory
        head = DraftHead(self.model, self.draft_model.vocab_ids)
        engine = make_engine(self.model, self.draft_model, head, max_length=longest, max_rows=num_rows)
        self._engine = engine
        return engine

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Drop the engine when weights move or change their dtype, because it was made for the old ones."""
        self._engine = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """Without the engine; a copy makes its own."""
        return self.__dict__ | {"_engine": None}


class LlamaGlide(GlideModel):
    """A Llama target with its draft."""

    families = ("llama",)


class Qwen2Glide(GlideModel):
    """A Qwen2 target (QwQ too) with its draft."""

    families = ("qwen2", "qwen3")


def _dtype(wanted: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    return wanted if isinstance(wanted, torch.dtype) else pick_dtype(wanted or "auto", device)
