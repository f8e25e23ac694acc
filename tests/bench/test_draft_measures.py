"""What is told of a draft: tau without loops, tau by context from a file, and the table in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longspec import LongSpec, UserError
from longspec.bench.runners import OurMethod
from longspec.bench.summary import summarise
from longspec.cli.main import main
from longspec.config import DraftConfig
from longspec.decoding.methods import Tree
from longspec.decoding.methods.registry import read_label
from longspec.models.draft import GlideDraft
from longspec.models.draft_files import load_draft
from tests.bench.rows import made_row


def test_a_loop_at_the_end_does_not_flatter_tau() -> None:
    # Ten tokens by rounds of two, then a loop of three tokens that is drafted four deep.
    words, loop = list(range(100, 110)), [7, 8, 9] * 14
    ids = [1, *words, *loop]
    depths = [0, *([1, 0] * 5), *([1, 2, 3, 4, 0] * 9)][: len(ids)]
    rounds = 5 + 9
    row = made_row("seq:4", token_ids=[ids], depths=[depths], rounds=rounds, decoded_tokens=len(ids) - 1)
    figures = summarise([row])[0]
    assert figures.tau == pytest.approx((len(ids) - 1) / rounds)
    # The first time round is no repetition yet: 13 tokens, by five rounds and three tokens of a sixth.
    assert figures.tau_without_loops == pytest.approx(13 / 6)
    still = made_row("seq:4", token_ids=[ids[:11]], depths=[depths[:11]], rounds=5, decoded_tokens=10)
    assert summarise([still])[0].tau_without_loops == summarise([still])[0].tau == 2


def test_the_best_nodes_of_a_larger_tree_are_asked_for_by_label() -> None:
    assert read_label("tree:8x32@64") == Tree((8, 32), 64)
    assert read_label("tree:8x32@64+12") == Tree((8, 32), 64, num_lookup=12)
    assert read_label("tree:+12").label == "tree:4x16x16x16x11+12"
    assert read_label("magicdec:3:window=64").label == "magicdec:3:window=64"
    wrong = {
        "seq:4@8": "'4@8' is no size",
        "tree:8x8@many": "'8x8@many' is no size",
        "vanilla:4": "takes no size",
        "seq:window=3": "'seq' has no option 'window'; it is an option of magicdec",
        "lookup:max_ngram=few": "max_ngram is 'few'",
    }
    for label, named in wrong.items():
        with pytest.raises(UserError, match=named):
            read_label(label)


def test_acceptance_can_be_set_in_a_label(smollm2: LongSpec) -> None:
    assert OurMethod(smollm2, "tree:2x4").same_when_sampled
    assert not OurMethod(smollm2, "tree:2x4:acceptance=rejection").same_when_sampled
    with pytest.raises(UserError, match="acceptance 'luck' is unknown"):
        OurMethod(smollm2, "tree:acceptance=luck")


@pytest.mark.parametrize(
    "label",
    [
        "magicdec:2:sinks=1:window=2",
        "seq:3:min_confidence=0.99",
        "vanilla",
        "lookup:3",
        "seq:2",
        "tree:2x4",
        "tree:2x4@5",
        "tree:2x4@5+3",
        "tree:1x1",
    ],
)
def test_what_ran_is_told_by_the_label_that_asks_for_it(smollm2: LongSpec, label: str) -> None:
    (answer,) = OurMethod(smollm2, label).answers([[1, 2, 3, 1, 2]], 4, 0.0, [0])
    assert answer.ran == label


def test_what_is_told_of_a_tree_is_what_ran(smollm2: LongSpec) -> None:
    asked: dict[str, Any] = {"method": "tree", "tree_shape": (2, 4), "max_new_tokens": 4, "num_lookup": 3}
    drawn = smollm2.generate("Hi", **asked, max_nodes=3, temperature=0.7, acceptance="rejection")
    assert (drawn.tree_shape, drawn.label) == ([2, 4], "tree:2x4")
    whole = smollm2.generate("Hi", **asked, max_nodes=400)
    assert whole.label == "tree:2x4+3"


def test_tau_by_context_goes_from_a_file_into_the_drafts_folder(
    tiny: LongSpec, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = tmp_path / "draft"
    target = tiny.target
    made = GlideDraft(target.config, DraftConfig(window=32))
    made.initialise()
    made.save_pretrained(draft, target, "tiny")
    (draft / "README.md").write_text("# A draft\n\nIts story.\n")
    texts = [
        {"context": "too short", "input": "What?"},
        {"context": "They met and spoke about the budget. " * 60, "input": "What did they say?"},
        {"text": "A long book of many words, and then some more.\n" * 60},
        {"context": "One more than is asked for. " * 60, "input": "Why?"},
    ]
    source = tmp_path / "meetings.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in texts))
    run = tmp_path / "run"
    command = [
        "bench",
        "context",
        "--target",
        str(tiny_folder),
        "--draft",
        str(draft),
        "--source",
        str(source),
    ]
    methods = "seq:3,tree:2x2x2,tree:2x4x4@5,tree:2x4x4@9+3"
    command += ["--lengths", "100,180", "--limit", "2", "--methods", methods]
    command += ["--max-new-tokens", "12", "--repeats", "1", "--device", "cpu", "--output", str(run), "--json"]
    assert main(command) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    rows = [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]
    assert {row["prompt_tokens"] for row in rows} == {100, 180}
    assert {row["item"] for row in rows} == {"2-100", "3-100", "2-180", "3-180"}
    assert all(figure["different"] == 0 and figure["tau_without_loops"] for figure in figures)

    for _ in range(2):  # a second time it replaces what it wrote
        assert main(["bench", "acceptance", str(run), "--draft", str(draft)]) == 0
    table = load_draft(draft, target, "tiny").acceptance
    assert (len(table["chain"]), list(table["trees"])) == (3, ["2,2,2", "2,4,4/5", "2,4,4/9+3"])
    first = sum(1 for row in rows if row["method"] == "seq:3" for depth in row["depths"][0] if depth == 1)
    rounds = sum(row["rounds"] for row in rows if row["method"] == "seq:3")
    assert table["chain"][0] == pytest.approx(first / rounds, abs=1e-4)
    card = (draft / "README.md").read_text()
    assert card.startswith("# A draft\n\nIts story.\n")
    assert card.count("## Measured") == 1
    assert card.count("| meetings/180 | 2 | 180 | 0 | tree:2x4x4@5 |") == 1
    capsys.readouterr()
    assert main(["bench", "context", "--source", "nowhere.jsonl"]) == 2
    assert "'nowhere.jsonl' is unknown and no file" in capsys.readouterr().err
