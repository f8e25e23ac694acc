"""Run every method on the same prompt and seed. In fp32 all emit the same tokens."""

from __future__ import annotations

from longspec import LongSpec

METHODS = ["vanilla", "lookup", "magicdec", "seq", "tree", "auto"]
PROMPT = "Write a Python function that says whether a number is prime, and explain it."


def main(model: LongSpec, max_new_tokens: int = 120) -> None:
    reference: list[int] | None = None
    for method in METHODS:
        model.generate(PROMPT, method=method, max_new_tokens=8)  # a new method is compiled first on a GPU
        answer = model.generate(PROMPT, method=method, max_new_tokens=max_new_tokens)
        reference = reference or answer.token_ids
        same = "the same words" if answer.token_ids == reference else "other words"
        speed = f"{answer.decode_tokens_per_second:7.1f} tokens/s"
        print(f"{method:9} {speed}, tau {answer.tau:.2f}, {same}")


if __name__ == "__main__":
    main(LongSpec.from_pretrained("smollm2-135m", progress=True))
