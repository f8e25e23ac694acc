"""`longspec models` and `longspec info`: the known targets, and the memory that a target needs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from longspec.cli.arguments import (
    add_device,
    add_json,
    add_number,
    add_options,
    add_size_arguments,
    add_source,
    add_tensor_parallel,
    add_weights,
)
from longspec.cli.command import Command
from longspec.cli.terminal import printable
from longspec.decoding.methods import Tree
from longspec.hub.registry import DEFAULT_TARGET

if TYPE_CHECKING:
    from longspec.config import DraftConfig, ModelConfig
    from longspec.hub import ModelEntry

_MODELS = """\
List the models that have a short name.

Any other Llama, Qwen2, Qwen3 or Mistral model works too: give its hub id, folder or .gguf file as --target.
"""
_INFO = """\
Show the size of a target, and plan the memory for decoding with it.

Each part is compared with this machine's memory. If the model is not on disk, only its config is fetched.

longspec info qwq
longspec info llama8b --context 131072 --batch 4 --dtype bfloat16
longspec info ./my-model --draft ./my-draft --json
longspec info qwq --tensor-parallel 2
"""


def _models(arguments: argparse.Namespace) -> int:
    from longspec.hub import MODELS, default_draft, on_disk, shipped_draft
    from longspec.hub.embedded import REQUIREMENT

    rows = [
        {
            "name": entry.name,
            "target": entry.target,
            "source": "hub" if entry.target else f"PyPI {REQUIREMENT}",
            "draft": default_draft(entry),
            "draft_shipped": shipped_draft(entry.name) is not None,
            "context": entry.context,
            "default": entry.name == DEFAULT_TARGET,
            "on_disk": on_disk(entry),
        }
        for entry in MODELS.values()
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    line = "{:<14}  {:>7}  {:<7}  {:<35}  {}"
    print(line.format("name", "context", "on disk", "target", "draft"))
    for row in rows:
        here = "yes" if row["on_disk"] else "no"
        target, draft = row["target"] or f"(default) {row['source']}", row["draft"] or "none yet"
        draft = f"{draft} (comes with longspec)" if row["draft_shipped"] else draft
        print(line.format(row["name"], row["context"], here, target, draft))
    return 0


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="?", default=DEFAULT_TARGET, help="as --target of generate")
    add_source(parser)
    add_device(parser)
    add_tensor_parallel(parser)
    add_weights(parser)
    about = "tokens of prompt and answer (default: the context limit)"
    add_number(parser, "--context", None, about, least=1)
    add_number(parser, "--batch", 1, "prompts at a time", least=1)
    parser.add_argument(
        "--draft",
        metavar="DRAFT",
        help="as for generate (default: the draft of this target that comes with longspec, or else one with "
        "the published architecture; 'none': no draft)",
    )
    add_options(parser, Tree, "tree_shape")
    add_size_arguments(parser)
    add_json(parser)


def _info(arguments: argparse.Namespace) -> int:
    facts = _facts(arguments)
    print(json.dumps(facts) if arguments.json else printable(_report(facts)))
    return 0


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    from longspec.attention import choose_backend
    from longspec.engine.load import read_shape
    from longspec.engine.memory import page_size, plan_decoding, size_engine
    from longspec.errors import UserError
    from longspec.hub import resolve
    from longspec.models.placement import pick_devices

    devices = pick_devices(arguments.device, arguments.tensor_parallel)
    device = devices[0]
    find = partial(resolve, arguments.target, revision=arguments.revision, offline=arguments.offline)
    entry, config, precision, limit = read_shape(
        find, device, arguments.dtype, arguments.weights, arguments.kv_dtype, choose_backend()
    )
    context, batch = arguments.context or limit, arguments.batch
    if context > limit:
        raise UserError(f"--context is {context}; the target's limit is {limit} tokens")
    shape = Tree(arguments.tree_shape).tree_shape  # refuses a bad one
    draft_name, draft = _draft(arguments, entry, config)
    budget = plan_decoding(config, draft, context, batch, shape, precision, *devices)
    share = config.shared_by(len(devices))
    dtype, per_token = precision.kv_dtype, share.kv_bytes_per_token(precision.kv_dtype.itemsize)
    beside = plan_decoding(config, draft, 1, 1, shape, precision, *devices)
    rest = budget.free - budget.needs.weights - budget.needs.draft_weights
    page = page_size(dtype, config.head_dim, device.type == "cuda")
    engine, refused = None, None
    try:
        size = size_engine(
            *(share, dtype, device, rest, page),
            max_rows=arguments.max_rows, kv_bytes=arguments.kv_memory, limit=limit,
        )  # fmt: skip
        engine = asdict(size) | {"kv_tokens": size.num_tokens}
    except UserError as error:
        refused = str(error)
    return {
        "target": arguments.target,
        "family": config.family,
        "parameters": config.num_parameters,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "context_limit": limit,
        "draft": draft_name,
        "device": str(device),
        "tensor_parallel": len(devices),
        "dtype": str(precision.dtype).removeprefix("torch."),
        "weights": precision.weights,
        "weights_kept_as": precision.kept_as,
        "kv_dtype": precision.kv,
        "kv_bytes_per_token": per_token,
        "context_that_fits": min(limit, max(0, beside.left // per_token)),
        "context": context,
        "batch": batch,
        "tree_shape": list(shape),
        "needs": asdict(budget.needs) | {"total": budget.needs.total},
        "free_bytes": budget.free,
        "device_bytes": budget.device_total,
        "left_bytes": budget.left,
        "engine": engine,
        "engine_refused": refused,
    }


def _draft(
    arguments: argparse.Namespace, entry: ModelEntry | None, target: ModelConfig
) -> tuple[str | None, DraftConfig | None]:
    """The draft that `generate` would use, and its config; a published one is not fetched."""
    from longspec.hub import default_draft, resolve_draft, shipped_draft
    from longspec.models.draft_files import PUBLISHED, draft_config_for

    name = arguments.draft or default_draft(entry)
    if name in (None, "none"):
        return None, None
    if arguments.draft is None and shipped_draft(name) is None:
        return name, PUBLISHED
    path = resolve_draft(name, offline=arguments.offline)
    return name, draft_config_for(path, target, arguments.target)


def _report(facts: dict[str, Any]) -> str:
    from longspec.models.placement import gigabytes

    needs, device, left = facts["needs"], facts["device"], facts["left_bytes"]
    ranks = facts["tensor_parallel"]
    parts = {
        "weights": f"in {facts['weights_kept_as']}",
        "kv": f"{facts['batch']} x {facts['context']:,} tokens and a tree, "
        f"{facts['kv_bytes_per_token']:,} bytes per token in {facts['kv_dtype']}",
        "rope": "its tables",
        "draft_weights": f"draft: {facts['draft']}",
        "draft_kv": f"{needs['draft_kv'] // facts['batch']:,} bytes a row, at any context",
        "graphs": "reserved for captured rounds",
        "working": "reserved for libraries, the activations of a prefill chunk and logits",
    }
    lines = [
        f"{facts['target']}: {facts['family']}, {facts['parameters'] / 1e6:,.0f} million parameters",
        f"  {facts['layers']} layers, {facts['heads']} query and {facts['kv_heads']} KV heads of "
        f"{facts['head_dim']}, vocabulary {facts['vocabulary']:,}, context limit {facts['context_limit']:,}",
        f"Memory on {device}:" if ranks == 1 else f"Memory of each of {ranks} ranks, such as on {device}:",
    ]
    for name, note in parts.items():
        if needs[name]:
            lines.append(f"  {name.replace('_', ' '):14} {gigabytes(needs[name]):>9}  {note}")
    lines.append(f"  {'total':14} {gigabytes(needs['total']):>9}")
    free, whole = gigabytes(facts["free_bytes"]), gigabytes(facts["device_bytes"])
    verdict = f"{gigabytes(left)} are left" if left >= 0 else f"{gigabytes(-left)} are missing"
    lines.append(f"  {'free':14} {free:>9}  of {whole}: {verdict}")
    if left < 0:
        lines.append(
            "It does not fit: use a shorter --context, a smaller --batch, --dtype, --weights or --kv-dtype, "
            "or another --device"
        )
    beside = "with its draft" if facts["draft"] else "without a draft"
    lines.append(
        f"A single prompt and its answer fit here up to {facts['context_that_fits']:,} tokens, {beside}"
    )
    if engine := facts["engine"]:
        size = gigabytes(engine["kv_tokens"] * facts["kv_bytes_per_token"])
        lines.append(
            f"Loaded here, it answers up to {engine['max_rows']} prompts at once and holds "
            f"{engine['kv_tokens']:,} tokens of KV ({size}), at most {engine['max_length']:,} of one text"
        )
    else:
        lines.append(f"It cannot be loaded here: {facts['engine_refused']}")
    return "\n".join(lines)


MODELS = Command(
    _MODELS,
    add_json,
    _models,
)
INFO = Command(_INFO, _add_info, _info)
