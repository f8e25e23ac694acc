"""Print an answer while it is made, then its figures."""

from __future__ import annotations

from longspec import LongSpec


def main(model: LongSpec, max_new_tokens: int = 120) -> None:
    prompt = "Tell me a short story about a lighthouse."
    with model.stream(prompt, temperature=0.7, seed=1, max_new_tokens=max_new_tokens) as stream:
        for piece in stream:  # leaving the block early ends the answer and frees what it held
            print(piece, end="", flush=True)
    result = stream.result
    # tau: tokens that a round emits, on average. The target runs once a round.
    print(f"\n\n{result.tokens} tokens in {result.rounds} rounds by {result.label}, tau {result.tau:.2f}")


if __name__ == "__main__":
    main(LongSpec.from_pretrained("smollm2-135m", progress=True))
