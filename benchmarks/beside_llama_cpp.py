"""Decoding on a CPU beside llama.cpp, by turns in one run: the same GGUF, the same prompts, greedy.

npm install node-llama-cpp                      in a folder of its own, for its prebuilt binary
python benchmarks/beside_llama_cpp.py model.gguf prompts.jsonl --node FOLDER --weights int8
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

from longspec import LongSpec
from longspec.bench.environment import environment, load_average


class LlamaCpp:
    """llama.cpp in a process of its own, which rests while ours runs."""

    def __init__(self, folder: Path, gguf: Path, threads: int) -> None:
        # A module is looked for beside the file that imports it.
        script = shutil.copy(Path(__file__).with_name("llama_cpp.mjs"), folder)
        self._process = subprocess.Popen(
            ["node", script, str(gguf.absolute()), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
        )  # fmt: skip
        self.release = self._read()["release"]

    def answer(self, tokens: list[int], limit: int) -> dict[str, Any]:
        """Tokens, seconds to the first one, seconds."""
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
    parser.add_argument("--node", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--target", help="ours (default: the GGUF)")
    parser.add_argument("--draft", help="ours (default: the one that comes with the target)")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--limit", type=int, default=10, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    model = LongSpec.from_pretrained(
        arguments.target or arguments.gguf,
        arguments.draft,
        weights=arguments.weights,
        max_rows=1,
        progress=True,
    )
    other = LlamaCpp(arguments.node, arguments.gguf, arguments.threads)
    with arguments.prompts.open() as lines:
        prompts = [json.loads(line)["turns"][0] for line in lines][: arguments.limit]
    speeds: dict[str, list[float]] = {"llama.cpp": [], "vanilla": [], "auto": []}
    rows = []
    for number, prompt in enumerate(prompts):
        tokens = model.encoder.encode(prompt, False, model.target.config.vocab_size)
        limit: int = arguments.max_new_tokens
        row: dict[str, Any] = {"prompt": number}
        theirs = other.answer(tokens, limit)
        row["llama.cpp"] = (len(theirs["tokens"]) - 1) / (theirs["seconds"] - theirs["first"])
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
        row["load"] = load_average()
        for name, found in speeds.items():
            found.append(row[name])
        rows.append(row)
        print(json.dumps(row), flush=True)
    other.close()
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    base = medians["llama.cpp"]
    summary = {
        "tokens_per_second": medians,
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
