"""The decoding methods. Each is one file; importing this package registers those that come with it."""

from longspec.decoding.methods.base import MOST_NODES, Auto, Chain, Method, MethodChoice
from longspec.decoding.methods.lookup import Lookup
from longspec.decoding.methods.magicdec import MagicDec
from longspec.decoding.methods.registry import register
from longspec.decoding.methods.seq import Seq
from longspec.decoding.methods.tree import Tree
from longspec.decoding.methods.vanilla import VANILLA, Vanilla
from longspec.option import Option, option

__all__ = [
    "MOST_NODES",
    "VANILLA",
    "Auto",
    "Chain",
    "Lookup",
    "MagicDec",
    "Method",
    "MethodChoice",
    "Option",
    "Seq",
    "Tree",
    "Vanilla",
    "option",
    "register",
]
