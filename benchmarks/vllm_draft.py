"""Tokens/s of vLLM alone, with ngram, with a draft of ours, and of our own engine: the same prompts, greedy.

python benchmarks/vllm_draft.py TARGET_FOLDER prompts.jsonl --draft smollm2-135m --concurrency 1 8 32 64
python benchmarks/vllm_draft.py TARGET_FOLDER prompts.jsonl --systems plain draft --cpu --concurrency 1 2

Every system runs in processes of its own, one after the other. As many requests run at once as --concurrency
says, and the next one begins when one ends. vLLM and longspec must be importable by the same Python; longspec
may also come from PYTHONPATH, because its plugin is called here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

SYSTEMS = ("plain", "ngram", "draft", "draft-eager", "ours-seq", "ours-auto")
SURROUNDINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
ON_GPU = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ATTENTION_BACKEND": "FLASH_ATTN"}
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass(frozen=True)
class Measured:
    """One system at one concurrency."""

    system: str
    concurrency: int
    requests: int
    tokens: int
    seconds: float
    accepted: list[float]
    """How often each depth was accepted: of all rounds but each answer's last one, which its end may have
    cut."""

    @property
    def tau(self) -> float:
        """Tokens of a round."""
        return 1 + sum(self.accepted)


Answer = list[int]
"""How many tokens of an answer came with its prompt, and with each round."""
Engine = Callable[[list[list[int]], int], list[Answer]]
"""Answers prompts, so many at once."""


def vllm_engine(given: argparse.Namespace) -> Engine:
    """vLLM in this process, stepped by hand, so that the number of requests stays the same."""
    os.environ |= SURROUNDINGS | (ON_CPU if given.cpu else ON_GPU)
    from vllm import LLM, SamplingParams

    from longspec.vllm.plugin import register

    register()
    llm = LLM(
        given.target,
        dtype="float32" if given.cpu else "bfloat16",
        enforce_eager=given.cpu,
        max_model_len=given.max_length,
        max_num_seqs=max(given.concurrency),
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        disable_log_stats=True,
        speculative_config=speculative_config(given),
    )
    sampling = SamplingParams(temperature=0, max_tokens=given.max_new_tokens, detokenize=False)

    def answer(prompts: list[list[int]], concurrency: int) -> list[Answer]:
        engine, waiting = llm.llm_engine, list(enumerate(prompts))
        found: dict[str, Answer] = {str(number): [] for number, _ in waiting}
        while waiting or engine.has_unfinished_requests():
            while waiting and engine.get_num_unfinished_requests() < concurrency:
                number, ids = waiting.pop(0)
                engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
            for output in engine.step():
                steps = found[output.request_id]
                if new := len(output.outputs[0].token_ids) - sum(steps):
                    steps.append(new)
        return list(found.values())

    return answer


def speculative_config(given: argparse.Namespace) -> dict[str, Any] | None:
    """What the system asks of vLLM."""
    if given.system == "plain":
        return None
    if given.system == "ngram":
        lookup = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        return {"method": "ngram", "num_speculative_tokens": given.gamma, **lookup}
    config = {"method": "longspec", "model": given.draft, "num_speculative_tokens": given.gamma}
    return config | ({"enforce_eager": True} if given.system == "draft-eager" else {})


def our_engine(given: argparse.Namespace) -> Engine:
    """Our engine with as many rows as requests at once: it is loaded for one concurrency."""
    from longspec import LongSpec

    method: dict[str, Any] = {"method": "auto"}
    if given.system == "ours-seq":
        method = {"method": "seq", "gamma": given.gamma}
    model = LongSpec.from_pretrained(
        given.target,
        given.draft,
        dtype="float32" if given.cpu else "bfloat16",
        device="cpu" if given.cpu else "cuda",
        max_length=given.max_length,
        max_rows=given.concurrency[0],
        calibrate=given.system == "ours-auto",
    )

    def answer(prompts: list[list[int]], concurrency: int) -> list[Answer]:
        model.reset()
        answers = model.generate(prompts, max_new_tokens=given.max_new_tokens, temperature=0, **method)
        return [rounds_of(one.depths) for one in answers]

    return answer


def rounds_of(depths: Sequence[int]) -> Answer:
    """An answer by the depths of its tokens (`Generation.depths`): the target's own token ends a round."""
    found = [0]
    for depth in depths:
        found[-1] += 1
        if depth == 0:
            found.append(0)
    return found if found[-1] else found[:-1]


def accepted_by_depth(answers: Sequence[Answer], gamma: int) -> list[float]:
    """See `Measured.accepted`."""
    rounds = [count for answer in answers for count in answer[1:-1]]
    return [sum(count > depth for count in rounds) / max(len(rounds), 1) for depth in range(1, gamma + 1)]


def read_prompts(given: argparse.Namespace) -> list[list[int]]:
    """The prompts' token ids by the target's chat template, those that fit."""
    from longspec.bench.workloads import read_file
    from longspec.prompts import PromptEncoder

    encoder = PromptEncoder(Path(given.target), None)
    size = len(encoder.tokenizer)
    items = [item for path in given.prompts for item in read_file(path).items]
    encoded = [encoder.encode(item.turns[0], item.raw, size) for item in items]
    longest = given.max_length - given.max_new_tokens
    if not (fitting := [ids for ids in encoded if len(ids) <= longest]):
        sys.exit(f"all {len(encoded)} prompts have more than {longest} tokens; raise --max-length")
    return fitting


def measure(given: argparse.Namespace) -> Iterator[Measured]:
    """One system at each concurrency, after a run that is not timed."""
    prompts = read_prompts(given)
    answer = (our_engine if given.system.startswith("ours") else vllm_engine)(given)
    for concurrency in given.concurrency:
        count = max(given.requests, 2 * concurrency)
        chosen = list(islice(cycle(prompts), count))
        answer(chosen[: 2 * concurrency], concurrency)
        begun = time.perf_counter()
        answers = answer(chosen, concurrency)
        seconds = time.perf_counter() - begun
        # A tree of `auto` may be deeper than a chain.
        depth = max(max(answer) for answer in answers) - 1
        accepted = accepted_by_depth(answers, depth)
        yield Measured(given.system, concurrency, count, sum(map(sum, answers)), seconds, accepted)


def run_all(given: argparse.Namespace, arguments: Sequence[str]) -> list[Measured]:
    """Each system in a process of its own. One that fails is told and left out."""
    found: list[Measured] = []
    jobs: list[tuple[str, list[int]]] = []
    for system in given.systems:
        ours = system.startswith("ours")
        jobs += [(system, [size]) for size in given.concurrency] if ours else [(system, given.concurrency)]
    with tempfile.TemporaryDirectory() as folder:
        for number, (system, sizes) in enumerate(jobs):
            goal = Path(folder) / f"{number}.jsonl"
            command = [sys.executable, __file__, *arguments, "--system", system, "--goal", str(goal)]
            command += ["--concurrency", *map(str, sizes)]
            print(f"{system} {sizes} ...", file=sys.stderr, flush=True)
            done = subprocess.run(command, stdout=sys.stderr)
            if done.returncode:
                print(f"{system} ended with {done.returncode}", file=sys.stderr, flush=True)
            lines = goal.read_text().splitlines() if goal.exists() else []
            found += [Measured(**json.loads(line)) for line in lines]
    return found


def print_table(found: list[Measured]) -> None:
    """Tokens/s of each system, in brackets the tokens of a round."""
    sizes = sorted({one.concurrency for one in found})
    print("| tokens/s (tau) | " + " | ".join(map(str, sizes)) + " |")
    print("|---" * (len(sizes) + 1) + "|")
    for system in dict.fromkeys(one.system for one in found):
        cells = {one.concurrency: one for one in found if one.system == system}
        shown = (
            f"{cells[size].tokens / cells[size].seconds:,.0f} ({cells[size].tau:.2f})"
            if size in cells
            else "-"
            for size in sizes
        )
        print(f"| {system} | " + " | ".join(shown) + " |")
    for one in found:
        if one.concurrency == sizes[0] and one.accepted:
            depths = " ".join(f"{share:.4f}" for share in one.accepted)
            print(f"{one.system}: accepted by depth at {sizes[0]}: {depths}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("target", help="the target's folder, in the Hugging Face layout")
    parser.add_argument("prompts", nargs="+", type=Path, help="JSONL files with `prompt` or `turns`")
    parser.add_argument("--draft", default="smollm2-135m", help="a draft folder, or a short name")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--requests", type=int, default=32, help="at least so many, and two for each at once")
    parser.add_argument("--gamma", type=int, default=4, help="tokens that are drafted in a round")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="write what was measured to this file as well")
    parser.add_argument("--cpu", action="store_true", help="fp32 on the CPU, to try the program")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--goal", type=Path, help=argparse.SUPPRESS)
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(arguments)
    if given.system is None:
        found = run_all(given, arguments)
        if given.json is not None:
            given.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
        print_table(found)
        return
    with given.goal.open("w") as goal:
        for one in measure(given):
            goal.write(json.dumps(asdict(one)) + "\n")
            goal.flush()


if __name__ == "__main__":
    main()
