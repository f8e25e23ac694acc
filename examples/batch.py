"""Answer several prompts at once. What one of them says does not depend on the others."""

from __future__ import annotations

from longspec import LongSpec
from longspec.prompts import Prompt

PROMPTS: list[Prompt] = [
    "Name a colour.",
    "Write one sentence about the sea.",
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
]


def main(model: LongSpec, max_new_tokens: int = 60) -> None:
    # One seed for the batch: row i has the seed 7 + i. A list gives each row its own.
    answers = model.generate(PROMPTS, temperature=0.7, seed=7, max_new_tokens=max_new_tokens)
    for answer in answers:
        print(f"seed {answer.seed}, {answer.tokens} tokens: {answer.text}")
    alone = model.generate(PROMPTS[1], temperature=0.7, seed=8, max_new_tokens=max_new_tokens)
    print("the same words alone:", alone.token_ids == answers[1].token_ids)


if __name__ == "__main__":
    main(LongSpec.from_pretrained("smollm2-135m", progress=True))
