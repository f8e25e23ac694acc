"""OpenAI's interface over the engine, and a page to try it."""
