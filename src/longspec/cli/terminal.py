"""Writing a model's words to a terminal."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspec.generation import Generation

# A model can be talked into writing escape sequences; the terminal must not obey them. C0 controls and DEL
# are shown by Unicode's pictures of them, C1 controls by the replacement character.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def open_streams() -> None:
    """Make the standard streams usable: a closed one leads nowhere, what one cannot encode becomes a `?`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 # open for as long as the program runs
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def printable(text: str) -> str:
    """The text with every control character made visible; newlines and tabs stay."""
    return text.translate(_VISIBLE)


def write(text: str) -> None:
    """Put a piece of an answer on stdout at once."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def figures(result: Generation) -> str:
    """One line on how it went."""
    decoding = f"{result.tokens} tokens at {result.decode_tokens_per_second:.1f} tokens/s"
    prompt = f"prompt of {result.prompt_tokens} in {result.prefill_seconds:.2f} s"
    how = result.method
    if result.tree_shape is not None:
        shape = result.tree_shape
        size = f"of {len(shape)}" if max(shape) == 1 else ",".join(map(str, shape))
        how = f"{result.method} {size}, tau {result.tau:.2f}"
    where = f"{printable(result.target)} {result.dtype} on {result.device}"
    return f"[{decoding}; {prompt}; {how}; seed {result.seed}; {where}; ended by {result.finish_reason}]"
