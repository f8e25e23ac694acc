"""`longspec data` as users meet it: real processes, killed and started again."""

from __future__ import annotations

import json
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longspec.cli.main import main
from tests.cli.run import exit_code
from tests.data.test_prepare import same

PROGRAM = (sys.executable, "-m", "longspec", "data")
COT = {"question": "1+1?", "reasoning": "One \x1b[31mand one.", "answer": "Two."}


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_killed_and_started_again_it_is_as_if_nothing_had_been(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "text.jsonl"
    with source.open("w") as file:
        for number in range(1200):
            file.write(json.dumps({"text": f"Line {number} of a tale of the sea. " * 80}) + "\n")
    assert source.stat().st_size > 1 << 21, "small inputs start no process"
    more = ("--target", str(tiny_folder), "--seq-length", "256", "--shard-sequences", "100", "--workers", "2")
    command = (*PROGRAM, "prepare", str(source), *more, "--output")
    with subprocess.Popen((*command, str(tmp_path / "killed")), stderr=subprocess.PIPE) as process:
        while not (tmp_path / "killed" / "shard-00002").exists():
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
        workers = children(process.pid)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert main(["data", "info", str(tmp_path / "killed")]) == 2, "it is not finished"
    capsys.readouterr()
    (tmp_path / "killed" / ".writing-prepare.json-half").write_text("{")  # as if killed a moment later
    kept = (tmp_path / "killed" / "shard-00001" / "tokens.npy").stat().st_mtime_ns
    assert main([*command[3:], str(tmp_path / "killed"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 1200
    assert (tmp_path / "killed" / "shard-00001" / "tokens.npy").stat().st_mtime_ns == kept
    assert main([*command[3:], str(tmp_path / "unbroken"), "--workers", "1"]) == 0
    assert same(tmp_path / "killed", tmp_path / "unbroken")
    assert len(workers) >= 2
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers), "workers end with their parent"


@pytest.fixture(scope="module")
def making(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command that makes a dataset of three documents, of four lines one of which is bad."""
    folder = tmp_path_factory.mktemp("cot")
    (folder / "cot.jsonl").write_text("\n".join([json.dumps(COT)] * 3 + ["nonsense"]))
    flags = ["--template", "cot", "--pack", "whole", "--seq-length", "128", "--skip-bad", "--licence", "CC0"]
    command = ["data", "prepare", str(folder / "cot.jsonl"), "--target", str(tiny_folder), *flags]
    return [*command, "--output", str(folder / "made")]


@pytest.fixture(scope="module")
def thoughts(making: list[str]) -> Path:
    """What it makes."""
    assert main(making) == 0
    return Path(making[-1])


def test_prepare_says_what_it_did_and_what_it_left_out(
    making: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*making[:-1], str(tmp_path / "out")]
    assert main(command) == 0
    told = capsys.readouterr()
    assert "of 3 documents in 1 shard, " in told.out
    assert "from cot.jsonl (CC0): " in told.out
    assert "left out 1 refused record, first:" in told.err
    assert "cot.jsonl line 4: it is not JSON" in told.err
    assert main(command) == 0
    assert "is done already" in capsys.readouterr().out
    assert main([*command, "--pack", "single"]) == 2
    assert "pack was 'whole' and is 'single'" in capsys.readouterr().err


def test_info_says_what_is_there(thoughts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "info", str(thoughts), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_documents"], found["info"]["made_by"]["num_bad"]) == (3, 1)
    assert found["info"]["sources"][0]["licence"] == "CC0"
    assert sum(found["role_shares"].values()) == pytest.approx(1)
    padding = 1 - found["info"]["num_tokens"] / (found["info"]["num_sequences"] * 128)
    assert found["role_shares"]["pad"] == pytest.approx(padding)
    assert main(["data", "info", str(thoughts)]) == 0
    text = capsys.readouterr().out
    assert "cot.jsonl (CC0)" in text
    assert f"pad {padding:.1%}" in text


def test_show_tells_documents_and_roles_apart(thoughts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", str(thoughts)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "━━ sequence 0: 128 tokens"
    assert lines[1] == "── document 1 from token 0"
    assert lines[2].startswith("[prompt ")
    assert "One ␛[31mand one." in lines, "control characters are shown, not obeyed"
    assert "Two.<|im_end|>" in lines
    assert any(line.startswith("── padding from token ") for line in lines)


def test_show_uses_colours_on_a_terminal(thoughts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    leader, follower = pty.openpty()
    with open(leader, "rb", buffering=0) as screen, open(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert main(["data", "show", str(thoughts)]) == 0
        monkeypatch.undo()
        assert b"\x1b[33mOne " in screen.read(4096)


BAD = {
    "missing input": (["prepare", "none.jsonl"], "none.jsonl"),
    "unknown kind": (["prepare", __file__], "has an unknown format"),
    "template": (["prepare", "IN", "--template", "poem"], "'poem' is unknown; there are: text"),
    "aligner": (["prepare", "IN", "--align", "stars"], "'stars' is unknown; there are: id"),
    "packing": (["prepare", "IN", "--pack", "tetris"], "'tetris' is unknown; there are: stream"),
    "seq length": (["prepare", "IN", "--seq-length", "1"], "seq_length is 1"),
    "target": (["prepare", "IN", "--target", "./none"], "there is no file or folder none"),
    "unknown target": (["prepare", "IN", "--target", "smolm2-135m"], "did you mean 'smollm2-135m'"),
    "no folder": (["info", "none"], "the dataset none does not exist"),
    "a file": (["info", "IN"], "in.jsonl is a file; a dataset is a folder"),
    "another folder": (["show", "MODEL"], "is not a dataset: it has no dataset.json"),
    "huge seq length": (
        ["prepare", "IN", "--seq-length", "99999999999"],
        "it must lie between 2 and 16777216",
    ),
    "index": (["show", "DATA", "--index", "9"], "--index is 9"),
    "count": (["show", "DATA", "--count", "0"], "count is 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_one_line_and_exit_code_2(
    name: str, thoughts: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, said = BAD[name]
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "a fine day"}))
    places = {"IN": str(tmp_path / "in.jsonl"), "DATA": str(thoughts), "MODEL": str(tiny_folder)}
    output = ["-o", str(tmp_path / "out")] if arguments[0] == "prepare" else []
    assert exit_code(["data", *(places.get(one, one) for one in arguments), *output]) == 2
    told = capsys.readouterr()
    (line,) = told.err.strip().splitlines()
    assert line.startswith("longspec: error: ")
    assert said in line
    assert told.out == ""
    assert not (tmp_path / "out").exists()
