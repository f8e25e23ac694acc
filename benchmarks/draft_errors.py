"""Shows what a draft gets wrong: how often its proposals are right at each lag, and how often copying is.

python -m benchmarks.draft_errors TARGET DRAFT FILE... [--limit N] [--new-tokens N] [--lags 1,5]

The target answers the first turn of each prompt greedily. At every token of an answer, the program compares
the draft's best tokens with the token that follows. At lag n, the draft sees the target's KV up to n tokens
before. For comparison, the program copies in the simplest way: it looks in the draft's window for the last
two tokens, or else for the last one, and takes the token that followed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from longspec import hub
from longspec.bench.workloads import read_file
from longspec.errors import UserError
from longspec.models.pair import Pair, load_pair
from longspec.models.placement import pick_device, pick_dtype
from longspec.prompts import PromptEncoder
from longspec.train.evaluate import Continuation, answer_scores, continuations
from longspec.train.objective import Objective

_BEST = 4
COLUMNS = ("best token", f"best {_BEST}", "KL", "copied", "best or copied", f"best {_BEST} or copied")


def copied(text: Sequence[int], end: int, window: int) -> int | None:
    """The token that followed an earlier text[end - 1 : end + 1] in the window, or else an earlier text[end];
    None if there is neither."""
    found = None
    for place in range(end - 1, max(-1, end - window), -1):
        if text[place] != text[end]:
            continue
        if place and text[place - 1] == text[end - 1]:
            return text[place + 1]
        found = text[place + 1] if found is None else found
    return found


@torch.no_grad()
def errors(objective: Objective, texts: Sequence[Continuation], lags: Sequence[int]) -> list[list[float]]:
    """For each lag, the numbers of `COLUMNS`: the KL divergence is a mean in nats, the others are shares of
    the tokens of all answers."""
    ids, window = objective.draft.vocab_ids, objective.draft.config.window
    found: list[list[Tensor]] = [[] for _ in lags]
    for text in texts:
        tokens = text.prompt + text.tokens
        guesses = [copied(tokens, end, window) for end in range(len(text.prompt), len(tokens) - 1)]
        for rows, (own, scores) in zip(found, answer_scores(objective, text, lags), strict=True):
            truth = torch.tensor(text.tokens[1:]).to(scores.device)
            copy = torch.tensor([-1 if guess is None else guess for guess in guesses]).to(truth) == truth
            log_p, log_q = own.log_softmax(-1), scores.log_softmax(-1)
            best = log_q.topk(_BEST, -1).indices
            right = (best if ids is None else ids[best]) == truth[:, None]
            divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
            first, among = right[:, 0], right.any(1)
            columns = (first, among, divergence, copy, first | copy, among | copy)
            rows.append(torch.stack([column.float() for column in columns], 1))
    return [torch.cat(rows).mean(0).tolist() for rows in found]


def table(pair: Pair, encoder: PromptEncoder, files: Sequence[Path], flags: argparse.Namespace) -> str:
    """A Markdown table, a line for each file and lag."""
    lines = [f"| prompts | lag | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    objective = Objective(pair.target, pair.draft)
    for file in files:
        items = read_file(file).items[: flags.limit]
        prompts = [encoder.encode(one.turns[0], one.raw, pair.target.config.vocab_size) for one in items]
        texts = continuations(pair.target, prompts, flags.new_tokens, pair.eos_ids)
        for lag, row in zip(flags.lags, errors(objective, texts, flags.lags), strict=True):
            lines.append(f"| {file.stem} | {lag} | " + " | ".join(f"{value:.3f}" for value in row) + " |")
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
