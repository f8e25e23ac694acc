"""The draft beside another engine: that engine's KV and hidden states, our ring, chains row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

import longspec.api
from longspec import LongSpec, UserError
from longspec.hub import resolve_draft
from longspec.models.draft import DraftHead
from longspec.models.layers import Linear, scores
from longspec.models.rope import RopeTable
from longspec.vllm.captured import CapturedChains
from longspec.vllm.chain import CrossAttention, Parts, Roots, draft_chain, read_text
from longspec.vllm.ring import BatchRing, RingRows
from longspec.vllm.settings import PROPOSER, read_settings

GAMMA = 4
QUESTION = "Count from one to thirty in words, and say for each number whether it is even."
# Long enough that the ring does not hold all of it.
LONG = QUESTION + " Here is a text that does not matter." * 60


@pytest.fixture(scope="module")
def engine_with_whole_head(smollm2_folder: Path) -> Any:
    """Our engine, drafting with all of the draft's vocabulary and with nothing else, as it does on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(longspec.api, "_CPU_VOCAB", 2**20)
        patch.setattr(DraftHead, "in_context", lambda self, tokens: self)
        yield LongSpec.from_pretrained(
            str(smollm2_folder),
            draft="smollm2-135m",
            dtype="float32",
            device="cpu",
            draft_dtype="target",
            calibrate=False,
        )


def rounds_of(depths: list[int]) -> list[int]:
    """The tokens of each round, without the prompt's own and the last one, which a limit may have cut."""
    found, count = [], 0
    for depth in depths:
        count += 1
        if depth == 0:
            found.append(count)
            count = 0
    return found[1:] if count else found[1:-1]


class OtherEngine:
    """transformers' target with the KV of whole texts; row b may read the first `lengths[b]` entries."""

    def __init__(self, folder: Path, texts: list[list[int]]) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.embedding, self.head = model.get_input_embeddings(), model.lm_head
        self.kv: list[list[tuple[Tensor, Tensor]]] = []
        self.hidden: list[Tensor] = []
        for text in texts:
            out = model(torch.tensor([text]), output_hidden_states=True, use_cache=True)
            self.kv.append([(layer.keys[0], layer.values[0]) for layer in out.past_key_values.layers])
            self.hidden.append(out.hidden_states[-1][0])

    def over(self, table: Tensor, lengths: Tensor) -> CrossAttention:
        """Attention over the texts that `table` [B, 1] names."""

        def cross(layer: int, q: Tensor) -> Tensor:
            rows = []
            for row, (text, length) in enumerate(zip(table[:, 0].tolist(), lengths.tolist(), strict=True)):
                k, v = (part[:, :length] for part in self.kv[text][layer])
                out = F.scaled_dot_product_attention(q[row, :, None], k, v, enable_gqa=True)
                rows.append(out[:, 0])
            return torch.stack(rows)

        return cross


@pytest.mark.parametrize("captured", [False, True])
@torch.inference_mode()
def test_chains_beside_another_engine_are_those_of_ours(
    engine_with_whole_head: LongSpec, smollm2_folder: Path, captured: bool
) -> None:
    """Three rows, with texts of different lengths: each round keeps as many tokens as our own engine's."""
    ours = engine_with_whole_head
    prompts = [
        ours.encoder.encode(prompt, False, ours.target.config.vocab_size)
        for prompt in (QUESTION, LONG, "Name three colours.")
    ]
    answers = [
        ours.generate(ids, method="seq", gamma=GAMMA, max_new_tokens=40, temperature=0) for ids in prompts
    ]
    texts = [ids + answer.token_ids for ids, answer in zip(prompts, answers, strict=True)]
    other = OtherEngine(smollm2_folder, texts)
    draft = ours.engine.models.draft
    assert draft is not None
    parts = make_parts(draft, other)
    table = torch.arange(3)[:, None]
    chains = CapturedChains(parts, GAMMA, other.over, lambda work: work)
    expected = [rounds_of(answer.depths) for answer in answers]
    assert sum(map(len, expected)) > 30
    assert max(map(max, expected)) > 3
    roots, read = [len(ids) for ids in prompts], [0] * 3
    kept: list[list[int]] = [[], [], []]
    while waiting := [row for row in range(3) if len(kept[row]) < len(expected[row])]:
        inputs = catch_up(parts, other, texts, waiting, roots, read)
        if captured:
            drafted = chains(inputs, table[waiting])
        else:
            cross = other.over(table[waiting], inputs.positions)
            drafted = draft_chain(parts, inputs, GAMMA, cross)
        for row, chain in zip(waiting, drafted.tolist(), strict=True):
            truth = texts[row][roots[row] + 1 :]
            agreed = next((n for n in range(GAMMA) if chain[n] != truth[n]), GAMMA)
            kept[row].append(agreed + 1)
            roots[row] += agreed + 1
    assert kept == expected


def make_parts(draft: Any, other: OtherEngine) -> Parts:
    config = draft.target_config
    rope = RopeTable(config.rope, config.head_dim)
    rope.reserve(2048)
    ring = BatchRing(config, draft.config, 3, GAMMA, torch.device("cpu"), torch.float32)
    head = Linear(config.hidden_size, len(draft.vocab_ids))
    head.weight = torch.nn.Parameter(other.head.weight[draft.vocab_ids], requires_grad=False)
    return Parts(
        draft, rope, ring, other.embedding, lambda hidden: draft.vocab_ids[scores(head, hidden).argmax(-1)]
    )


def catch_up(
    parts: Parts,
    other: OtherEngine,
    texts: list[list[int]],
    waiting: list[int],
    roots: list[int],
    read: list[int],
) -> Roots:
    """The roots of these rows. The ring reads a prompt at once, and later what a round has kept."""
    width, numbers = GAMMA + 1, []
    for row in waiting:
        root = roots[row]
        first = max(read[row], root - parts.ring.window + 1)
        if root + 1 - first > width:
            read_text(parts, row, torch.tensor(texts[row][first:root]), first)
            first = root
        numbers.append([row, root, root + 1 - first, *(texts[row][root - back] for back in range(width))])
        read[row] = root + 1
    whole = torch.tensor(numbers)
    feature = torch.stack([other.hidden[row][roots[row] - 1] for row in waiting])
    return Roots(whole[:, 0], whole[:, 1], whole[:, 3:], whole[:, 2], feature)


def test_rows_go_to_those_who_need_them() -> None:
    rows = RingRows(2)
    assert sorted(rows.assign(["a", "b"], {"a", "b"})) == [0, 1]
    rows.note_read("a", 9)
    rows.note_read("b", 5)
    assert (rows.num_read("a", 12), rows.num_read("b", 6)) == (10, 6)
    kept = rows.assign(["a"], {"a", "b"})
    assert rows.num_read("a", 3) == 0, "its text is shorter than what was read"
    # b waits: where rows are short it loses its own, and a new one has read nothing.
    assert rows.assign(["a", "c"], {"a", "b", "c"})[0] == kept[0]
    assert rows.num_read("c", 7) == 0
    # a has ended, and one of the same name begins anew.
    rows.assign(["c"], {"c"})
    rows.assign(["c", "a"], {"a", "c"})
    assert rows.num_read("a", 30) == 0


def test_a_speculative_config_of_ours_is_recognised(tmp_path: Path) -> None:
    shipped = resolve_draft("smollm2-135m")
    settings = read_settings({"model": str(shipped), "num_speculative_tokens": 6, "enforce_eager": True})
    assert settings is not None
    assert settings.speculative_config() == {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": 6,
        "enforce_eager": True,
    }
    assert json.loads(json.dumps(settings.additional_config())) == {"longspec": {"draft": str(shipped)}}
    named = read_settings({"method": "longspec", "model": "smollm2-135m"})
    assert named is not None
    assert (named.folder, named.num_tokens) == (shipped, 4)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for others in (None, {"method": "ngram"}, {"model": str(tmp_path)}, {"model": "org/name"}):
        assert read_settings(others) is None
    for wrong, told in (
        ({"num_speculative_tokens": 7}, "num_speculative_tokens is 7; the draft .* was trained for 1 to 6"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max"),
    ):
        with pytest.raises(UserError, match=told):
            read_settings({"model": str(shipped), **wrong})
