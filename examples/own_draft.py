"""Load a target with a draft of your own, and see what it is worth.

`python examples/own_draft.py TARGET DRAFT`: names, hub ids or folders; without them, SmolLM2-135M with
the draft that ships. docs/training.md tells how to make a draft.
"""

from __future__ import annotations

import sys

from longspec import LongSpec


def main(model: LongSpec, max_new_tokens: int = 120) -> None:
    prompt = "Explain in three sentences why the sky is blue."
    plain = model.generate(prompt, method="vanilla", max_new_tokens=max_new_tokens)
    drafted = model.generate(prompt, method="seq", gamma=4, max_new_tokens=max_new_tokens)
    print(drafted.text)
    print(f"\ndraft: {drafted.draft}")
    # How often the draft's token at depth 1, 2, ... was what the target chose.
    print("accepted by depth:", [f"{count / drafted.rounds:.2f}" for count in drafted.accepted_by_depth])
    print(f"tau {drafted.tau:.2f} instead of {plain.tau:.2f}")


if __name__ == "__main__":
    target, draft = sys.argv[1:] or ("smollm2-135m", "smollm2-135m")
    main(LongSpec.from_pretrained(target, draft=draft, progress=True))
