"""The headline table, made from committed runs and written between two marks of a markdown file.

`python benchmarks/headline.py docs/benchmarks.md` writes it there; without a file it is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from longspec.atomic import write_whole
from longspec.bench.folder import RUN, read_run
from longspec.bench.report import (
    fastest_peer,
    load_averages,
    repeats_text,
    sameness,
    spread,
    table,
)
from longspec.bench.summary import Figures, summarise
from longspec.errors import UserError

BEGIN = "<!-- headline: made by benchmarks/headline.py, not by hand -->"
END = "<!-- headline: end -->"
METHOD = "auto"
"""What users get who choose nothing."""


def headline(results: Path) -> str:
    """One table for each run in the folder: what `auto` gains, kind by kind."""
    folders = sorted(path.parent for path in results.glob(f"*/{RUN}"))
    if not folders:
        raise UserError(f"{results} has no runs in it")
    return "\n\n".join(_table(folder) for folder in folders)


def _table(folder: Path) -> str:
    run, rows = read_run(folder)
    where, facts = run["facts"]["environment"], run["facts"]
    about = (
        f"{where['target']} in {where['dtype']} on {where['processor']}, "
        + (f"{where['threads']} threads" if where["device"] == "cpu" else where["device"])
        + f", torch {where['torch']}, transformers {where['transformers']}, commit {where['commit']}, "
        f"{run['begun']}; {repeats_text(facts['repeats'])}, load average "
        f"{load_averages(rows)}: `{run['command']}`"
    )
    figures = [one for one in summarise(rows) if one.method == METHOD]
    if not figures:
        raise UserError(f"{folder} has no rows of method {METHOD}")
    peers = any(fastest_peer(one) for one in figures)
    header = ["prompts", "T", "against our vanilla", "tokens/s", "tau", "the same words"]
    if peers:
        header.insert(3, "against the fastest of transformers")
    return f"{about}\n\n{table(header, [_line(one, peers) for one in figures])}"


def _line(one: Figures, peers: bool) -> list[str]:
    line = [
        one.name,
        f"{one.temperature:g}",
        spread(one.speedup.get("vanilla")),
        spread(one.tokens_per_second, 1),
        "-" if one.tau is None else f"{one.tau:.2f}",
        sameness(one),
    ]
    if peers:
        peer = fastest_peer(one)
        line.insert(3, f"{spread(one.speedup[peer])}, {peer}" if peer else "-")
    return line


def rewritten(path: Path, text: str) -> str:
    """The file with what stands between the marks replaced."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"{path} has no place for the table: {BEGIN} and {END} are needed, in this order")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or put it into files; with --check only say whether they are up to date."""
    parser = argparse.ArgumentParser(prog="headline", description=main.__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="markdown with the two marks")
    parser.add_argument("--results", type=Path, default=Path("docs/results"), help="(%(default)s)")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a file is old")
    arguments = parser.parse_args(argv)
    try:
        text = headline(arguments.results)
        new = {path: rewritten(path, text) for path in arguments.files}
    except (UserError, OSError) as error:
        print(f"headline: error: {error}", file=sys.stderr)
        return 2
    if not new:
        print(text)
    old = [path for path, content in new.items() if path.read_text(encoding="utf-8") != content]
    for path in old:
        print(f"{path} is {'old' if arguments.check else 'rewritten'}")
        if not arguments.check:
            write_whole(path, new[path].encode())
    return 1 if old and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
