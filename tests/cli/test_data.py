"""`longspec data` as users meet it: real processes, killed and started again."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longspec.cli.main import main
from tests.data.test_prepare import same

PROGRAM = (sys.executable, "-m", "longspec.cli.main", "data")
COT = {"question": "1+1?", "reasoning": "One \x1b[31mand one.", "answer": "Two."}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((*PROGRAM, *arguments), capture_output=True, text=True, timeout=120)


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_killed_and_started_again_it_is_as_if_nothing_had_been(tiny_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "text.jsonl"
    with source.open("w") as file:
        for number in range(2000):
            file.write(json.dumps({"text": f"Line {number} of a tale of the sea. " * 80}) + "\n")
    assert source.stat().st_size > 1 << 22, "small inputs start no process"
    more = ("--target", str(tiny_folder), "--seq-length", "256", "--shard-sequences", "100", "--workers", "2")
    command = (*PROGRAM, "prepare", str(source), *more, "--output")
    with subprocess.Popen((*command, str(tmp_path / "killed")), stderr=subprocess.PIPE) as process:
        while not (tmp_path / "killed" / "shard-00002").exists():
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
        workers = children(process.pid)
        assert run("info", str(tmp_path / "killed")).returncode == 2, "not finished"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    kept = (tmp_path / "killed" / "shard-00001" / "tokens.npy").stat().st_mtime_ns
    again = run("prepare", str(source), *more, "--output", str(tmp_path / "killed"), "--json")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "killed" / "shard-00001" / "tokens.npy").stat().st_mtime_ns == kept
    assert main(["data", "prepare", str(source), *more[:-1], "1", "-o", str(tmp_path / "unbroken")]) == 0
    assert same(tmp_path / "killed", tmp_path / "unbroken")
    assert json.loads(again.stdout)["documents"] == 2000
    assert len(workers) >= 2
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers), "workers end with their parent"


@pytest.fixture
def thoughts(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    (tmp_path / "cot.jsonl").write_text("\n".join([json.dumps(COT)] * 3 + ["nonsense"]))
    flags = ["--template", "cot", "--pack", "whole", "--seq-length", "128", "--skip-bad", "--licence", "CC0"]
    folder = tmp_path / "cot"
    inputs = [str(tmp_path / "cot.jsonl"), "-o", str(folder), "--target", str(tiny_folder)]
    assert main(["data", "prepare", *inputs, *flags]) == 0
    told = capsys.readouterr()
    assert "from cot.jsonl (CC0): " in told.out
    assert "1 bad records were left out, first:" in told.err
    assert "cot.jsonl line 4: it is not JSON" in told.err
    assert main(["data", "prepare", *inputs, *flags]) == 0
    assert "is done already" in capsys.readouterr().out
    return folder


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


def test_show_uses_colours_on_a_terminal(thoughts: Path) -> None:
    leader, follower = pty.openpty()
    command = (*PROGRAM, "show", str(thoughts))
    with subprocess.Popen(command, stdout=follower, stderr=follower) as process:
        os.close(follower)
        seen = b""
        while b"<think>" not in seen and b"One " not in seen:
            seen += os.read(leader, 4096)
        assert b"\x1b[33m" in seen
        process.kill()
    os.close(leader)


BAD = {
    "missing input": (["prepare", "none.jsonl"], "none.jsonl"),
    "unknown kind": (["prepare", __file__], "is of no known kind"),
    "template": (["prepare", "IN", "--template", "poem"], "'poem' is unknown: take one of text"),
    "aligner": (["prepare", "IN", "--align", "stars"], "'stars' is unknown: take one of id"),
    "packing": (["prepare", "IN", "--pack", "tetris"], "'tetris' is unknown: take one of stream"),
    "seq length": (["prepare", "IN", "--seq-length", "1"], "--seq-length is 1"),
    "target": (["prepare", "IN", "--target", "./none"], "there is no file or folder none"),
    "unknown target": (["prepare", "IN", "--target", "smolm2-135m"], "did you mean 'smollm2-135m'"),
    "no folder": (["info", "none"], "the dataset none is not there"),
    "index": (["show", "DATA", "--index", "9"], "--index is 9"),
    "other tokenizer": (["show", "DATA", "--target", "smollm2-135m", "--count", "0"], "--count is 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_one_line_and_exit_code_2(
    name: str, thoughts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, said = BAD[name]
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "a fine day"}))
    places = {"IN": str(tmp_path / "in.jsonl"), "DATA": str(thoughts)}
    output = ["-o", str(tmp_path / "out")] if arguments[0] == "prepare" else []
    assert main(["data", *(places.get(one, one) for one in arguments), *output]) == 2
    told = capsys.readouterr()
    (line,) = told.err.strip().splitlines()
    assert line.startswith("longspec: error: ")
    assert said in line
    assert told.out == ""
    assert not (tmp_path / "out").exists()
