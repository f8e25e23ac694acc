"""Show a target's size, and plan the memory of decoding with it: part by part, against this machine's.

Only the config is fetched for a model that is not on disk.

  longspec info qwq
  longspec info llama8b --context 131072 --batch 4 --dtype bfloat16
  longspec info ./my-model --draft ./my-draft --json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from longspec.cli.arguments import DEFAULT_TARGET, add_size_arguments, add_tree_shape
from longspec.config import DEFAULT_TREE

if TYPE_CHECKING:
    from longspec.config import DraftConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec info`."""
    parser.add_argument("target", nargs="?", default=DEFAULT_TARGET, help="as --target of generate")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--offline", action="store_true", help="use only what is on disk")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of prompt and answer (default: the context limit)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="prompts at a time (%(default)s)")
    parser.add_argument(
        "--draft", metavar="DRAFT", help="as for generate (default: one of the published architecture)"
    )
    add_tree_shape(parser)
    add_size_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.decoding.methods import Tree
    from longspec.engine.memory import page_size, plan_decoding, size_engine
    from longspec.errors import UserError
    from longspec.hub import resolve
    from longspec.models.files import read_config
    from longspec.models.placement import pick_device, pick_dtype, plan_memory

    device = pick_device(arguments.device)
    dtype = pick_dtype(arguments.dtype, device)
    files = resolve(
        arguments.target, revision=arguments.revision, offline=arguments.offline, config_only=True
    )
    config = read_config(files.folder, files.config)
    limit = files.entry.context if files.entry else config.max_length
    context = _checked("context", limit if arguments.context is None else arguments.context, limit)
    batch = _checked("batch", arguments.batch)
    shape = arguments.tree_shape or DEFAULT_TREE
    Tree(shape)  # refuses what is wrong
    draft = _draft(arguments)
    budget = plan_decoding(config, draft, context, batch, shape, dtype, device)
    fits = min(limit, plan_memory(config, dtype, device).context_that_fits)
    rest = budget.free - budget.needs.weights - budget.needs.draft_weights
    page = page_size(dtype, config.head_dim, device.type == "cuda")
    try:
        size = size_engine(
            *(config, dtype, device, rest, page),
            max_rows=arguments.max_rows, kv_bytes=arguments.kv_memory, limit=limit,
        )  # fmt: skip
        engine = asdict(size) | {"kv_tokens": size.num_tokens}
    except UserError:
        engine = None  # there is no room for it, as the report says
    facts = {
        "target": files.name,
        "family": config.family,
        "parameters": config.num_parameters,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "context_limit": limit,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "kv_bytes_per_token": config.kv_bytes_per_token(dtype.itemsize),
        "context_that_fits": fits,
        "context": context,
        "batch": batch,
        "tree_shape": list(shape),
        "needs": asdict(budget.needs) | {"total": budget.needs.total},
        "free_bytes": budget.free,
        "device_bytes": budget.device_total,
        "left_bytes": budget.left,
        "engine": engine,
    }
    print(json.dumps(facts) if arguments.json else _report(facts))
    return 0


def _checked(name: str, value: int, limit: int | None = None) -> int:
    from longspec.errors import UserError

    if value < 1:
        raise UserError(f"--{name} is {value}; it must be at least 1")
    if limit is not None and value > limit:
        raise UserError(f"--{name} is {value}; the target's limit is {limit} tokens")
    return value


def _draft(arguments: argparse.Namespace) -> DraftConfig | None:
    from longspec.config import DraftConfig
    from longspec.hub import resolve_draft
    from longspec.models.draft_files import read_draft_config

    if arguments.draft == "none":
        return None
    if arguments.draft is None:
        return DraftConfig()
    return read_draft_config(resolve_draft(arguments.draft, offline=arguments.offline))


def _report(facts: dict[str, Any]) -> str:
    """The plan for people."""
    from longspec.models.placement import gigabytes

    needs, device, left = facts["needs"], facts["device"], facts["left_bytes"]
    per_token = f"{facts['kv_bytes_per_token']:,} bytes per token"
    rows = f"{facts['batch']} x {facts['context']:,} tokens and a tree"
    graphs = "reserved for captured rounds" if needs["graphs"] else "nothing: rounds are not replayed here"
    ring = f"{needs['draft_kv'] // facts['batch']:,} bytes a row, at any context"
    parts = {
        "weights": f"in {facts['dtype']}",
        "kv": f"{rows}, {per_token}",
        "rope": "its tables",
        "draft_weights": "",
        "draft_kv": ring,
        "graphs": graphs,
        "working": "reserved for libraries, the activations of a prefill chunk and logits",
    }
    lines = [
        f"{facts['target']}: {facts['family']}, {facts['parameters'] / 1e6:,.0f} million parameters",
        f"  {facts['layers']} layers, {facts['heads']} query and {facts['kv_heads']} KV heads of "
        f"{facts['head_dim']}, vocabulary {facts['vocabulary']:,}, context limit {facts['context_limit']:,}",
        f"Memory on {device}:",
    ]
    for name, note in parts.items():
        lines.append(f"  {name.replace('_', ' '):14} {gigabytes(needs[name]):>9}  {note}".rstrip())
    lines.append(f"  {'total':14} {gigabytes(needs['total']):>9}")
    free, whole = gigabytes(facts["free_bytes"]), gigabytes(facts["device_bytes"])
    verdict = f"{gigabytes(left)} are left" if left >= 0 else f"{gigabytes(-left)} are missing"
    lines.append(f"  {'free':14} {free:>9}  of {whole}: {verdict}")
    if left < 0:
        lines.append(
            "It does not fit: a shorter --context, a smaller --batch or --dtype, or another --device"
        )
    fits = facts["context_that_fits"]
    lines.append(f"A single prompt and its answer fit here up to {fits:,} tokens, without a draft")
    if engine := facts["engine"]:
        size = gigabytes(engine["kv_tokens"] * facts["kv_bytes_per_token"])
        lines.append(
            f"Loaded here, it answers up to {engine['max_rows']} prompts at once and holds "
            f"{engine['kv_tokens']:,} tokens of KV ({size}), at most {engine['max_length']:,} of one text"
        )
    return "\n".join(lines)
