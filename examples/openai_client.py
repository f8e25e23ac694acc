"""Talk to `longspec serve` with OpenAI's client: pip install openai.

LONGSPEC_URL (http://127.0.0.1:8000) says where the server is, LONGSPEC_KEY which key it wants, if any.
"""

from __future__ import annotations

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("LONGSPEC_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("LONGSPEC_KEY", "none"),
)
model = client.models.list().data[0].id

# A whole answer. The same seed gives the same words as `longspec generate --seed 1`.
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0.7,
    seed=1,
    max_tokens=40,
)
print(answer.choices[0].message.content)

# A stream, with what OpenAI's interface does not know in `extra_body`.
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three colours."}],
    max_tokens=40,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"method": "lookup", "repetition_penalty": 1.1},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage is not None:
        print(f"\n{chunk.usage.completion_tokens} tokens")

# Several questions about one document: its beginning is computed once.
document = "The mill by the river was built in 1820. It ground corn for two villages until 1951. " * 20
for question in ("When was the mill built?", "Until when did it work?"):
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": document}, {"role": "user", "content": question}],
        max_tokens=20,
    )
    usage = answer.usage
    if usage is not None and usage.prompt_tokens_details is not None:
        reused = usage.prompt_tokens_details.cached_tokens
        print(f"{question} {answer.choices[0].message.content}")
        print(f"{reused} of {usage.prompt_tokens} prompt tokens were there already")

# JSON of a schema, and the probabilities of the tokens.
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "How tall is Mont Blanc in metres?"}],
    response_format={
        "type": "json_schema",
        "json_schema": {
            "name": "mountain",
            "schema": {
                "type": "object",
                "properties": {"metres": {"type": "integer", "maximum": 9999, "minimum": 0}},
                "required": ["metres"],
                "additionalProperties": False,
            },
        },
    },
    logprobs=True,
    top_logprobs=2,
    max_tokens=40,
)
print(answer.choices[0].message.content)
