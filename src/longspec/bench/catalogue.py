"""Workloads by name: the built-in set, prompts made to a length, and the published experiments.

builtin, builtin:KIND    short prompts written for this, and two long ones; nothing is downloaded
repo:N, text:N           a prompt of N tokens, made of Python's own library or of its language reference
longbench:TASK, aime     the published experiments, as LongSpec's authors asked them
FILE                     a JSONL of yours
"""

from __future__ import annotations

import itertools
import re
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspec.api import LongSpec
from longspec.atomic import write_whole
from longspec.bench.workloads import Item, Workload, read_file
from longspec.data.records import read_records
from longspec.errors import UserError, check_known, reason_of

BUILTIN = Path(__file__).with_name("builtin.jsonl")
SOURCES = ("repo", "text")
# In tokens, of prompts that are made to length.
SHORTEST = 64
# Of the long prompts in the built-in set; `repo:N` and `text:N` give any other.
LONG = 2048


def load_workload(name: str, model: LongSpec, data: Path | None = None) -> Workload:
    """The workload called `name`; `data` is the folder with the files of the published experiments."""
    check_name(name)
    head, _, rest = name.partition(":")
    if head == "builtin":
        return builtin_set(model, rest or None)
    if head in SOURCES:
        return Workload(name, (long_item(model, head, int(rest)),))
    if head == "longbench":
        return longbench(model, rest, data)
    return aime(data) if name == "aime" else read_file(Path(name))


def check_name(name: str) -> None:
    """Refuse an unknown workload or a bad file. No model is needed, so the error comes before a long load."""
    head, _, rest = name.partition(":")
    if head == "builtin" and rest and rest not in _builtin_kinds():
        raise UserError(f"workload {name!r}: the built-in kinds are {', '.join(_builtin_kinds())}")
    if head in SOURCES and (not rest.isdecimal() or int(rest) < SHORTEST):
        raise UserError(
            f"workload {name!r}: give the prompt's length in tokens, {SHORTEST} or more: {head}:4096"
        )
    if head == "longbench":
        check_known("LongBench task", rest, TASKS)
    known = head in ("builtin", "longbench", *SOURCES) or name == "aime"
    if not known and not Path(name).is_file():
        raise UserError(
            f"workload {name!r} is unknown and no file; there are: builtin, builtin:KIND, repo:N, text:N, "
            "longbench:TASK, aime, and the paths of JSONL files"
        )
    if not known:
        read_file(Path(name))


def context_workload(
    model: LongSpec, source: str, lengths: Sequence[int] | None, max_new_tokens: int, limit: int = 1
) -> Workload:
    """Prompts of each length, each length a kind of its own; None is 1024, doubled up to the model's limit.

    The built-in sources give one prompt of each length, a file up to `limit`. If `lengths` is None, lengths
    that no text of the file has are left out.
    """
    check_source(source)
    asked = lengths
    if lengths is None:
        longest = model.engine.max_length - max_new_tokens
        lengths = [2**power for power in range(10, 40) if 2**power < longest] + [longest]
    short = next((length for length in lengths if length < SHORTEST), None)
    if short is not None:
        raise UserError(f"a prompt of {short} tokens is asked for; {SHORTEST} is the shortest")
    if source in SOURCES:
        items = [long_item(model, source, length, str(length)) for length in lengths]
        return Workload("context", tuple(items))
    found = {length: _cut_items(model, Path(source), length, limit) for length in lengths}
    lacking = [length for length, items in found.items() if not items]
    if lacking and (asked is not None or len(lacking) == len(found)):
        raise UserError(f"{source} has no text long enough for a prompt of {lacking[0]} tokens")
    return Workload(Path(source).name.partition(".")[0], tuple(itertools.chain(*found.values())))


def check_source(source: str) -> None:
    """Refuse a source that no long prompts can be made of, before a long load."""
    if source not in SOURCES and not Path(source).is_file():
        raise UserError(
            f"--source {source!r} is unknown and no file; there are: {', '.join(SOURCES)}, and the "
            "paths of JSONL files with 'context' and 'input', or 'text'"
        )


# The built-in set

# Packages of the standard library whose modules are read one after the other, most readable first.
_PACKAGES = (
    *("json", "logging", "http", "email", "asyncio", "unittest", "importlib", "concurrent", "urllib"),
    *("xml", "multiprocessing", "ctypes", "collections", "html", "wsgiref", "zoneinfo", "curses", "dbm"),
)
_MANUAL_QUESTION = "\n\nSummarise the text above: what is it about, and what are its main rules?"


def builtin_set(model: LongSpec, kind: str | None = None) -> Workload:
    """The set, or one kind of it: two short prompts of each kind and two long prompts."""
    short = [item for item in read_file(BUILTIN).items if kind in (None, item.kind)]
    long = [long_item(model, source, LONG) for source in SOURCES if kind in (None, source)]
    return Workload("builtin" if kind is None else f"builtin:{kind}", (*short, *long))


def _builtin_kinds() -> list[str]:
    return list(dict.fromkeys([*(item.kind for item in read_file(BUILTIN).items), *SOURCES]))


def long_item(model: LongSpec, source: str, length: int, kind: str | None = None) -> Item:
    """A prompt of exactly `length` tokens.

    repo: modules of the standard library, the last one cut off in its middle, to be continued as it is.
    text: pages of the Python language reference, to be summarised.
    """
    make = _repo if source == "repo" else _text
    return Item(f"{source}-{length}", kind or source, ids=make(model, length))


def _repo(model: LongSpec, length: int) -> tuple[int, ...]:
    folder = Path(sysconfig.get_path("stdlib"))
    modules = [path for name in _PACKAGES for path in sorted((folder / name).glob("*.py"))]
    modules += sorted(folder.glob("*.py"))
    # The file that is to be completed comes last, and other files of the repository before it.
    own = folder / "json" / "decoder.py"
    if own not in modules:
        raise UserError(f"Python's library has no sources in {folder}; give another workload, such as a file")
    code = own.read_text(encoding="utf-8")
    middle = code.index("\n", len(code) // 2) + 1
    ids = _ids(model, f"# File: json/decoder.py\n{code[:middle]}")
    for path in (path for path in modules if path != own):
        if len(ids) >= length:
            break
        name = path.relative_to(folder).as_posix()
        ids = _ids(model, f"# File: {name}\n{path.read_text(encoding='utf-8', errors='replace')}\n") + ids
    if len(ids) < length:
        raise UserError(f"repo:{length} is longer than what there is, {len(ids)} tokens here")
    return tuple(ids[-length:])


def _text(model: LongSpec, length: int) -> tuple[int, ...]:
    from pydoc_data.topics import topics

    ids: list[int] = []
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        if len(ids) >= length:
            break
        ids += _ids(model, topics[name] + "\n\n")
    prompt = _spliced(model, "Here are pages of a manual.", ids, _MANUAL_QUESTION, length)
    if prompt is None:
        raise UserError(f"text:{length} is longer than the reference, which has {len(ids)} tokens here")
    return prompt


def _ids(model: LongSpec, text: str) -> list[int]:
    return list(model.tokenizer(text, add_special_tokens=False)["input_ids"])


# Prompts cut from a file

_QUESTION = "Summarize the text above in a few sentences."
# No readable text has more characters per token.
_MOST_CHARACTERS = 12


def _cut_items(model: LongSpec, path: Path, length: int, limit: int) -> list[Item]:
    """The first `limit` texts of a JSONL that are long enough, each cut to a prompt of `length` tokens.

    A record has `context` and the question `input`, as in LongBench and QMSum; or `text`, a book, which is to
    be summed up and is read from a third of its length on.
    """
    items: list[Item] = []
    for number, (place, record) in enumerate(read_records([str(path)]), 1):
        text, question = record.get("context", record.get("text")), record.get("input") or _QUESTION
        if not isinstance(text, str) or not isinstance(question, str):
            raise UserError(f"{place}: a text 'context' or 'text' is needed, and a text 'input'")
        begin = 0 if "context" in record else text.find("\n", len(text) // 3) + 1
        ids = _ids(model, text[begin:][: _MOST_CHARACTERS * length])
        prompt = _spliced(model, "Here is a text.\n\n", ids, f"\n\n{question}", length)
        if prompt is not None:
            items.append(Item(f"{number}-{length}", str(length), ids=prompt))
        if len(items) == limit:
            break
    return items


def _spliced(
    model: LongSpec, lead: str, ids: list[int], question: str, length: int
) -> tuple[int, ...] | None:
    """A chat prompt of exactly `length` tokens: the lead, as many of `ids` as fit, the question.

    None where there are too few `ids`. The template is applied to lead and question, and the ids are put
    between the two.
    """
    asked = model.encoder.encode(lead + question, False, model.target.config.vocab_size)
    last = _ids(model, question)
    place = next(
        (at for at in range(len(asked)) if asked[at : at + len(last)] == last),
        len(asked),  # the tokenizer joined lead and question: the text then comes after both
    )
    room = length - len(asked)
    if room < 1:
        raise UserError(f"{length} tokens are too few for a question of {len(asked)} tokens")
    return (*asked[:place], *ids[:room], *asked[place:]) if len(ids) >= room else None


# The published experiments

# Prompts this short or shorter are left out, and those that leave less than this much of the context.
FLOOR, HEADROOM = 1200, 2000
AIME_FILE = ("AI-MO/aimo-validation-aime", "data/train-00000-of-00001.parquet")
# The ids of AIME 2024 in that file.
AIME24 = range(60, 90)
_SYSTEM = "You are a helpful assistant"
_CODE = "Please complete the code given below. \n{context}Now, complete the code given."
# LongBench's instruction for each task, and the words the answer begins with.
TASKS: dict[str, tuple[str, str]] = {
    "gov_report": (
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.",
        "Summary:",
    ),
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or instruction. Answer the "
        "query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the "
        "above meeting transcript in one or more sentences.\n\nQuery: {input}",
        "Answer:",
    ),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.",
        "Summary:",
    ),
    "lcc": (_CODE, ""),
    "repobench-p": (_CODE, ""),
}


def longbench(model: LongSpec, task: str, data: Path | None) -> Workload:
    """The prompts of a LongBench task that are long enough and fit.

    `data` has TASK.jsonl with `context` and `input`; without it the dataset comes from the hub.
    """
    path = data / f"{task}.jsonl" if data else _longbench_file(task)
    body, lead = TASKS[task]
    most = model.engine.max_length - HEADROOM
    items, lengths = [], []
    for number, (place, values) in enumerate(read_records([str(path)]), 1):
        if not isinstance(values.get("context"), str):
            raise UserError(f"{place}: no text 'context'")
        # Not str.format, because contexts contain braces.
        asked = _filled(body, values)
        text = f"<s>system\n{_SYSTEM}</s>\n<s>user\n{asked}</s>\n<s>assistant\n{lead}"
        ids = tuple(model.tokenizer(text)["input_ids"])
        lengths.append(len(ids))
        if FLOOR < len(ids) <= most:
            items.append(Item(str(values.get("_id", number)), task, ids=ids))
    if lengths and not items:
        raise UserError(
            f"none of the {len(lengths)} prompts of {task} can be used: they have {min(lengths)} to "
            f"{max(lengths)} tokens, and more than {FLOOR} and at most {most} (the context of "
            f"{model.engine.max_length} less {HEADROOM}) are needed"
        )
    return Workload(f"longbench:{task}", tuple(items), len(lengths) - len(items))


def _filled(body: str, values: dict[str, Any]) -> str:
    return re.sub(r"\{(context|input)\}", lambda field: str(values.get(field[1], "")), body)


def aime(data: Path | None, first: int = AIME24.start, last: int = AIME24.stop - 1) -> Workload:
    """Problems of AIME by their ids in AI-MO/aimo-validation-aime; 60 to 89 are those of 2024.

    `data` has aime.jsonl with `id` and `problem`; without it the dataset comes from the hub.
    """
    path = data / "aime.jsonl" if data else _download(*AIME_FILE)
    items = []
    for place, values in read_records([str(path)]):
        try:
            index, problem = int(values["id"]), str(values["problem"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{place}: no number 'id' or no 'problem'") from error
        if first <= index <= last:
            text = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{problem}<|im_end|>\n"
            items.append(Item(str(index), "aime", (f"{text}<|im_start|>assistant\n",), raw=True))
    if not items:
        raise UserError(f"there are no AIME problems with ids {first} to {last}")
    return Workload("aime", tuple(items))


def _longbench_file(task: str) -> Path:
    archive = _download("THUDM/LongBench", "data.zip")
    path = archive.parent / f"{task}.jsonl"
    if not path.exists():
        with zipfile.ZipFile(archive) as files:
            write_whole(path, files.read(f"data/{task}.jsonl"))
    return path


def _download(dataset: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(dataset, name, repo_type="dataset"))
    except Exception as error:  # the hub's client raises errors of many types
        raise UserError(
            f"cannot fetch {name} of {dataset} from the hub ({reason_of(error)}); give a folder that has the "
            "data with --data_path_prefix or --data"
        ) from error
