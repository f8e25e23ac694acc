"""`longspec.train` with our kernels, in Triton's interpreter where there is no GPU.

A GPU chooses them by itself; that they are chosen is then what several processes with shares of a target
must cope with.
"""

import sys

from longspec.attention.triton_backend import TritonAttention
from longspec.cli.main import main
from longspec.models import target

if __name__ == "__main__":
    target.choose_backend = TritonAttention  # type: ignore[attr-defined, assignment]
    sys.exit(main(["train", *sys.argv[1:]]))
