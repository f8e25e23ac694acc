"""See `longspec.train.command`, which all launchers share."""

from longspec.train import command
from longspec.train.command import add_arguments, run

__doc__ = command.__doc__
__all__ = ["add_arguments", "run"]
