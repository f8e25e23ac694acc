"""`python -m longspec.train`, for launchers that start a module in every process."""

import sys

from longspec.train.command import main

sys.exit(main())
