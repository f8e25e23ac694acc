"""Decoding: choosing a token, token trees, acceptance, and the round that every method shares."""
