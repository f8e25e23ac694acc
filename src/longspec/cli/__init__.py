"""The command line: flags to one library call each. Nothing heavy is imported before it is needed."""

import os

# Threads that wait for each other sleep, because threads that spin (OpenMP's default) take the processor from
# the one they wait for as soon as another program is busy too; see docs/measurements/cpu.md. OpenMP reads it
# when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
