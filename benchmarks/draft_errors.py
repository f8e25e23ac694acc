"""What a draft gets wrong: how often it is right by how far it lags, and what copying would have known.

python -m benchmarks.draft_errors TARGET DRAFT FILE... [--limit N] [--new-tokens N] [--lags 1,5]

The target answers the first turn of each prompt greedily. Then, at every token of its answers, the draft's
best tokens are compared with the next one; it sees as much of the target as at that lag. Beside it stands
what the simplest copying gives: the token that followed when the last two tokens, or the last one, stood in
the draft's window before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longspec import hub
from longspec.bench.workloads import read_file
from longspec.data.collate import collate
from longspec.data.shards import Packed, Role
from longspec.errors import UserError
from longspec.models.pair import Pair, load_pair
from longspec.models.placement import pick_device, pick_dtype
from longspec.prompts import PromptEncoder
from longspec.train.evaluate import Continuation, continuations
from longspec.train.layout import head_rows, lay_out
from longspec.train.losses import score
from longspec.train.objective import Objective

_BEST = 4
COLUMNS = ("best token", f"best {_BEST}", "KL", "copied", "best or copied", f"best {_BEST} or copied")


def copied(text: Sequence[int], end: int, window: int) -> int | None:
    """What followed text[end - 1 : end + 1], or else text[end], when it stood in the window before."""
    found = None
    for place in range(end - 1, max(-1, end - window), -1):
        if text[place] != text[end]:
            continue
        if place and text[place - 1] == text[end - 1]:
            return text[place + 1]
        found = text[place + 1] if found is None else found
    return found


@torch.no_grad()
def errors(objective: Objective, texts: Sequence[Continuation], lag: int) -> list[float]:
    """The shares of `COLUMNS`, and the mean KL divergence from the target in nats, over all answers."""
    target, draft = objective.target, objective.draft
    rows = head_rows(draft.vocab_ids, target.config.vocab_size)
    found = []
    for one in texts:
        tokens, begin = one.prompt + one.tokens, len(one.prompt)
        whole = Packed(np.array(tokens), np.full(len(tokens), Role.TEXT, np.uint8), np.zeros(1, np.int32))
        layout = lay_out(collate([whole], "base", False), [lag], [0], 0, rows, target.device)
        hidden, kv = objective.read(layout)
        drafted = objective.draft_hidden(layout, hidden, kv)[0, begin:-1]
        log_q = score(drafted, objective.head()).log_softmax(-1)
        log_p = score(hidden[0, begin:-1], objective.head()).log_softmax(-1)
        truth = layout.tokens[0, begin + 1 :, None]
        right = _ids(draft.vocab_ids, log_q.topk(_BEST, -1).indices) == truth
        guesses = [copied(tokens, end, draft.config.window) for end in range(begin, len(tokens) - 1)]
        copy = torch.tensor([-1 if guess is None else guess for guess in guesses]).to(truth) == truth[:, 0]
        best, among = right[:, 0], right.any(1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
        columns = (best, among, divergence, copy, best | copy, among | copy)
        found.append(torch.stack([column.float() for column in columns], 1))
    return torch.cat(found).mean(0).tolist()


def _ids(vocab_ids: Tensor | None, rows: Tensor) -> Tensor:
    return rows if vocab_ids is None else vocab_ids[rows]


def table(pair: Pair, encoder: PromptEncoder, files: Sequence[Path], flags: argparse.Namespace) -> str:
    """A Markdown table, a line for each file and lag."""
    lines = [f"| prompts | lag | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    objective = Objective(pair.target, pair.draft)
    for file in files:
        items = read_file(file).items[: flags.limit]
        prompts = [encoder.encode(one.turns[0], one.raw, pair.target.config.vocab_size) for one in items]
        texts = continuations(pair.target, prompts, flags.new_tokens, pair.eos_ids)
        for lag in flags.lags:
            shares = errors(objective, texts, lag)
            lines.append(f"| {file.stem} | {lag} | " + " | ".join(f"{share:.3f}" for share in shares) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="a target's name or folder")
    parser.add_argument("draft", help="a draft's name or folder")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="prompts, one JSON object a line")
    parser.add_argument("--limit", type=int, default=16, help="prompts of each file (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    parser.add_argument(
        "--lags",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 5],
        metavar="N,N,...",
        help="1 is the first token of a round (default: 1,5)",
    )
    parser.add_argument("--device", default="auto")
    flags = parser.parse_args(argv)
    try:
        device = pick_device(flags.device)
        pair = load_pair(flags.target, flags.draft, None, device, pick_dtype("auto", device))
        files = hub.resolve_tokenizer(flags.target)
        encoder = PromptEncoder(files.folder, files.chat_template)
        print(table(pair, encoder, flags.files, flags))
    except UserError as error:
        print(f"draft_errors: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
