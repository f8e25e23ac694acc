"""`python -m longspec` is `longspec`."""

import sys

from longspec.cli.main import main

sys.exit(main())
