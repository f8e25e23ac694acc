"""The draft beside another engine: that engine's KV and hidden states, our ring, chains row by row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.vllm_draft import make_parser, our_engine, requests_each, rounds_of
from longspec import LongSpec, UserError
from longspec.hub import resolve_draft
from longspec.models.layers import Linear, scores
from longspec.models.rope import RopeTable
from longspec.vllm.captured import CapturedChains
from longspec.vllm.chain import ChainParts, CrossAttention, Roots, draft_chain
from longspec.vllm.ring import BatchRing, RingRows
from longspec.vllm.roots import DraftedRequests, find_roots
from longspec.vllm.settings import PROPOSER, read_settings

GAMMA = 4
QUESTION = "Count from one to thirty in words, and say for each number whether it is even."
# Long enough that the ring does not hold all of it.
LONG = QUESTION + " Here is a text that does not matter." * 60


class OtherEngine:
    """transformers' target with the KV of whole texts; row b may read the first `lengths[b]` entries."""

    def __init__(self, folder: Path, texts: list[Any]) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.embedding, self.head = model.get_input_embeddings(), model.lm_head
        self.kv: list[list[tuple[Tensor, Tensor]]] = []
        self.hidden: list[Tensor] = []
        for text in texts:
            out = model(torch.from_numpy(text)[None], output_hidden_states=True, use_cache=True)
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


@torch.inference_mode()
def test_chains_beside_another_engine_are_those_of_ours(whole_head: LongSpec, smollm2_folder: Path) -> None:
    """Three requests with texts of different lengths, two at a time: each round keeps as many tokens as our
    own engine's, whether the chains are launched directly or as a batch that is recorded."""
    encode, vocab_size = whole_head.encoder.encode, whole_head.target.config.vocab_size
    prompts = [encode(prompt, False, vocab_size) for prompt in (QUESTION, LONG, "Name three colours.")]
    answers = [
        whole_head.generate(ids, method="seq", gamma=GAMMA, max_new_tokens=40, temperature=0)
        for ids in prompts
    ]
    texts = [np.array(ids + answer.token_ids) for ids, answer in zip(prompts, answers, strict=True)]
    # Without the prompt's own token and the last round, which the limit may have cut.
    expected = [rounds_of(answer.depths)[1:-1] for answer in answers]
    assert sum(map(len, expected)) > 30
    assert max(map(max, expected)) > 3
    other = OtherEngine(smollm2_folder, texts)
    for captured in (False, True):
        parts = make_parts(whole_head.engine.models.draft, other)
        chains = CapturedChains(parts, GAMMA, other.over, lambda work: work)

        def draft(
            roots: Roots,
            table: Tensor,
            captured: bool = captured,
            parts: ChainParts = parts,
            chains: Any = chains,
        ) -> Tensor:
            if captured:
                return chains(roots, table)
            return draft_chain(parts, roots, GAMMA, other.over(table, roots.positions))

        begins = [len(ids) for ids in prompts]
        assert decode(parts, other, draft, texts, begins, list(map(len, expected))) == expected


def decode(
    parts: ChainParts,
    other: OtherEngine,
    draft: Callable[[Roots, Tensor], Tensor],
    texts: list[Any],
    positions: list[int],
    num_rounds: list[int],
) -> list[list[int]]:
    """How many tokens the rounds of each request keep, whose target says `texts`."""
    rows, kept = RingRows(2), [list[int]() for _ in texts]
    names = [f"request {number}" for number in range(len(texts))]
    turn = 0
    while waiting := [number for number in range(len(texts)) if len(kept[number]) < num_rounds[number]]:
        # At most two run at once, so that each loses its row of the ring now and then.
        waiting = sorted(waiting[turn % len(waiting) :][:2])
        turn += 1
        now = [positions[number] for number in waiting]
        feature = torch.stack([other.hidden[number][positions[number] - 1] for number in waiting])
        drafted = DraftedRequests(
            [names[number] for number in waiting], [texts[number] for number in waiting], now, feature
        )
        roots = find_roots(parts, rows, drafted, names, GAMMA)
        for number, chain in zip(waiting, draft(roots, torch.tensor(waiting)[:, None]).tolist(), strict=True):
            truth = texts[number][positions[number] + 1 :]
            agreed = next((n for n in range(GAMMA) if chain[n] != truth[n]), GAMMA)
            kept[number].append(agreed + 1)
            positions[number] += agreed + 1
    return kept


def make_parts(draft: Any, other: OtherEngine) -> ChainParts:
    config = draft.target_config
    rope = RopeTable(config.rope, config.head_dim)
    rope.reserve(2048)
    ring = BatchRing(config, draft.config, 2, GAMMA, torch.device("cpu"), torch.float32)
    head = Linear(config.hidden_size, len(draft.vocab_ids))
    head.weight = torch.nn.Parameter(other.head.weight[draft.vocab_ids], requires_grad=False)
    return ChainParts(
        draft, rope, ring, other.embedding, lambda hidden: draft.vocab_ids[scores(head, hidden).argmax(-1)]
    )


def test_the_benchmark_gives_our_engine_the_next_request_when_one_ends(
    whole_head: LongSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LongSpec, "from_pretrained", lambda *_, **__: whole_head)
    counts = ["--concurrency", "1", "2", "--requests", "3", "4"]
    given = make_parser().parse_args(["folder", "prompts.jsonl", "--cpu", "--system", "ours-seq", *counts])
    assert requests_each(given) == [3, 4]
    size = whole_head.target.config.vocab_size
    prompts = [whole_head.encoder.encode(f"{number}: {QUESTION}", False, size) for number in range(3)]
    asked: list[Any] = []
    running: list[int] = []
    submit = whole_head.engine.submit

    def counted(sequences: list[Any]) -> None:
        asked.extend(sequences)
        running.append(sum(not one.finished for one in asked))
        submit(sequences)

    monkeypatch.setattr(whole_head.engine, "submit", counted)
    found = our_engine(given)(prompts, 2, 10)
    assert running == [1, 2, 2], "with ten tokens, the draft that ships lets one of the two end first"
    alone = whole_head.generate(prompts, method="seq", gamma=4, max_new_tokens=10, temperature=0)
    assert found == [rounds_of(one.depths) for one in alone]


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
        ({"num_speculative_tokens": 9}, "num_speculative_tokens is 9; the draft .* was trained for 1 to 8"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max"),
    ):
        with pytest.raises(UserError, match=told):
            read_settings({"model": str(shipped), **wrong})
