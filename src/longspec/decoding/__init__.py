"""Turning a target into tokens: choosing one, and the round loop that every method shares."""
