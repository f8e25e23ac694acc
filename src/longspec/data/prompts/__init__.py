"""Prompts of many kinds for a target to answer: a draft is good only at what its target was seen writing."""
