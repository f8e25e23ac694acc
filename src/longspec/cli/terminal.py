"""Write a model's text to a terminal."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from longspec.generation import Generation

# A model may write escape sequences; the terminal must not obey them. C0 controls and DEL are shown as their
# Unicode pictures, C1 controls as the replacement character.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)

# Of the 256-colour palette, light green to dark green: depth 1, 2, ...
_SHADES = (194, 157, 120, 83, 41)


def open_streams() -> None:
    """Make the standard streams usable: a closed one becomes /dev/null, and bad characters are replaced."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 # open for as long as the program runs
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def printable(text: str) -> str:
    """The text with every control character made visible; newlines and tabs stay."""
    return text.translate(_VISIBLE)


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def write(text: str) -> None:
    """Print a piece of an answer at once."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def explained(pieces: Sequence[str], depths: Sequence[int], colour: bool) -> str:
    """An answer with a mark on each token that was drafted and accepted; the target's own tokens are plain.

    In colour the mark is green, darker for deeper nodes. Without colour it is braces with the depth, {2:so}.
    """
    marked = []
    for piece, depth in zip(pieces, depths, strict=True):
        text = printable(piece)
        if depth and colour:
            # Line by line, so that no background runs over the edge of the terminal.
            shade = _SHADES[min(depth, len(_SHADES)) - 1]
            lines = text.split("\n")
            text = "\n".join(f"\x1b[48;5;{shade}m\x1b[30m{line}\x1b[0m" if line else "" for line in lines)
        elif depth and text:
            text = f"{{{depth}:{text}}}"
        marked.append(text)
    return "".join(marked)


def legend(colour: bool) -> str:
    if not colour:
        return "[{N:token}: drafted and accepted at depth N; the rest: from the target itself]"
    shades = " ".join(f"\x1b[48;5;{shade}m\x1b[30m {depth} \x1b[0m" for depth, shade in enumerate(_SHADES, 1))
    return f"[drafted and accepted at depth {shades} or more; plain: from the target itself]"


def in_colour() -> bool:
    """Whether stdout is a terminal whose user wants colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def figures(result: Generation) -> str:
    """The figures in one line. It explains tau, because most users see tau here first."""
    parts = [f"{result.tokens} token{'' if result.tokens == 1 else 's'}"]
    # The first token comes from the prompt, so one alone has no speed.
    if result.tokens > 1:
        parts[0] += f" at {result.decode_tokens_per_second:.1f} tokens/s"
    parts.append(f"prompt of {result.prompt_tokens} in {result.prefill_seconds:.2f} s")
    has_tau = result.rounds and result.tree_shape is not None
    parts.append(result.label + (f", tau {result.tau:.2f} (tokens per round)" if has_tau else ""))
    if result.temperature > 0:
        parts.append(f"seed {result.seed}")
    kv = "" if result.kv_dtype == result.dtype else f" with KV in {result.kv_dtype}"
    parts.append(f"{printable(result.target)} {result.weights}{kv} on {result.device}")
    parts.append("stopped" if result.finish_reason == "closed" else f"ended by {result.finish_reason}")
    return f"[{'; '.join(parts)}]"
