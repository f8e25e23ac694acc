"""A process that renders chat templates within limits. `longspec.templates` runs it as a script.

A chat template is a program that comes with a model. In this process its time and memory are limited: if it
exceeds them, the system ends only this process.
"""

from __future__ import annotations

import functools
import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Of one question: seconds of processor time and of waiting, bytes of memory, characters of output.
SECONDS, WAITING, MEMORY, OUTPUT = 2.0, 8.0, 2**30, 2**24


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said; it does not change the text."""

    tags = {"generation"}  # noqa: RUF012 # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A namespace without names that are special in Python."""

    def __init__(*args: Any, **values: Any) -> None:
        names = dict(*args[1:], **values)
        if any(str(name).startswith("_") for name in names):
            raise TemplateError("names in a namespace must not begin with an underscore")
        Namespace.__init__(args[0], names)

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TemplateError("names in a namespace must not begin with an underscore")
        super().__setitem__(name, value)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


@functools.cache
def _compiled(template: str) -> Template:
    """With the settings and names that Hugging Face's templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    # Without the HTML escapes of jinja2's own filter.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _PlainNamespace,
    }
    return environment.from_string(template)


def _answer(data: bytes) -> dict[str, Any]:
    try:
        request = json.loads(data)
        template, values = _compiled(request["template"]), request["values"]
        texts = [template.render(values | {"messages": one}) for one in request["conversations"]]
    except MemoryError:
        return {"error": f"it needs more than {MEMORY // 2**20} MiB of memory"}
    except Exception as error:  # templates may raise anything to refuse a conversation
        return {"error": str(error)[:300] or type(error).__name__}
    if max(map(len, texts)) > OUTPUT:
        return {"error": f"it writes more than {OUTPUT:,} characters"}
    return {"texts": texts}


def serve() -> None:
    """Answer until the other side closes; each question and each answer is a line of JSON."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while data := source.readline():
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # the signals of both end the process
        signal.setitimer(signal.ITIMER_REAL, WAITING)
        answer = json.dumps(_answer(data)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sink.write(answer + b"\n")
        sink.flush()


if __name__ == "__main__":
    serve()
