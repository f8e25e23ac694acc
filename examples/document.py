"""Ask several questions about a long document. Only the first one computes it: its KV stays and is shared."""

from __future__ import annotations

import pydoc_data.topics

from longspec import LongSpec

QUESTIONS = ["What is this text about?", "Name one rule that it gives.", "Who would read it?"]


def main(model: LongSpec, max_new_tokens: int = 60, characters: int = 8_000) -> None:
    document = "\n\n".join(pydoc_data.topics.topics.values())[:characters]
    messages = [{"role": "system", "content": f"Answer questions about this text.\n\n{document}"}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = model.generate(messages, max_new_tokens=max_new_tokens)
        messages.append({"role": "assistant", "content": answer.text})
        print(f"> {question}\n{answer.text}")
        print(f"[prompt: {answer.prompt_tokens} tokens, of which {answer.prefilled_tokens} were computed]\n")


if __name__ == "__main__":
    main(LongSpec.from_pretrained("smollm2-135m", progress=True))
