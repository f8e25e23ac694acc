"""A draft that is let read more layers drafts as before, until it is trained on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from longspec import LongSpec
from longspec.hub import DEFAULT_TARGET, resolve
from recipes.smollm2.grow import main
from tests.train.tiny import BASE, make_dataset, make_target, run

ROOT = Path(__file__).parents[2]


def grow(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recipes.smollm2.grow", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_a_grown_draft_drafts_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = grow("smollm2-135m", tmp_path / "grown", "--cross-layers", "4,9,14,19,24,29", "--max-lag", 8)
    assert done.returncode == 0, done.stderr
    gates = load_file(tmp_path / "grown" / "model.safetensors")["lag_scale"].view(8, -1)
    assert (gates[6:] == gates[5]).all()
    assert (gates[5] != gates[4]).any()
    rounds = []
    for draft in ("smollm2-135m", str(tmp_path / "grown")):
        model = LongSpec.from_pretrained("smollm2-135m", draft, device="cpu", calibrate=False)
        answer = model.generate("Name three rivers.", method="tree", tree_shape=(4, 8, 8), max_new_tokens=20)
        rounds.append((answer.rounds, answer.accepted_by_depth, answer.token_ids))
    assert rounds[0] == rounds[1]
    assert main(["smollm2-135m", str(tmp_path / "grown")]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.full
def test_a_grown_draft_is_trained_on(tmp_path: Path) -> None:
    make_target(tmp_path / "target", resolve(DEFAULT_TARGET).folder)
    make_dataset(tmp_path / "data")
    given = [*BASE, f"target.path={tmp_path / 'target'}", f"data.train=[{tmp_path / 'data'}]"]
    first = [f"run={tmp_path / 'first'}", "draft.cross_layers=[-2]", "draft.draft_vocab=64"]
    first += ["draft.use_feature=true"]
    run([*given, *first])
    folder = tmp_path / "first" / "checkpoints" / "step-00000008" / "draft"
    grown = tmp_path / "grown"
    done = grow(folder, grown, "--cross-layers", "0,1,2", "--draft-vocab", 32, "--lag-gate")
    assert done.returncode == 0, done.stderr
    run([*given, f"run={tmp_path / 'second'}", f"draft.path={grown}"])
    before = load_file(grown / "model.safetensors")
    after = load_file(tmp_path / "second" / "checkpoints" / "step-00000008" / "draft" / "model.safetensors")
    answers = "cross_attn.o_proj.weight"
    share = before[answers].shape[1] // 3
    assert not before[answers][:, :share].any()
    assert before[answers][:, share : 2 * share].any()
    assert after[answers][:, :share].any()  # what the new layer answers counts by now
    assert (before["lag_scale"] == 1).all()
    assert not before["lag_shift"].any()
    assert after["lag_shift"].any()
    assert len(after["vocab_ids"]) == 32
    assert after["vocab_ids"].tolist() == load_file(folder / "model.safetensors")["vocab_ids"][:32].tolist()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--cross-layers", "9,9,19"), "the draft reads 9,14,19,24,29"),
        (("--cross-layers", "29,24,19,14,9"), "in rising order"),
        (("--cross-layers", "9,14,19,24,29,30"), "from 0 to 29"),
        (("--draft-vocab", "50000"), "the draft has 16384"),
        (("--max-lag", "0"), "from 1 to 32"),
    ],
)
def test_what_cannot_be_is_named(
    tmp_path: Path, flags: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["smollm2-135m", str(tmp_path / "grown"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "grown").exists()
