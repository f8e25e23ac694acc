"""Tokens/s of vLLM alone, with ngram, with a draft of ours, and of our own engine: the same prompts, greedy.

python benchmarks/vllm_draft.py TARGET_FOLDER prompts.jsonl --draft smollm2-135m --concurrency 1 8 32 64
python benchmarks/vllm_draft.py TARGET_FOLDER prompts.jsonl --systems plain draft --cpu --concurrency 1 2

Every system runs in a process of its own, one after the other. As many requests run at once as --concurrency
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
from collections import deque
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
ON_GPU = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
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
Engine = Callable[[list[list[int]], int, int], list[Answer]]
"""Answers prompts, so many at once, with at most so many tokens each."""
WARM_UP_TOKENS = 32
"""Of an answer that is not timed: enough that all requests run at once before the first one ends."""


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
        # With a size for the KV cache, vLLM asks for little more and does not measure what is left.
        gpu_memory_utilization=0.5 if given.kv_memory is None else 0.05,
        kv_cache_memory_bytes=given.kv_memory,
        enable_prefix_caching=False,
        disable_log_stats=True,
        speculative_config=speculative_config(given),
    )

    def answer(prompts: list[list[int]], concurrency: int, max_new_tokens: int) -> list[Answer]:
        sampling = SamplingParams(temperature=0, max_tokens=max_new_tokens, detokenize=False)
        engine, waiting = llm.llm_engine, deque(enumerate(prompts))
        found: dict[str, Answer] = {str(number): [] for number, _ in waiting}
        while waiting or engine.has_unfinished_requests():
            while waiting and engine.get_num_unfinished_requests() < concurrency:
                number, ids = waiting.popleft()
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
    """Our engine, given its next request when one ends."""
    from longspec import LongSpec
    from longspec.options import read_options

    method: dict[str, Any] = {"method": "auto"}
    if given.system == "ours-seq":
        method = {"method": "seq", "gamma": given.gamma}
    most = max(given.concurrency)
    model = LongSpec.from_pretrained(
        given.target,
        given.draft,
        dtype="float32" if given.cpu else "bfloat16",
        device="cpu" if given.cpu else "cuda",
        max_length=given.max_length,
        # A GPU's default at least, so that what `longspec serve` measured of this machine is used.
        max_rows=most if given.cpu else max(most, 128),
        kv_memory=given.kv_memory,
        calibrate=given.system == "ours-auto",
    )
    if given.system == "ours-auto":
        model.engine.prepare(most)

    def answer(prompts: list[list[int]], concurrency: int, max_new_tokens: int) -> list[Answer]:
        model.reset()
        options = {"max_new_tokens": max_new_tokens, "temperature": 0.0, **method}
        asked, _ = model.maker.make(prompts, read_options(options))
        waiting, running = deque(asked), asked[:0]

        def has_room() -> bool:
            return any(one.finished for one in running)

        while waiting or running:
            while waiting and len(running) < concurrency:
                running.append(waiting.popleft())
                model.engine.submit(running[-1:])
            model.engine.lead(has_room)
            running = [one for one in running if not one.finished]
        if error := next((one.error for one in asked if one.error is not None), None):
            raise error
        return [rounds_of(one.depths) for one in asked]

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


def load(given: argparse.Namespace) -> Engine:
    """The system's engine, ready for batches of all sizes: some record graphs when a size is first used."""
    answer = (our_engine if given.system.startswith("ours") else vllm_engine)(given)
    prompts, most = read_prompts(given), max(given.concurrency)
    sizes = {1 << power for power in range(most.bit_length())} | {most}
    for size in sorted(sizes):
        answer(list(islice(cycle(prompts), size)), size, WARM_UP_TOKENS)
    return answer


def measure(given: argparse.Namespace, answer: Engine) -> Iterator[Measured]:
    """One system at each concurrency."""
    prompts = read_prompts(given)
    for concurrency, asked in zip(given.concurrency, requests_each(given), strict=True):
        chosen = list(islice(cycle(prompts), max(asked, 2 * concurrency)))
        begun = time.perf_counter()
        answers = answer(chosen, concurrency, given.max_new_tokens)
        seconds = time.perf_counter() - begun
        # A tree of `auto` may be deeper than a chain.
        depth = max(max(answer) for answer in answers) - 1
        accepted = accepted_by_depth(answers, depth)
        yield Measured(given.system, concurrency, len(chosen), sum(map(sum, answers)), seconds, accepted)


def requests_each(given: argparse.Namespace) -> list[int]:
    """How many requests are asked for at each concurrency."""
    if len(given.requests) not in (1, len(given.concurrency)):
        sys.exit("--requests takes one number, or one for each --concurrency")
    return given.requests * len(given.concurrency) if len(given.requests) == 1 else given.requests


def run_all(given: argparse.Namespace, arguments: Sequence[str]) -> list[Measured]:
    """Each system in a process of its own. One that fails is told and left out."""
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        for system in given.systems:
            goal = Path(folder) / f"{system}.jsonl"
            command = [sys.executable, __file__, *arguments, "--system", system, "--goal", str(goal)]
            print(f"{system} ...", file=sys.stderr, flush=True)
            done = subprocess.run(command, stdout=sys.stderr)
            if done.returncode:
                print(f"{system} ended with {done.returncode}", file=sys.stderr, flush=True)
            found += read_measured(goal)
    return found


def read_measured(path: Path) -> list[Measured]:
    """What a process wrote; nothing where it did not come so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Measured(**json.loads(line)) for line in lines]


def write_measured(given: argparse.Namespace, answer: Engine) -> None:
    """Measure a system that is loaded, and write each line when it is known."""
    with given.goal.open("w") as goal:
        for one in measure(given, answer):
            goal.write(json.dumps(asdict(one)) + "\n")
            goal.flush()


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
        if one.concurrency == sizes[-1] and one.accepted:
            depths = " ".join(f"{share:.4f}" for share in one.accepted)
            print(f"{one.system}: accepted by depth at {sizes[-1]}, {one.requests} requests: {depths}")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("target", help="the target's folder, in the Hugging Face layout")
    parser.add_argument("prompts", nargs="+", type=Path, help="JSONL files with `prompt` or `turns`")
    parser.add_argument("--draft", default="smollm2-135m", help="a draft folder, or a short name")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument(
        "--requests", nargs="+", type=int, default=[32],
        help="at least so many (one number, or one for each concurrency), and two for each at once",
    )  # fmt: skip
    parser.add_argument("--gamma", type=int, default=4, help="tokens that are drafted in a round")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--kv-memory", type=int, help="bytes of the KV cache (what each engine takes)")
    parser.add_argument("--json", type=Path, help="write what was measured to this file as well")
    parser.add_argument("--cpu", action="store_true", help="fp32 on the CPU, to try the program")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--goal", type=Path, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = make_parser().parse_args(arguments)
    if given.system is None:
        found = run_all(given, arguments)
        if given.json is not None:
            given.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
        print_table(found)
        return
    write_measured(given, load(given))


if __name__ == "__main__":
    main()
