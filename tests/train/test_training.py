"""Whole training runs, in real processes, as users start them."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from longspec import LongSpec
from longspec.hub import DEFAULT_TARGET, resolve
from longspec.models.draft_files import load_draft
from longspec.models.target import Transformer
from tests.train.tiny import BASE, launch, losses, make_dataset, make_target, run, taus


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and a dataset."""
    folder = tmp_path_factory.mktemp("training")
    make_target(folder / "target", resolve(DEFAULT_TARGET).folder)
    make_dataset(folder / "data")
    return folder


def settings(home: Path, name: str, *more: str, accumulation: int = 4) -> list[str]:
    return [
        *BASE,
        f"target.path={home / 'target'}",
        f"data.train=[{home / 'data'}]",
        f"run={home / name}",
        "stage.micro_batch=2",
        f"stage.accumulation={accumulation}",
        "draft.use_parent=true",
        *more,
    ]


@pytest.fixture(scope="session")
def unbroken(home: Path) -> Path:
    """A run of one process that nothing disturbed."""
    run(settings(home, "unbroken"))
    return home / "unbroken"


ZERO3 = ("deepspeed=zero3", "+deepspeed.config.zero_optimization.stage3_param_persistence_threshold=0")


@pytest.mark.parametrize(
    ("name", "launcher", "more", "accumulation"),
    [
        pytest.param("zero1", "deepspeed", (), 2, marks=pytest.mark.full),
        ("zero3", "torchrun", ZERO3, 2),
        pytest.param(
            "tensor-parallel",
            "torchrun",
            ("target.tp_size=2", "logger=wandb_offline"),
            4,
            marks=pytest.mark.full,
        ),
    ],
)
def test_two_processes_learn_exactly_what_one_does(
    home: Path, unbroken: Path, name: str, launcher: str, more: tuple[str, ...], accumulation: int
) -> None:
    # Shares of a target cannot be read by our kernels, which are what a GPU would choose.
    module = "longspec.train" if name == "zero1" else "tests.train.with_kernels"
    rare = ("evaluation.every=8", "saving.save_steps=8")
    run(settings(home, name, *rare, *more, accumulation=accumulation), 2, launcher, module)
    alone, together = losses(unbroken), losses(home / name)
    assert alone.keys() == together.keys() == set(range(1, 9))
    assert [together[step] for step in alone] == pytest.approx(list(alone.values()), rel=1e-5)
    weights = [draft_weights(folder) for folder in (unbroken, home / name)]
    for one, two in zip(*weights, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    texts = [json.loads((folder / "held_out.json").read_text()) for folder in (unbroken, home / name)]
    assert texts[0] == texts[1]
    assert taus(home / name) == pytest.approx({step: taus(unbroken)[step] for step in (0, 8)})
    assert bool(list((home / name).glob("wandb/offline-run-*"))) == ("logger=wandb_offline" in more)


def draft_weights(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    tensors = load_file(newest / "draft" / "model.safetensors")
    return [tensors[name] for name in sorted(tensors)]


def kill_all(pid: int) -> None:
    """With kill -9 the process and those it started, wherever the launcher put them."""
    whole = psutil.Process(pid)
    for one in [*whole.children(recursive=True), whole]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(home: Path, unbroken: Path, processes: int) -> None:
    name = f"killed-{processes}"
    wanted = settings(home, name, accumulation=4 // processes)
    process = launch(wanted, processes)
    folder = home / name
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "step-00000004").is_dir():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kill_all(process.pid)
    process.wait()
    # The newest checkpoint is damaged as a full disk would have: the one before it is taken.
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    victim = next(newest.glob("engine/*optim_states.pt"))
    victim.write_bytes(victim.read_bytes()[:100])
    refused = launch(wanted, processes)
    assert "resume=latest" in refused.communicate(timeout=120)[0]
    assert refused.returncode != 0
    output = run([*wanted, "resume=latest"], processes)
    assert "is skipped" in output
    assert not list((folder / "checkpoints").glob(".building-*"))
    found, expected = losses(folder), losses(unbroken)
    if processes == 1:
        assert found == expected
    else:
        assert list(found) == list(expected)
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)
    assert list(taus(folder)) == [0, 4, 8]


def test_a_damaged_checkpoint_is_named(
    home: Path, unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files have their sizes, so that only reading them tells."""
    from longspec.cli.main import main

    shutil.copytree(unbroken, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000008"
    for name in ("random-0.pt", "engine/zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        data = bytearray((checkpoint / name).read_bytes())
        data[100::50] = bytes(len(data[100::50]))
        (checkpoint / name).write_bytes(data)
        wanted = [one for one in settings(home, "unbroken") if not one.startswith("run=")]
        assert main(["train", *wanted, f"run={tmp_path / 'run'}", "resume=latest"]) == 2
        error = capsys.readouterr().err
        assert str(checkpoint) in error
        assert "remove that checkpoint" in error
    weights = checkpoint / "draft" / "model.safetensors"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "draft")]) == 2
    assert "is truncated or damaged" in capsys.readouterr().err


@pytest.mark.full
def test_several_lags_of_each_sequence(home: Path, unbroken: Path) -> None:
    drawn = ("stage.lags=3", "draft.use_parent=false")
    run(settings(home, "lags", *drawn))
    run(settings(home, "lags-2", *drawn, accumulation=2), 2)
    alone, together, single = (losses(home / name) for name in ("lags", "lags-2", "unbroken"))
    assert list(together.values()) == pytest.approx(list(alone.values()), rel=1e-5)
    # The mean over three lags is not the loss of one, and about as large.
    assert alone != single
    assert list(alone.values()) == pytest.approx(list(single.values()), rel=0.1)


@pytest.mark.full
def test_muon_learns_more_from_as_much_and_goes_on_alike(home: Path) -> None:
    # One lag at a time: with all of them, eight steps at this rate are too large for a toy.
    alone = "draft.use_parent=false"
    run(settings(home, "adamw", alone))
    wanted = settings(home, "muon", alone, "stage.optimizer=muon")
    run(wanted)
    folder, expected = home / "muon", losses(home / "muon")
    assert expected[8] < losses(home / "adamw")[8] - 0.01
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    run([*wanted, "resume=latest"])
    assert losses(folder) == expected
    run(settings(home, "muon-2", alone, "stage.optimizer=muon", accumulation=2), 2)
    assert list(losses(home / "muon-2").values()) == pytest.approx(list(expected.values()), rel=1e-3)


def test_it_learns_and_what_it_measures_is_what_decoding_does(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from longspec.cli.main import main

    # Small weights make a target that falls into loops, of which a draft soon learns some.
    shape = {"initializer_range": 0.05, "num_hidden_layers": 7}
    target_folder = make_target(tmp_path / "target", home / "target", **shape)
    more = [
        f"target.path={target_folder}",
        "stage.num_steps=40",
        "stage.lr=5e-3",
        "draft.cross_layers=[]",
        "draft.use_feature=true",
        "draft.lag_gate=true",
        "draft.draft_vocab=100",
    ]
    more += ["evaluation.new_tokens=40", "stage.soft=1.0", "saving.save_steps=40", "logger=tensorboard"]
    run(settings(home, "learnt", *more))
    folder = home / "learnt"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = losses(folder)
    assert sum(found[step] for step in (38, 39, 40)) < 0.8 * sum(found[step] for step in (1, 2, 3))
    assert main(["export", str(folder), str(tmp_path / "draft")]) == 0
    assert main(["plot", str(folder)]) == 0
    assert (folder / "plot.png").stat().st_size > 10_000
    assert list((folder / "tensorboard").iterdir())
    measured = [line for line in lines if "eval_tau" in line][-1]
    assert measured["eval_tau"] > 1.2 > lines[0]["eval_tau"]
    assert "tau" in (tmp_path / "draft" / "README.md").read_text()

    model = LongSpec.from_pretrained(
        str(target_folder), draft=str(tmp_path / "draft"), dtype="float32", device="cpu", calibrate=False
    )
    texts = json.loads((folder / "held_out.json").read_text())
    kept = rounds = 0
    by_depth = [0, 0, 0]
    for text in texts:
        answer = model.generate(text["prompt"], method="seq", gamma=3, max_new_tokens=40)
        assert answer.token_ids == text["tokens"]
        kept, rounds = kept + answer.tokens - 1, rounds + answer.rounds
        for depth, count in enumerate(answer.accepted_by_depth):
            by_depth[depth] += count
    assert kept / rounds == pytest.approx(measured["eval_tau"], rel=0.02)
    assert [count / rounds for count in by_depth] == pytest.approx(measured["eval_acceptance"], abs=0.02)
    published = tmp_path / "draft" / "draft_model_weights.pth"
    assert "self_attn.q_proj.weight" in torch.load(published, weights_only=True)
    target: Transformer = model.target
    loaded = load_draft(tmp_path / "draft", target, "tiny")
    assert loaded.acceptance["chain"] == measured["eval_acceptance"]
    layers = loaded.draft.config.cross_layers
    assert len(layers) == 5, "measured, because none are given"
    assert layers == tuple(range(layers[0], layers[0] + 5)), "evenly spaced; 7 layers have room for no gaps"
    assert 0 <= layers[0] <= 2


@pytest.mark.full
def test_three_stages_follow_each_other_by_one_command(home: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path / "long", length=64, seed=1)
    stages = {
        "base": ["stage=base", f"data.train=[{home / 'data'}]", "stage.seq_length=32"],
        "long": ["stage=long", f"data.train=[{tmp_path / 'long'}]", "stage.seq_length=64"],
        "cot": ["stage=cot", f"data.train=[{tmp_path / 'long'}]", "stage.seq_length=64"],
    }
    experiment = tmp_path / "conf" / "experiment"
    experiment.mkdir(parents=True)
    rest = {"draft": {"window": 16, "max_lag": 3}, "stages": stages}
    (experiment / "mine.yaml").write_text("# @package _global_\n" + json.dumps(rest))
    small = [one for one in BASE if not one.startswith(("stage.seq", "stage.max", "draft."))]
    run(
        [
            *("--config-dir", str(tmp_path / "conf"), "experiment=mine", "stage=all", *small),
            *(f"target.path={home / 'target'}", f"run={tmp_path / 'all'}", "stage.num_steps=2"),
            *("stage.batch=1", "evaluation.every=0"),
        ]
    )
    weights = [draft_weights(tmp_path / "all" / name) for name in stages]
    assert len(weights) == 3
    # Each stage starts where the one before ended: at these rates it stays near it.
    for one, two in zip(weights[1], weights[2], strict=True):
        torch.testing.assert_close(one, two, rtol=0.3, atol=0.05)
    from longspec.train.export import export

    card = (export(tmp_path / "all", tmp_path / "draft") / "README.md").read_text()
    assert [line.split("|")[1].strip() for line in card.splitlines() if "| 2 |" in line] == list(stages)

    # A stage alone, on a machine that has nothing but the draft: its card still tells of all before it.
    more = ["--config-dir", str(tmp_path / "conf"), "--only", "cot", "experiment=mine", "stage=all", *small]
    more += [f"target.path={home / 'target'}", f"run={tmp_path / 'more'}", "stage.num_steps=3"]
    run([*more, "stage.batch=1", "evaluation.every=0", f"draft.path={tmp_path / 'draft'}"])
    card = (export(tmp_path / "more", tmp_path / "later") / "README.md").read_text()
    told = [line.split("|")[1].strip() for line in card.splitlines() if "| 2 |" in line or "| 3 |" in line]
    assert told == [*stages, "cot"]


@pytest.mark.full
def test_a_run_whose_time_is_up_goes_on_as_if_nothing_had_been(home: Path, unbroken: Path) -> None:
    assert "stopped at step 1 of 8" in run(settings(home, "pieces", "saving.max_seconds=0.001"))
    run(settings(home, "pieces", "resume=latest"))
    assert losses(home / "pieces") == losses(unbroken)


@pytest.mark.full
def test_a_stage_whose_time_is_over_is_complete_at_a_low_rate(home: Path) -> None:
    """Also if it was stopped in between. Once it is complete, nothing is added."""
    from longspec.train.checkpoints import progress_of

    wanted = settings(home, "brief", "stage.num_steps=100000", "saving.stage_seconds=4", "evaluation.every=0")
    run([*wanted, "saving.max_seconds=2"])
    step, num_steps = progress_of(home / "brief")
    assert 1 < step < num_steps == 100000
    for _ in range(2):
        run([*wanted, "resume=latest"])
    step, num_steps = progress_of(home / "brief")
    assert 1 < step == num_steps < 100000
    lines = (home / "brief" / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["lr"] for line in lines]
    assert len(rates) == step
    highest = max(range(step), key=rates.__getitem__)
    assert rates[highest] > 5e-3
    assert rates[highest:] == sorted(rates[highest:], reverse=True), "it does not rise again"
    assert rates[-1] < 2e-3


def test_the_stages_of_the_shipped_draft(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from longspec.cli.main import main

    monkeypatch.setenv("SMOLLM2_DATA", "/data")
    command = ["train", "experiment=smollm2_gpu", "stage=all", "stage.lags=3", "--cfg", "job"]
    assert main(command) == 0
    printed = capsys.readouterr().out.split("name: smollm2_gpu_")[1:]
    stages = [yaml.safe_load(f"name: {one}") for one in printed]
    assert [stage["stage"]["seq_length"] for stage in stages] == [1024, 8192, 4096]
    assert [stage["stage"]["max_offset"] for stage in stages] == [-1, 0, 0]
    assert all(stage["compile"] and stage["stage"]["lags"] == 3 for stage in stages)
    assert [stage["stage"]["mask_prompt"] for stage in stages] == [True, True, False]
    assert all(stage["draft"]["cross_layers"] == [] for stage in stages), "chosen by measurement"
    assert [stage["draft"]["path"] for stage in stages] == [
        *(None, "outputs/smollm2_gpu/base", "outputs/smollm2_gpu/long")
    ]
    assert main([*command, "--only", "middle"]) == 2
    assert "the stages base, long, cot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stage.lrr=1", "'lrr' not in 'StageSettings'"),
        ("stage.lr=fast", "stage.lr=fast"),
        ("stage=middle", "options in 'stage': all base cot long"),
        ("data.train=ds", "a list has brackets, as in [data/own]"),
        ("target.path=/nowhere", "/nowhere"),
        ("data.num_held_out=-1", "data.num_held_out is -1; it must be at least 0"),
        (
            "stage.seq_length=1024",
            "60 sequences of 32 tokens make 1 of stage.seq_length 1024: none would",
        ),
        ("data.train=[/nowhere]", "/nowhere does not exist"),
        ("stage.seq_length=48", "sequences of 32 tokens, and stage.seq_length 48 is not"),
        ("stage.seq_length=16", "sequences of 32 tokens, and stage.seq_length 16 is not"),
        ("stage.seq_length=2048", "60 sequences of 32 tokens; 64 make one of 2048"),
        ("data.train=[HOME/data,HOME/target/../data]", "the held-out sequences are at its end"),
        ("evaluation.gamma=4", "evaluation.gamma is 4 and the draft has 3 lags"),
        ("data.num_held_out=60", "data.num_held_out is 60, and 60 sequences of 32 tokens make 60 of"),
        ("stage.lag_decay=0", "above 0 and at most 1"),
        ("stage.lags=2", "learns all lags of a sequence"),
        ("stage.lr=nan", "stage.lr is nan; a finite number is needed"),
        ("stage.epochs=inf", "stage.epochs is inf"),
        (f"stage.num_steps={'9' * 400}", "stage.num_steps is 9999"),
        ("seed=-1", "seed is -1; it must lie between 0 and 4294967295"),
        ("deepspeed.config.zero_optimization=x", "zero_optimization is 'x'; a stage from 0 to 3"),
        ("data.train=[[a]]", "data.train names ['a']; a folder is needed"),
        ("stage.max_offset=500", "at most 224"),
        ("target.tp_size=2", "does not divide the 1 processes"),
        ("draft.cross_layers=[7]", "cross layer 7"),
        ("draft.path=/nowhere", "no draft '/nowhere'"),
        ("resume=yes", "latest"),
        ("logger.wandb=sometimes", "online, offline or disabled"),
        ("run=HOME/data/dataset.json", "dataset.json is a file; name a folder that is new or empty"),
        ("run=HOME/target", "target is not empty and has no run: give another run=FOLDER"),
    ],
)
def test_bad_settings_are_named(
    home: Path, tmp_path: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from longspec.cli.main import main

    wanted = [one for one in settings(home, "never") if not one.startswith("run=")]
    override = override.replace("HOME", str(home))
    assert main(["train", *wanted, f"run={tmp_path / 'run'}", override]) == 2
    assert message in capsys.readouterr().err


def test_two_processes_do_not_write_one_run(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from longspec.cli.main import main
    from longspec.data.work import locked

    wanted = [one for one in settings(home, "never") if not one.startswith("run=")]
    with locked(tmp_path / "run"):
        assert main(["train", *wanted, f"run={tmp_path / 'run'}"]) == 2
        assert f"another process works in {tmp_path / 'run'}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_shorter_sequences_are_joined_and_their_documents_stay_apart(tmp_path: Path) -> None:
    from longspec.data.collate import collate
    from longspec.train.samples import Mixture

    whole, short = make_dataset(tmp_path / "whole", 128, 5), make_dataset(tmp_path / "short", 32, 11, seed=1)
    mixture = Mixture([str(short), str(whole), str(short)], 128)
    assert len(mixture) == 2 + 5 + 2
    single = Mixture([str(short)], 32)
    for index in (1, 8):  # the same sequences, named twice
        joined, parts = mixture[index], [single[4 + part] for part in range(4)]
        assert joined.tokens.tolist() == [token for part in parts for token in part.tokens]
        batch, apart = collate([joined], "long", True), collate(parts, "long", True)
        assert torch.equal(batch.learn.view(4, 32), apart.learn)
        assert torch.equal(batch.starts.view(4, 32) - 32 * torch.arange(4)[:, None], apart.starts)
    assert mixture[2].tokens.tolist() == Mixture([str(whole)], 128)[0].tokens.tolist()


def test_lags_spread_evenly_are_not_drawn_by_decay(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from longspec.cli.main import main

    assert main(["train", *settings(home, "never", "stage.lags=2", "stage.lag_decay=0.5")]) == 2
    assert "spread evenly" in capsys.readouterr().err


def test_tensor_parallel_refusals() -> None:
    from longspec.errors import UserError
    from longspec.train.parallel import check_tp
    from tests.decoding.scripted import tiny_target

    config = tiny_target(num_heads=6, num_kv_heads=3).config
    with pytest.raises(UserError, match="num_kv_heads 3"):
        check_tp(config, 2, 2, 1)
    with pytest.raises(UserError, match="ZeRO-3"):
        check_tp(config, 3, 3, 3)


def test_the_defaults_follow_target_data_and_memory(home: Path, tmp_path: Path) -> None:
    import numpy as np
    from omegaconf import OmegaConf

    from longspec.data.shards import Packed, Role, finish, write_shard
    from longspec.errors import UserError
    from longspec.train.build import build
    from longspec.train.command import compose_config
    from longspec.train.engine import Processes
    from longspec.train.samples import Mixture
    from longspec.train.trainer import fit_into_memory

    overrides = [f"target.path={home / 'target'}", f"data.train=[{home / 'data'}]", "stage.seq_length=32"]
    settings = OmegaConf.to_object(compose_config([*overrides, "stage.batch=24"]))
    device = torch.device("cpu")
    parts = build(settings, device, False)  # type: ignore[arg-type]
    assert parts.pair.draft.config.cross_layers == (0, 1, 2), "all of the three layers that there are"
    stage = fit_into_memory(settings.stage, parts, Processes(0, 1, 1), device)  # type: ignore[union-attr]
    assert (stage.optimizer, stage.micro_batch * stage.accumulation) == ("muon", 24)
    again = fit_into_memory(settings.stage, parts, Processes(0, 1, 1), device, before=2)  # type: ignore[union-attr]
    assert (again.micro_batch, again.accumulation) == (2, 12), "as many as before, whatever is free now"
    with pytest.raises(UserError, match=r"stage\.batch 24 is not a multiple of the 5 processes"):
        fit_into_memory(settings.stage, parts, Processes(0, 5, 1), device)  # type: ignore[union-attr]

    # The vocabulary covers what is written, whatever the prompts say.
    chance, vocabulary = np.random.default_rng(0), 20_000
    tokens = np.minimum(chance.zipf(1.5, (200, 64)), vocabulary - 1)
    roles = np.full(64, Role.TEXT, np.uint8)
    roles[:32] = Role.PROMPT
    tokens[:, :32] = 19_999
    write_shard(tmp_path, 0, [Packed(row, roles, np.zeros(1, np.int32)) for row in tokens], vocabulary, [])
    finish(tmp_path, 1, vocabulary, None, {})
    mixture = Mixture([str(tmp_path)], 64)
    written = tokens[:, 32:]
    for share in (0.9, 0.998):
        size = mixture.covering_size(share)
        kept = mixture.frequent(size, [], vocabulary)
        assert np.isin(written, kept).mean() >= share
        assert np.isin(written, kept[: size - 1024]).mean() < share


def test_a_resumed_run_keeps_the_layers_that_it_chose(home: Path, unbroken: Path) -> None:
    from omegaconf import OmegaConf

    from longspec.train.build import build
    from longspec.train.command import compose_config

    wanted = compose_config([*settings(home, "unbroken"), "draft.cross_layers=[]", "resume=latest"])
    parts = build(OmegaConf.to_object(wanted), torch.device("cpu"), False)  # type: ignore[arg-type]
    assert parts.pair.draft.config.cross_layers == (-1,), "not the three that measuring gives"


def test_published_experiments_compose() -> None:
    from longspec.train.command import compose_config

    name = "qwq_glide_8gpu_slim6b"
    base = compose_config([f"experiment={name}"])
    assert (base.stage.seq_length, base.stage.lr, base.stage.accumulation) == (1024, 5e-4, 128)
    assert base.deepspeed.config.zero_optimization == {
        "stage": 1,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    assert base.target.path == "qwq"
    assert compose_config([f"experiment={name}_sinkpi-slicing"]).stage.max_offset == -1
    assert base.stage.max_offset == 0
    for prefix in (name, f"{name}_sinkpi-slicing"):
        long_name = f"{prefix}_longv2-32k-zero3_5e-6-ligce-nomask"
        long = compose_config([f"experiment={long_name}"])
        assert (long.stage.seq_length, long.stage.lr, long.stage.accumulation) == (32768, 5e-6, 8)
        assert long.deepspeed.config.zero_optimization.stage == 3
        assert (long.draft.path, long.stage.mask_prompt) == (f"outputs/{prefix}", False)
        cot = compose_config([f"experiment={long_name}_longcot_5e-6"])
        assert (cot.stage.collator, cot.stage.accumulation) == ("cot", 32)
        assert cot.draft.path == f"outputs/{long_name}"
