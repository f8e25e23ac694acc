"""Programs that measure one thing each, and those that draw what was measured. Not part of the wheel."""
