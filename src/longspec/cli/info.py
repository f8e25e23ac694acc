"""Show a target's size, the KV cache one token takes, and what context fits in this machine's memory.

Only the config is fetched for a model that is not on disk.

  longspec info qwq
  longspec info ./my-model --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json

from longspec.cli.arguments import DEFAULT_TARGET


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec info`."""
    parser.add_argument("target", nargs="?", default=DEFAULT_TARGET, help="as --target of generate")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--offline", action="store_true", help="use only what is on disk")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.cache import DraftCache
    from longspec.config import DraftConfig
    from longspec.decoding.methods.make import DEFAULT_TREE
    from longspec.hub import resolve
    from longspec.models.files import read_config
    from longspec.models.placement import gigabytes, pick_device, pick_dtype, plan_memory

    device = pick_device(arguments.device)
    dtype = pick_dtype(arguments.dtype, device)
    files = resolve(
        arguments.target, revision=arguments.revision, offline=arguments.offline, config_only=True
    )
    config = read_config(files.folder, files.config)
    limit = files.entry.context if files.entry else config.max_length
    plan = plan_memory(config, dtype, device)
    ring = DraftCache.size_of(config, DraftConfig(), sum(DEFAULT_TREE) + 1, dtype)
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
        "weights_bytes": plan.weights,
        "kv_bytes_per_token": plan.kv_per_token,
        "draft_kv_bytes": ring,
        "free_bytes": plan.free,
        "context_that_fits": min(limit, plan.context_that_fits),
    }
    if arguments.json:
        print(json.dumps(facts))
        return 0
    fits = facts["context_that_fits"]
    print(f"{files.name}: {config.family}, {config.num_parameters / 1e6:,.0f} million parameters")
    print(
        f"  shape          {config.num_layers} layers, {config.num_heads} query and {config.num_kv_heads} KV "
        f"heads of {config.head_dim}, vocabulary {config.vocab_size:,}"
    )
    print(f"  weights        {gigabytes(plan.weights)} in {facts['dtype']}")
    whole = gigabytes(plan.kv_per_token * limit)
    print(f"  KV cache       {plan.kv_per_token:,} bytes per token, {whole} at the context limit")
    print(f"  draft KV       {ring:,} bytes for a draft's window and tree, at any context")
    print(f"  context limit  {limit:,} tokens")
    print(f"  fits here      {fits:,} tokens ({gigabytes(plan.free)} free on {device})")
    return 0
