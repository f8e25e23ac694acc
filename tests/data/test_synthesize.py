"""`longspec data synthesize`: real processes, the real target, small ones where it takes many samples."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from longspec import LongSpec
from longspec.data.options import SynthesisOptions
from longspec.data.samples import Script
from longspec.data.screen import SeenTexts, is_repetitive, loop_start, signature
from longspec.data.shards import Dataset, Role
from longspec.data.synthesize import Writer, synthesize
from longspec.decoding.methods import VANILLA
from longspec.decoding.sampling import Sampling
from longspec.engine.load import load_models
from longspec.engine.make import make_engine
from longspec.engine.sequence import Sequence
from longspec.errors import UserError


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "longspec", "data", "synthesize", *map(str, arguments)]


def texts(folder: Path, tokenizer: Any) -> list[tuple[str, str]]:
    """What was given and what was written, of every sample of a single turn."""
    dataset, found = Dataset(folder), []
    for packed in (dataset[index] for index in range(len(dataset))):
        for start, end in pairwise([*packed.starts.tolist(), len(packed.tokens)]):
            tokens, roles = packed.tokens[start:end], packed.roles[start:end]
            if roles[0] == Role.PAD:
                assert (roles == Role.PAD).all()
                continue
            parts = [tokenizer.decode(tokens[roles == role]) for role in (Role.PROMPT, Role.TEXT)]
            found.append((parts[0], parts[1]))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_rows_and_their_neighbours_change_nothing(tiny: LongSpec) -> None:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(40, 4000, (1 + 7 * n % 30,), generator=generator).tolist() for n in range(24)]
    limits, temperatures = [1 + 5 * n % 23 for n in range(24)], [(0.0, 0.6, 1.0)[n % 3] for n in range(24)]
    alone = [
        tiny.generate(prompt, max_new_tokens=limit, temperature=warm, seed=n, eos_ids=(), method="vanilla")
        for n, (prompt, limit, warm) in enumerate(zip(prompts, limits, temperatures, strict=True))
    ]
    ends = frozenset(one.token_ids[len(one.token_ids) // 2] for one in alone[::9])
    expected = []
    for one in alone:
        stop = next((at for at, token in enumerate(one.token_ids) if token in ends), one.tokens)
        expected.append(one.token_ids[: stop + 1])
    orders = []
    for rows in (3, 16, 16):
        engine = make_engine(tiny.target, max_rows=rows, max_length=80)
        asked = [
            Sequence(prompt, limit, Sampling(warm), n, ends, VANILLA)
            for n, (prompt, limit, warm) in enumerate(zip(prompts, limits, temperatures, strict=True))
        ]
        orders.append([one.seed for one in engine.run_each(iter(asked))])
        assert [one.tokens for one in asked] == expected
        assert all((one.finish_reason == "eos") == (one.tokens[-1] in ends) for one in asked)
        assert sorted(orders[-1]) == list(range(24))
        assert engine.statistics.held_pages == 0
    assert orders[1] == orders[2], "who runs beside whom does not follow from time"


def test_loops_and_near_duplicates_are_found() -> None:
    generator = np.random.default_rng(0)
    prose = generator.integers(0, 5000, 300)
    for period in (1, 2, 7, 31, 100):
        loop = np.tile(generator.integers(5000, 9000, period), 400)[: max(3 * period, 40)]
        assert loop_start(np.concatenate((prose, loop))) == 300 + period
        assert loop_start(np.concatenate((prose, loop, prose[:1]))) is None
        assert loop_start(loop[: 2 * period + 1]) is None
    assert not is_repetitive(prose)
    counted = np.concatenate([[100 + number, *range(12)] for number in range(30)])
    assert loop_start(counted) is None
    assert is_repetitive(counted)
    seen = SeenTexts()
    assert seen.add(signature(prose, 0))
    changed = prose.copy()
    changed[[50, 200]] = 1
    assert not seen.add(signature(changed, 0))
    assert seen.add(signature(changed, 1)), "a question and an answer are not compared"
    others = [signature(generator.integers(0, 5000, 300), 0) for _ in range(200)]
    assert all(seen.add(keys) for keys in others)
    half = np.concatenate((prose[:150], generator.integers(0, 5000, 150)))
    assert seen.add(signature(half, 0))


def test_the_target_asks_itself_and_answers(smollm2: LongSpec, tmp_path: Path) -> None:
    (tmp_path / "topics").write_text("Write a Python function\n\nTranslate to French:\n")
    flags = ["--tokens", 60, "--batch", 4, "--max-new-tokens", 16, "--max-question-tokens", 40]
    flags += ["--shard-samples", 4]
    made = subprocess.run(
        command("--output", tmp_path / "own", "--prefixes", tmp_path / "topics", "--json", *flags),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stderr
    summary = json.loads(made.stdout)
    assert summary["num_samples"] == summary["kept"] + sum(summary["dropped"].values())
    assert summary["num_tokens"] >= 60
    assert summary["tokens_per_second"] > 0
    found = texts(tmp_path / "own", smollm2.tokenizer)
    assert len(found) == summary["kept"]
    before = "<|im_start|>user\n"
    for question, answer in found:
        asked = question.split(before)[1].removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        assert asked.startswith(("Write a Python function", "Translate to French:"))
        assert question.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert answer.strip()
        letters = sum(character.isascii() for character in answer)
        assert letters > 0.8 * len(answer), answer
    (source,) = Dataset(tmp_path / "own").info.sources
    assert (source.name, source.licence) == ("written by smollm2-135m (questions)", "apache-2.0")


def test_given_prompts_are_answered_as_generate_would(smollm2: LongSpec, tmp_path: Path) -> None:
    question = "What is the capital of France?"
    talk = [
        {"role": "system", "content": "You answer with one word."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Name a colour."},
    ]
    turns = [question, "And of Germany?"]
    lines: list[dict[str, Any]] = [
        {"prompt": "What is the capital of Spain?"},
        {"messages": [*talk, {"role": "assistant", "content": "ignored"}]},
        {"turns": turns},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    made = synthesize(
        SynthesisOptions(
            tmp_path / "data",
            tokens=1,
            modes={"prompts": 1},
            prompts=path,
            temperatures=(0.0,),
            max_new_tokens=24,
            batch=3,
            shard_samples=3,
        )
    )
    assert (made.kept, made.dropped) == (3, {})
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0, "method": "vanilla"}
    first = smollm2.generate(turns[0], **options)
    told = [("user", turns[0]), ("assistant", first.text), ("user", turns[1])]
    second = smollm2.generate([{"role": role, "content": text} for role, text in told], **options)
    answers = [answer for _, answer in texts(tmp_path / "data", smollm2.tokenizer)]
    expected = {
        smollm2.tokenizer.decode(smollm2.generate(asked, **options).token_ids)
        for asked in (lines[0]["prompt"], talk)
    }
    both = smollm2.tokenizer.decode(first.token_ids) + smollm2.tokenizer.decode(second.token_ids)
    assert set(answers) == expected | {both}


@pytest.fixture(scope="session")
def parrot_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that says the last token again and again."""
    folder = tmp_path_factory.mktemp("parrot")
    shutil.copytree(tiny_folder, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
    save_file(weights, folder / "model.safetensors")
    return folder


def test_loops_and_repetitions_are_dropped_and_counted(
    tiny_folder: Path, parrot_folder: Path, tmp_path: Path
) -> None:
    documents = tmp_path / "documents.jsonl"
    documents.write_text(json.dumps({"text": "one two three four five six seven"}) + "\n")
    shared: dict[str, Any] = {
        "modes": {"documents": 1},
        "documents": documents,
        "seq_length": 256,
        "max_new_tokens": 100,
        "given_tokens": 3,
        "batch": 8,
        "temperatures": (0.0,),
    }
    with pytest.raises(UserError, match=r"none of 16 samples could be kept \(16 loop\)"):
        synthesize(SynthesisOptions(tmp_path / "parrot", 500, str(parrot_folder), **shared))
    # There are but five pieces to begin with, and greedy answers to each are the same.
    made = synthesize(SynthesisOptions(tmp_path / "tiny", 500, str(tiny_folder), **shared))
    assert (made.kept, made.dropped) == (5, {"near-duplicate": 11})
    assert 5 * 102 <= made.num_tokens <= 5 * 103, "the last piece of the document may be a token short"
    warm = shared | {"temperatures": (1.0,)}
    assert synthesize(SynthesisOptions(tmp_path / "warm", 500, str(tiny_folder), **warm)).dropped == {}


def test_an_answer_is_cut_behind_the_first_repetition_of_a_loop(smollm2: LongSpec) -> None:
    options = SynthesisOptions(Path("unused"), 1, temperatures=(0.0,))
    script = Script(options, smollm2.encoder)
    prose = smollm2.tokenizer(" ".join(f"{n} is not {n * n}," for n in range(60)))["input_ids"][:120]
    cases: list[tuple[list[int], int]] = [([], 121), ([77, 78] * 30, 124)]
    for loop, kept in cases:
        (sample,) = script.samples(0, 1)
        assert 0 <= script.sequence(sample).seed < 2**63
        script.take([(sample, [*smollm2.tokenizer("What is it?")["input_ids"], 2], True)])
        prompt = len(sample.tokens)
        assert smollm2.tokenizer.decode(sample.tokens).endswith(
            "What is it?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert script.sequence(sample).prompt == sample.tokens
        script.take([(sample, [*prose, *loop, 2], True)])
        assert sample.finished
        assert sample.was_cut == bool(loop)
        assert (len(sample.tokens) - prompt, sample.roles[prompt:]) == (kept, [Role.TEXT] * kept)


def test_hardly_a_token_of_endless_questions_is_lost(
    tiny_folder: Path, smollm2: LongSpec, tmp_path: Path
) -> None:
    """The random target never ends a question."""
    options = SynthesisOptions(
        tmp_path / "own",
        2000,
        str(tiny_folder),
        temperatures=(1.0,),
        seq_length=256,
        max_question_tokens=48,
        max_new_tokens=100,
        batch=16,
    )
    made = synthesize(options)
    assert made.questions_cut == made.kept == made.num_samples > 10
    written = sum(len(one) for one in _written(options.output))
    # What is not lost is the answers and what is left of the questions.
    assert 0 < made.lost_share < 0.15
    assert written < made.tokens_written * (1 - made.lost_share) < written + made.num_samples * 48

    # And a target that does end some is cut where its sentences end.
    script = Script(SynthesisOptions(Path("unused"), 1), smollm2.encoder)
    cases = {
        "Write a poem about rain. It should rhyme and": "Write a poem about rain.",
        "What is 3.5 plus 4? Explain to my": "What is 3.5 plus 4?",
        "a list of numbers without any stop and": "a list of numbers without any stop",
        "Hi. What is the name of the large": "Hi. What is the name of the",
    }
    for text, expected in cases.items():
        (sample,) = script.samples(0, 1)
        script.take([(sample, smollm2.tokenizer(text)["input_ids"], False)])
        assert (sample.messages[0]["content"], sample.question_was_cut) == (expected, True)
        assert 0 < sample.num_lost < sample.num_written


def _written(folder: Path) -> list[Any]:
    """The tokens of each answer."""
    dataset, found = Dataset(folder), []
    for packed in (dataset[index] for index in range(len(dataset))):
        for start, end in pairwise([*packed.starts.tolist(), len(packed.tokens)]):
            found.append(packed.tokens[start:end][packed.roles[start:end] == Role.TEXT])
    return found


def test_a_loop_ends_an_answer_at_the_same_place_for_every_batch(parrot_folder: Path) -> None:
    parrot = LongSpec.from_pretrained(str(parrot_folder), dtype="float32", device="cpu", calibrate=False)
    options = SynthesisOptions(Path("unused"), 1, temperatures=(0.0,), max_new_tokens=1000, seq_length=2000)
    script = Script(options, parrot.encoder)
    (sample,) = script.samples(0, 1)
    script.take([(sample, parrot.tokenizer("What is it?")["input_ids"], True)])
    lengths = []
    for ahead in (1, 7):
        (one,) = make_engine(parrot.target, max_length=2000).run_each([script.sequence(sample)], ahead)
        lengths.append((len(one.tokens), one.finish_reason))
    assert lengths == [(48, "stop")] * 2


def test_killed_it_goes_on_to_the_same_bytes_and_other_flags_are_refused(
    small_target: Path, tmp_path: Path
) -> None:
    documents, prompts = tmp_path / "documents.jsonl", tmp_path / "prompts.jsonl"
    documents.write_text(
        "".join(json.dumps({"text": f"{n} plus {n} and so on; " * 30}) + "\n" for n in range(9))
    )
    prompts.write_text("".join(json.dumps({"prompt": f"Tell me about {n}"}) + "\n" for n in range(20)))
    request = SynthesisOptions(
        tmp_path / "whole",
        8000,
        str(small_target),
        modes={"prompts": 0.5, "documents": 0.5},
        prompts=prompts,
        documents=documents,
        temperatures=(0.7, 1.0),
        given_tokens=40,
        seq_length=256,
        max_new_tokens=48,
        batch=16,
        shard_samples=16,
    )
    broken = tmp_path / "broken"
    flags = ["--target", small_target, "--tokens", "8k", "--mode", "prompts:0.5,documents:0.5"]
    flags += ["--documents", documents, "--prompts", prompts, "--given-tokens", 40, "--seq-length", 256]
    flags += ["--max-new-tokens", 48, "--temperatures", "0.7,1.0", "--batch", 16, "--shard-samples", 16]
    process = subprocess.Popen(command("--output", broken, *flags))
    while not (broken / "shard-00001").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (broken / "dataset.json").exists()
    with pytest.raises(UserError, match="seed was 0 and is 1"):
        synthesize(replace(request, output=broken, seed=1))
    before = (broken / "shard-00000/tokens.npy").stat().st_mtime_ns
    ended = subprocess.run(command("--output", broken, *flags), capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert (broken / "shard-00000/tokens.npy").stat().st_mtime_ns == before
    made = synthesize(request)
    assert contents(request.output) == contents(broken)
    info = Dataset(broken).info
    assert info.num_shards > 2
    assert {source.name.split()[-1] for source in info.sources} == {"(documents)", "(prompts)"}
    again = synthesize(replace(request, batch=None))
    assert (again.num_tokens, again.tokens_written) == (made.num_tokens, 0)
    # Out of time, what there is becomes the dataset: the first shards of the unbroken one.
    hurried = tmp_path / "hurried"
    synthesize(replace(request, output=hurried, seconds=0.001))
    assert Dataset(hurried).info.num_shards == 1
    for name in ("tokens.npy", "roles.npy"):
        one, other = (folder / "shard-00000" / name for folder in (hurried, broken))
        assert one.read_bytes() == other.read_bytes()


def test_a_writer_loads_once_and_writes_what_each_would_write_alone(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def load(*arguments: Any, **options: Any) -> Any:
        loaded.append(arguments)
        return load_models(*arguments, **options)

    monkeypatch.setattr("longspec.data.synthesize.load_models", load)
    options = SynthesisOptions(
        tmp_path / "unused",
        200,
        str(tiny_folder),
        temperatures=(1.0,),
        seq_length=128,
        max_question_tokens=16,
        max_new_tokens=24,
        batch=8,
        shard_samples=8,
    )
    requests = [replace(options, seed=seed) for seed in (0, 1)] + [replace(options, seq_length=96, batch=4)]
    alone, shared, writer = [], [], Writer()
    for number, request in enumerate(requests):
        alone.append(replace(request, output=tmp_path / f"alone-{number}"))
        synthesize(alone[-1])
    assert len(loaded) == 3
    for number, request in enumerate(requests):
        shared.append(replace(request, output=tmp_path / f"shared-{number}"))
        synthesize(shared[-1], writer=writer)
    assert len(loaded) == 4
    for one, other in zip(alone, shared, strict=True):
        assert contents(one.output) == contents(other.output)
    writer.forget()
    synthesize(replace(options, output=tmp_path / "again"), writer=writer)
    assert len(loaded) == 5


def test_bad_input_is_named(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "fine"}\n{"txt": "not"}\n')
    documents: dict[str, Any] = {"modes": {"documents": 1}, "documents": lines}
    cases: list[tuple[dict[str, Any], str]] = [
        (documents, r"lines.jsonl, line 2: a text 'text' is needed"),
        ({"modes": {"prompts": 1}}, "--mode prompts:1 --prompts FILE"),
        ({"documents": lines}, "--mode documents:1 --documents FILE"),
        ({"modes": {"poems": 1}}, "mode 'poems' is unknown; there are: documents"),
        ({"modes": {"questions": -1}}, "the share of mode questions is -1; it must be 0 or more"),
        ({"temperatures": (-1.0,)}, "temperature is -1.0"),
        ({"seq_length": 10**6}, "is 1000000; the limit of smollm2-135m is 8192; give --seq-length 8192"),
        ({"batch": 0}, "batch is 0"),
        ({"prefixes": tmp_path / "none"}, "cannot read .*none"),
    ]
    for changes, message in cases:
        with pytest.raises(UserError, match=message):
            synthesize(SynthesisOptions(tmp_path / "out", 1000, **changes))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    with pytest.raises(UserError, match="is not empty"):
        synthesize(SynthesisOptions(tmp_path / "taken", 1000))
    assert not (tmp_path / "out").exists()
