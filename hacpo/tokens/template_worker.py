"""The process in which chat templates are rendered: one JSON line in, one out; it imports Jinja and little else.

A chat template is a program of a stranger's. Jinja's sandbox keeps it from files and attributes, not from loops within
loops or texts of gigabytes, so it runs where it can be killed (`hacpo.tokens.renderer`). Names, filters and white
space are those that transformers gives to templates (`apply_chat_template`).

A request is `{"template", "variables", "bytes"}`, a reply `{"text"}` or `{"refused": why, "beyond_bounds": bool}`; the
first line out is `{"ready": true}`.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hacpo.kernel import bound_memory, end_with_parent

_TODAY = datetime.date(2024, 7, 26)
"""What a template that asks for the date is told, so that a prompt is the same on every day: the date that Llama 3.2's
own template takes where it cannot ask."""

_LONGEST = 1 << 22
"""Characters of a rendered prompt; no model reads as many."""

_WITHOUT_PROC = 1 << 30
"""Bytes that this process is taken to hold where the kernel does not say."""


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
    end_with_parent()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    replies.write('{"ready": true}\n')
    replies.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        bound_memory(int(request["bytes"]), taken=_WITHOUT_PROC)
        replies.write(json.dumps(_answer(request)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
