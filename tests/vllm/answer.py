"""Answers of vLLM, in a process of its own, because vLLM needs other packages than we do.

It reads a job from stdin, a JSON object: `target` (a folder), `speculative` (a speculative config or null),
`prompts` (token ids), `batches` (all prompts run once for each, so many together), `max_new_tokens`,
`settings` (further arguments of `vllm.LLM`), and `goal`, the file that the answers are written to: for each
batch and each prompt, the tokens of every step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

SURROUNDINGS = os.environ | {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def answer(engine: Any, prompts: list[list[int]], sampling: Any) -> list[list[list[int]]]:
    """The tokens that each prompt's steps emitted; the prompts run together."""
    answers: dict[str, list[list[int]]] = {str(number): [] for number in range(len(prompts))}
    for name, ids in zip(answers, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            steps = answers[output.request_id]
            said = sum(map(len, steps))
            if new := list(output.outputs[0].token_ids)[said:]:
                steps.append(new)
    return list(answers.values())


def main() -> None:
    os.environ |= SURROUNDINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    llm = LLM(
        job["target"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        speculative_config=job["speculative"],
        **job["settings"],
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["max_new_tokens"])
    runs = []
    for batch in job["batches"]:
        parts = (job["prompts"][start : start + batch] for start in range(0, len(job["prompts"]), batch))
        runs.append([one for part in parts for one in answer(llm.llm_engine, part, sampling)])
    Path(job["goal"]).write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
