"""Give a draft more lags, so that further training can teach it to draft deeper:

python -m recipes.smollm2.deepen src/longspec/drafts/smollm2-135m outputs/deeper --max-lag 8

The gates of the new lags begin as those of the deepest known lag. The new folder has no table of acceptance,
because what was measured is of the old depth.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from longspec.atomic import unfinished
from longspec.train.export import TRAINING

GATES = ("lag_scale", "lag_shift")


def deepen(draft: Path, output: Path, max_lag: int) -> None:
    """Write the draft with `max_lag` lags to a new folder."""
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    known = config["draft"]["max_lag"]
    if max_lag <= known:
        sys.exit(f"--max-lag is {max_lag}, and {draft} has {known} lags already; give more")
    if output.exists():
        sys.exit(f"{output} exists already; give a new folder")
    tensors = load_file(draft / "model.safetensors")
    for name in GATES if config["draft"]["lag_gate"] else ():
        gates = tensors[name].view(known, -1)
        tensors[name] = torch.cat((gates, gates[-1:].expand(max_lag - known, -1))).flatten()
    config["draft"]["max_lag"], config["acceptance"] = max_lag, {}
    with unfinished(output) as building:
        building.mkdir()
        save_file(tensors, building / "model.safetensors", {"format": "pt"})
        if (draft / TRAINING).is_file():
            shutil.copy(draft / TRAINING, building)
        (building / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the flags and write the draft."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("draft", type=Path, help="a folder")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--max-lag", type=int, required=True, metavar="N", help="more than the draft has")
    flags = parser.parse_args(arguments)
    deepen(flags.draft, flags.output, flags.max_lag)


if __name__ == "__main__":
    main()
