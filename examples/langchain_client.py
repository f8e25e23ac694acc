"""Use `longspec serve` where LangChain expects OpenAI: pip install langchain-openai.

Whatever takes a base URL works alike: LlamaIndex's OpenAILike, Open WebUI, lm-eval's local-chat-completions.
"""

from __future__ import annotations

import os

from langchain_openai import ChatOpenAI
from pydantic import SecretStr

model = ChatOpenAI(
    base_url=os.environ.get("LONGSPEC_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=SecretStr(os.environ.get("LONGSPEC_KEY", "none")),
    model=os.environ.get("LONGSPEC_MODEL", "smollm2-135m"),
    temperature=0,
    max_completion_tokens=60,
)
print(model.invoke("What is the capital of France?").content)
for chunk in model.stream("Count to five."):
    print(chunk.content, end="", flush=True)
print()
