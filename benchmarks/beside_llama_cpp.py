"""Decoding on a CPU beside llama.cpp, by turns in one run: the same GGUF, the same prompts, greedy.

python -m venv llama && llama/bin/pip install llama-cpp-python      compiles it for this machine
python benchmarks/beside_llama_cpp.py model.gguf prompts.jsonl --python llama/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from longspec import LongSpec
from longspec.bench.environment import environment, load_average


class LlamaCpp:
    """llama.cpp in a process of its own, which rests while ours runs."""

    def __init__(self, python: Path, gguf: Path, threads: int) -> None:
        script = Path(__file__).with_name("llama_cpp_answers.py")
        self._process = subprocess.Popen(
            [str(python), str(script), str(gguf), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.release = self._read()

    def answer(self, tokens: list[int], limit: int) -> dict[str, Any]:
        """The tokens and the times; see `llama_cpp_answers.py`."""
        assert self._process.stdin is not None
        print(json.dumps({"tokens": tokens, "limit": limit}), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("prompts", type=Path, help="JSONL with turns[0]")
    parser.add_argument("--python", type=Path, required=True, help="has llama-cpp-python")
    parser.add_argument("--target", help="ours (default: the GGUF)")
    parser.add_argument("--draft", help="ours (default: the one that comes with the target)")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--limit", type=int, default=10, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    for path in (arguments.gguf, arguments.prompts, arguments.python):
        if not path.is_file():
            parser.error(f"{path} is no file")
    model = LongSpec.from_pretrained(
        arguments.target or arguments.gguf,
        arguments.draft,
        weights=arguments.weights,
        max_rows=1,
        progress=True,
    )
    other = LlamaCpp(arguments.python, arguments.gguf, arguments.threads)
    with arguments.prompts.open() as lines:
        prompts = [json.loads(line)["turns"][0] for line in lines][: arguments.limit]
    speeds: dict[str, list[float]] = {"llama.cpp": [], "vanilla": [], "auto": []}
    waits: dict[str, list[float]] = {"llama.cpp": [], "ours": []}
    rows = []
    for number, prompt in enumerate(prompts):
        tokens = model.encoder.encode(prompt, False, model.target.config.vocab_size)
        limit: int = arguments.max_new_tokens
        row: dict[str, Any] = {"prompt": number}
        theirs = other.answer(tokens, limit)
        row["llama.cpp"] = (len(theirs["tokens"]) - 1) / theirs["own_seconds"]
        answers = {}
        for method in ("vanilla", "auto"):
            answers[method] = model.generate(
                tokens, method=method, max_new_tokens=limit, temperature=0.0, repetition_penalty=1.0
            )
            model.reset()
            row[method] = answers[method].decode_tokens_per_second
        row["same"] = answers["vanilla"].token_ids == answers["auto"].token_ids
        row["tau"], row["label"] = answers["auto"].tau, answers["auto"].label
        row["tokens"] = {"llama.cpp": len(theirs["tokens"]), "ours": answers["vanilla"].tokens}
        row["prompt_tokens"] = len(tokens)
        row["seconds_to_first"] = {"llama.cpp": theirs["first"], "ours": answers["vanilla"].prefill_seconds}
        row["load"] = load_average()
        for name, seconds in row["seconds_to_first"].items():
            waits[name].append(seconds)
        for name, found in speeds.items():
            found.append(row[name])
        rows.append(row)
        print(json.dumps(row), flush=True)
    other.close()
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    base = medians["llama.cpp"]
    summary = {
        "tokens_per_second": medians,
        "seconds_to_first": {name: statistics.median(found) for name, found in waits.items()},
        "prompt_tokens": statistics.median(row["prompt_tokens"] for row in rows),
        "beside llama.cpp": {name: one / base for name, one in medians.items()},
        "same": all(row["same"] for row in rows),
        "llama.cpp": other.release,
        "pid_memory": _memory(),
        **environment(model),
    }
    print(json.dumps(summary, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps({"summary": summary, "rows": rows}, indent=1) + "\n")


def _memory() -> dict[str, int]:
    """Of this process, in kB."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return {
        name: int(line.split()[1]) for line in lines for name in ("VmRSS", "VmHWM") if line.startswith(name)
    }


if __name__ == "__main__":
    main()
