"""The published experiments' prompts: LongBench tasks and AIME 2024, as LongSpec's authors asked them."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path
from typing import Any

from longspec.api import LongSpec
from longspec.bench.workloads import Item, Workload, read_lines
from longspec.errors import UserError

# Prompts this short or shorter are left out, and those that leave less than this much of the context.
FLOOR, HEADROOM = 1200, 2000
AIME24 = range(60, 90)
"""The ids of AIME 2024 in AI-MO/aimo-validation-aime."""
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
    """A LongBench task, those of its prompts that are long enough and fit.

    `data` has TASK.jsonl with `context` and `input`; without it the dataset comes from the hub.
    """
    path = data / f"{task}.jsonl" if data else _longbench_file(task)
    body, lead = TASKS[task]
    most = model.engine.max_length - HEADROOM
    items, lengths = [], []
    for number, values in read_lines(path):
        if not isinstance(values.get("context"), str):
            raise UserError(f"{path}, line {number}: no text 'context'")
        # Not str.format: contexts hold braces of their own.
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
    return re.sub(r"\{(context|input)\}", lambda place: str(values.get(place[1], "")), body)


def aime(data: Path | None, first: int = AIME24.start, last: int = AIME24.stop - 1) -> Workload:
    """Problems of AIME by their ids in AI-MO/aimo-validation-aime; 60 to 89 are those of 2024.

    `data` has aime.jsonl with `id` and `problem`; without it the dataset comes from the hub.
    """
    lines = [values for _, values in read_lines(data / "aime.jsonl")] if data else _aime_lines()
    items = []
    for number, values in enumerate(lines, 1):
        try:
            index, problem = int(values["id"]), str(values["problem"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"problem {number} of AIME has no number 'id' or no 'problem'") from error
        if first <= index <= last:
            text = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{problem}<|im_end|>\n"
            items.append(Item(str(index), "aime", (f"{text}<|im_start|>assistant\n",), raw=True))
    if not items:
        raise UserError(f"there are no AIME problems with ids {first} to {last}")
    return Workload("aime", tuple(items))


def _longbench_file(task: str) -> Path:
    """The task's file out of the hub's archive."""
    archive = Path(_download("THUDM/LongBench", "data.zip"))
    path = archive.parent / f"{task}.jsonl"
    if not path.exists():
        from longspec.models.files import write_whole

        with zipfile.ZipFile(archive) as files:
            write_whole(path, files.read(f"data/{task}.jsonl"))
    return path


def _aime_lines() -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"AIME from the hub needs: pip install 'longspec[train]' ({error})") from error
    path = Path(_download("AI-MO/aimo-validation-aime", "data/train-00000-of-00001.parquet"))
    rows: list[dict[str, Any]] = parquet.read_table(io.BytesIO(path.read_bytes())).to_pylist()
    return rows


def _download(dataset: str, name: str) -> str:
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(dataset, name, repo_type="dataset")
    except Exception as error:  # the hub's client raises many kinds; all mean that the file is not to be had
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"cannot fetch {name} of {dataset} from the hub ({reason}); give a folder that has the data with "
            "--data_path_prefix or --data"
        ) from error
