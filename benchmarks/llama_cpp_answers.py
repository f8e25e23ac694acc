"""llama.cpp by llama-cpp-python: answers prompts greedily, for benchmarks/beside_llama_cpp.py.

Reads a JSON object {"tokens": [...], "limit": n} per line, writes {"tokens": [...], "first": s, "seconds": s,
"own_seconds": s}. It runs in a Python of its own: llama_cpp_answers.py MODEL.gguf THREADS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable

import llama_cpp


def main(path: str, threads: int) -> None:
    # With flash attention it decodes a tenth faster.
    model = llama_cpp.Llama(
        path,
        n_ctx=8192,
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=0,
        flash_attn=True,
        verbose=False,
    )
    print(json.dumps({"release": llama_cpp.__version__, "system": system()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(answer(model, asked["tokens"], asked["limit"])), flush=True)


def system() -> str:
    """What its build uses of the processor."""
    return str(llama_cpp.llama_print_system_info().decode())


def answer(model: llama_cpp.Llama, tokens: Iterable[int], limit: int) -> dict[str, object]:
    model.reset()
    llama_cpp.llama_perf_context_reset(model.ctx)
    started, said = time.perf_counter(), list[int]()
    model.eval(tokens)
    said.append(model.sample(temp=0.0))
    first = time.perf_counter() - started
    while len(said) < limit and not llama_cpp.llama_vocab_is_eog(model._model.vocab, said[-1]):
        model.eval(said[-1:])
        said.append(model.sample(temp=0.0))
    seconds = time.perf_counter() - started
    # By llama.cpp's own clock, the time of its steps alone: without Python, and without choosing tokens.
    own = llama_cpp.llama_perf_context(model.ctx).t_eval_ms / 1000
    return {"tokens": said, "first": first, "seconds": seconds, "own_seconds": own}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
