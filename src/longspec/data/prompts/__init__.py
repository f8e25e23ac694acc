"""Prompts of many kinds for a target to answer, because a draft is good only at texts like those it saw."""
