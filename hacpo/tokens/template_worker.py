"""The process in which chat templates are rendered: one JSON line in, one out; it stands alone and imports Jinja only.

A chat template is a program of a stranger's. Jinja's sandbox keeps it from files and attributes, not from loops within
loops or texts of gigabytes, so it runs where it can be killed (`hacpo.tokens.renderer`). Names, filters and white
space are those that transformers gives to templates (`apply_chat_template`).

A request is `{"template", "variables", "bytes"}`, a reply `{"text"}` or `{"refused": why, "beyond_bounds": bool}`; the
first line out is `{"ready": true}`.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TODAY = datetime.date(2024, 7, 26)
"""What a template that asks for the date is told, so that a prompt is the same on every day: the date that Llama 3.2's
own template takes where it cannot ask."""

_LONGEST = 1 << 22
"""Characters of a rendered prompt; no model reads as many."""

_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


class _Generation(Extension):
    """`{% generation %}`, with which templates mark what the assistant says; here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own form

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment.from_string(template)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        text = _compiled(request["template"]).render(**request["variables"])
    except MemoryError:
        return {"refused": "it takes more memory than a prompt may", "beyond_bounds": True}
    except RecursionError:
        return {"refused": "it calls itself without end", "beyond_bounds": False}
    except Exception as error:  # a template may raise anything
        why = (str(error).splitlines() or [type(error).__name__])[0][:160]
        return {"refused": why, "beyond_bounds": False}
    if len(text) > _LONGEST:
        return {"refused": f"it makes a prompt of {len(text)} characters", "beyond_bounds": False}
    return {"text": text}


def main() -> None:
    """Answers requests until standard input or the process above ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    replies.write('{"ready": true}\n')
    replies.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit_memory(int(request["bytes"]))
        replies.write(json.dumps(_answer(request)) + "\n")
        replies.flush()


def _limit_memory(more: int) -> None:
    """Bounds the address space at what is taken and `more` bytes, or at what a cluster allows if that is less."""
    limit, (_, most) = _address_space() + more, resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _address_space() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return 1 << 30


if __name__ == "__main__":
    main()
