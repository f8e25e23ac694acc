"""Our draft inside vLLM. Installing longspec is enough: vLLM finds `longspec.vllm.plugin` by its entry point.

Nothing here imports vLLM before vLLM itself asks for it.
"""
