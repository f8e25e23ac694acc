"""Hydra's configuration groups and the ready experiments."""
