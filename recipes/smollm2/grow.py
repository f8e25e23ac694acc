"""Let a trained draft read more or other layers of its target, or draft deeper.

  .venv/bin/python -m recipes.smollm2.grow smollm2-135m outputs/grown --cross-layers 9,14,19,24,29
  .venv/bin/longspec train experiment=smollm2_gpu draft.path=outputs/grown ...

New layers get random queries, and their results count for nothing until training says otherwise. So a draft
that keeps all of its layers drafts as before until it is trained; without some of them it drafts worse.
With --draft-vocab only so many of the most frequent tokens can be proposed from now on. --max-lag is how deep
it drafts at most; lags beyond those of before begin with the gates of the deepest one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspec.atomic import write_whole
from longspec.config import DraftConfig
from longspec.errors import UserError
from longspec.hub import resolve_draft
from longspec.models.draft_files import read_draft_config
from longspec.records import read_record

ASK, ANSWER = "cross_attn.q_proj", "cross_attn.o_proj.weight"
MOST_LAG = 32
Tensors = dict[str, Tensor]


def grown(tensors: Tensors, before: DraftConfig, after: DraftConfig, seed: int) -> Tensors:
    """The weights of a draft that reads the layers of `after`."""
    tensors = dict(tensors)
    share = tensors[ANSWER].shape[1] // len(before.cross_layers)
    kept = [layer for layer in after.cross_layers if layer in before.cross_layers]
    old_rows, rows = (
        torch.tensor([layers.index(layer) * share + i for layer in kept for i in range(share)]).long()
        for layers in (before.cross_layers, after.cross_layers)
    )
    generator = torch.Generator().manual_seed(seed)
    for name in (f"{ASK}.weight", f"{ASK}.bias"):
        if name in tensors:
            old = tensors[name].float()
            new = torch.zeros(len(after.cross_layers) * share, *old.shape[1:])
            if old.ndim == 2:
                new.normal_(0, float(old.std()), generator=generator)
            new[rows] = old[old_rows]
            tensors[name] = new.to(tensors[name].dtype)
    answer = tensors[ANSWER].new_zeros(tensors[ANSWER].shape[0], len(after.cross_layers) * share)
    answer[:, rows] = tensors[ANSWER][:, old_rows]
    tensors[ANSWER] = answer
    if after.lag_gate:
        size = after.max_lag * answer.shape[0]
        for name, neutral in (("lag_scale", 1.0), ("lag_shift", 0.0)):
            gates = tensors.get(name, answer.new_full((size,), neutral)).view(-1, answer.shape[0])
            # A new lag begins as the deepest of before.
            more = gates[-1:].expand(max(0, after.max_lag - len(gates)), -1)
            tensors[name] = torch.cat((gates[: after.max_lag], more)).flatten()
    if "vocab_ids" in tensors:
        tensors["vocab_ids"] = tensors["vocab_ids"][: after.draft_vocab].contiguous()
    return tensors


def checked(before: DraftConfig, num_layers: int, flags: argparse.Namespace) -> DraftConfig:
    """The draft's new shape, for a target of so many layers."""
    old = before.cross_layers
    layers = old if flags.cross_layers is None else flags.cross_layers
    inside = all(0 <= layer < num_layers for layer in layers)
    if not (inside and layers and list(layers) == sorted(set(layers))):
        raise UserError(
            f"--cross-layers is {','.join(map(str, layers))}: give layers from 0 to {num_layers - 1}, in "
            f"rising order; the draft reads {','.join(map(str, old))}"
        )
    vocab = before.draft_vocab if flags.draft_vocab is None else flags.draft_vocab
    if flags.draft_vocab is not None and not 0 < vocab <= before.draft_vocab:
        raise UserError(f"--draft-vocab is {vocab}; the draft has {before.draft_vocab or 'the whole one'}")
    lag = before.max_lag if flags.max_lag is None else flags.max_lag
    if not 0 < lag <= MOST_LAG:
        raise UserError(f"--max-lag is {lag}; it must be from 1 to {MOST_LAG}")
    if flags.lag_gate and not before.use_feature:
        raise UserError("--lag-gate is for a draft that is given the target's hidden state, and this is not")
    gate = before.lag_gate or flags.lag_gate
    return replace(before, cross_layers=layers, draft_vocab=vocab, max_lag=lag, lag_gate=gate)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the grown draft."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("draft", metavar="DRAFT", help="a draft folder of ours, or one that ships")
    parser.add_argument("output", type=Path, metavar="FOLDER", help="where the grown draft goes")
    parser.add_argument(
        "--cross-layers",
        type=lambda text: tuple(int(part) for part in text.split(",")),
        metavar="L,L,...",
        help="that it reads from now on; what it knows of layers of before is kept",
    )
    parser.add_argument("--draft-vocab", type=int, metavar="N", help="tokens that it can propose")
    parser.add_argument("--max-lag", type=int, metavar="N", help="how deep it drafts at most")
    parser.add_argument(
        "--lag-gate", action="store_true", help="let it know how far it lags (draft.lag_gate)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the new weights (default: %(default)s)")
    flags = parser.parse_args(argv)
    try:
        from safetensors.torch import load_file, save

        folder, output = Path(resolve_draft(flags.draft)), flags.output
        if not (folder / "model.safetensors").is_file():
            raise UserError(f"{folder} has no model.safetensors: it is not a draft folder of ours")
        if output.exists():
            raise UserError(f"{output} is there already: give a new folder")
        before, config = read_draft_config(folder), read_record(folder / "config.json", dict[str, Any])
        num_layers = config["fingerprint"]["shape"]["num_layers"]
        # Negative ones count from the last.
        before = replace(before, cross_layers=tuple(layer % num_layers for layer in before.cross_layers))
        after = checked(before, num_layers, flags)
        tensors = grown(load_file(folder / "model.safetensors"), before, after, flags.seed)
        building = output.with_name(f".building-{output.name}")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        # What was measured of it is not known of the new one.
        config |= {"draft": asdict(after), "acceptance": {}}
        write_whole(building / "model.safetensors", save(tensors, {"format": "pt"}))
        write_whole(building / "config.json", json.dumps(config, indent=1).encode())
        if (folder / "training.yaml").is_file():
            shutil.copy(folder / "training.yaml", building)
        building.rename(output)
    except UserError as error:
        print(f"grow: error: {error}", file=sys.stderr)
        return 2
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
