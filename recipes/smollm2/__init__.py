"""The draft of SmolLM2-135M: what its target was asked, how it was trained, what was tried."""
