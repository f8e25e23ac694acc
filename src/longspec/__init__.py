"""LongSpec."""
