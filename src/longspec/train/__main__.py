"""`python -m longspec.train`, for launchers that start a module in every process."""

import sys

from longspec.cli.main import main

sys.exit(main(["train", *sys.argv[1:]]))
