"""Which layers of a target can copy, and which of them a draft reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from longspec.hub import DEFAULT_TARGET
from longspec.models import copying
from longspec.models.copying import copying_layers, copying_scores, read_share
from longspec.models.pair import load_pair

CPU = torch.device("cpu")


def test_layers_that_copy_are_found() -> None:
    target = load_pair(DEFAULT_TARGET, None, None, CPU, torch.float32).target
    scores = copying_scores(target)
    assert len(scores) == target.config.num_layers
    assert min(scores[18], scores[23]) > 0.2
    assert min(scores[20], scores[24]) > 0.1
    assert max(scores[:17] + scores[25:]) < 0.03
    # Its best head finds nearly as well as that of layer 18, but little can be read from what it finds.
    assert scores[17] < 0.1
    assert copying_layers(scores) == (20, 21, 22, 23, 24)
    assert copying_scores(target) == scores, "all processes of a run must choose the same layers"


def test_heads_find_by_weights_of_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `transformers` computes them, for query heads in groups and with norms of queries and keys. What can
    be read is given."""
    read = torch.tensor([0.5, 1.0])
    monkeypatch.setattr(copying, "read_share", lambda *_: read)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
    )
    reference = Qwen3ForCausalLM(config).eval()
    reference.set_attn_implementation("eager")  # the only one that returns its weights
    reference.save_pretrained(tmp_path)
    target = load_pair(str(tmp_path), None, None, CPU, torch.float32).target
    seen: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Tensor, object], hidden: Tensor) -> None:
        seen.extend((inputs[0], hidden))

    target.register_forward_hook(note)
    scores = copying_scores(target)
    tokens, hidden = seen
    with torch.no_grad():
        found = reference.model(tokens, output_attentions=True)
    torch.testing.assert_close(hidden, found.last_hidden_state, atol=1e-4, rtol=1e-4)
    for score, weights in zip(scores, found.attentions, strict=True):
        means = torch.zeros(6)
        places = [(row, place) for row in range(len(tokens)) for place in range(50, 100)]
        for row, place in places:
            first = tokens[row].tolist().index(int(tokens[row, place]))
            means += weights[row, :, place, first + 1] / len(places)
        assert score == pytest.approx(float((means.view(2, 3).amax(1) * read).max()), rel=1e-3)


def test_what_can_be_read() -> None:
    """From a linear function of the tokens' embeddings all, from noise next to nothing: the fit has room to
    learn its texts by heart, but other texts are asked."""
    generator = torch.Generator().manual_seed(0)
    table = torch.nn.functional.normalize(torch.randn(40, 16, generator=generator), dim=1)
    tokens = torch.randint(40, (16, 8), generator=generator)
    embedded = table[tokens]
    readable = embedded @ torch.randn(16, 128, generator=generator) + 3
    noise = torch.randn(readable.shape, generator=generator)
    share = read_share(torch.stack((readable, noise), 2), tokens, embedded)
    assert share[0] == 1
    assert share[1] < 0.2


def test_the_evenly_spaced_layers_with_the_largest_sum() -> None:
    scores = [0.0] * 20
    assert copying_layers(scores) == (15, 16, 17, 18, 19), "the later ones if all are alike"
    scores[2] = scores[6] = 0.5
    assert copying_layers(scores) == (2, 6, 10, 14, 18), "both, and the later ones of those with both"
    scores[3] = scores[4] = 0.4
    assert copying_layers(scores) == (2, 3, 4, 5, 6)
    assert copying_layers(scores, 2) == (2, 6)
    assert copying_layers(scores, 1) == (6,)
    assert copying_layers([0.0, 0.9, 0.0]) == (0, 1, 2), "all of a target with few layers"
    assert copying_layers([0.9] + 5 * [0.0]) == (0, 1, 2, 3, 4)
