"""Rows made by hand."""

from __future__ import annotations

from typing import Any


def made_row(method: str, **values: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "workload": "made",
        "kind": "made",
        "item": "1",
        "method": method,
        "ran": method,
        "temperature": 0.0,
        "repeat": 0,
        "prompt_tokens": 12,
        "tokens": 9,
        "decoded_tokens": 8,
        "prefill_seconds": 0.5,
        "decode_seconds": 1.0,
        "peak_memory": 10**9,
        "memory_above_start": 10**7,
        "load_average": 1.0,
        "compared": method != "vanilla",
        "difference": None,
    }
    if not method.startswith("hf"):
        row |= {"rounds": 5, "accepted_by_depth": [2, 1] if method == "lookup" else []}
    return row | values


def made_run(**values: Any) -> dict[str, Any]:
    facts = {"environment": {"target": "made", "commit": None}, "repeats": 3, "max_new_tokens": 9}
    return {"facts": facts, "begun": "today", "command": "longspec", "left_out": {}} | values
