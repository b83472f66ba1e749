"""Pages of docs/ whose commands are run: `python tests/pages.py docs/tutorial.md PROJECT` writes their output anew.

Fenced blocks, in their order: `sh` is run and what it prints is not looked at; `console` has `$ command` and what it
prints; `pycon` has `>>> statement` and what that prints, all of them in one interpreter.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"^```(sh|console|pycon)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")


@dataclass(frozen=True)
class Example:
    """One command or statement of a page.

    Attributes:
        kind: of its block.
        source: what is run.
        want: what the page says that it prints.
        line: in the page.
    """

    kind: str
    source: str
    want: str
    line: int


def examples(page: str) -> Iterator[Example]:
    """All that a page runs."""
    for block in _BLOCK.finditer(page):
        kind, body = block.groups()
        line = page[: block.start()].count("\n") + 2
        if kind == "pycon":
            for example in doctest.DocTestParser().get_examples(body):
                yield Example(kind, example.source, example.want, line + example.lineno)
        elif kind == "sh":
            yield Example(kind, body, "", line)
        else:
            command, _, want = body.removeprefix("$ ").partition("\n")
            yield Example(kind, command, want, line)


def run(page: str, project: Path) -> list[tuple[Example, str]]:
    """Run a page's examples in a project; each with what it printed."""
    names: dict[str, Any] = {}
    with contextlib.chdir(project):
        return [(example, _output(example, names)) for example in examples(page)]


def _output(example: Example, names: dict[str, Any]) -> str:
    if example.kind == "pycon":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(example.source, f"line {example.line}", "single"), names)
        return printed.getvalue()
    environment = {**os.environ, "COLUMNS": "100", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", example.source],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"line {example.line}: {example.source}\n{done.stdout}\n{done.stderr}"
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n" if example.kind == "console" else ""


def differences(results: list[tuple[Example, str]]) -> list[str]:
    """Where a page does not say what its examples print.

    To the letter, where the models that were trained have the bits of the page's; kinds of processor round differently,
    and elsewhere numbers, names and texts may be others. `True` is `True` everywhere.
    """
    digests = [_DIGEST.findall(text) for text in ("".join(e.want for e, _ in results), "".join(o for _, o in results))]
    same_bits = digests[0] == digests[1]
    return [
        f"line {example.line}: {example.source.strip()}\nexpected:\n{example.want}found:\n{output}"
        for example, output in results
        if (output != example.want if same_bits else not _alike(example, output))
    ]


def _alike(example: Example, output: str) -> bool:
    if example.kind != "pycon" or "True" in (example.want.strip(), output.strip()):
        return example.kind == "console" or output == example.want
    return _shape(output) == _shape(example.want)


def _shape(printed: str) -> str:
    """What is printed without its numbers, texts and truth values, and without the length of lists."""
    for pattern, stand_in in (
        (r"'[^']*'(?!:)", "'text'"),
        (r"-?\d+(\.\d+)?(e[+-]?\d+)?", "0"),
        (r"\b(True|False)\b", "bool"),
        (r"\s+", " "),
        (r"0(, 0)+", "0"),
    ):
        printed = re.sub(pattern, stand_in, printed)
    return printed


def recorded(page: str, results: list[tuple[Example, str]]) -> str:
    """The page with what its examples printed."""
    outputs = iter(results)

    def block(found: re.Match[str]) -> str:
        kind, body = found.groups()
        if kind == "pycon":
            parts = []
            for _ in doctest.DocTestParser().get_examples(body):
                example, output = next(outputs)
                first, *rest = example.source.splitlines()
                parts += [f">>> {first}\n", *(f"... {line}\n" for line in rest), output]
            body = "".join(parts)
        elif kind == "sh":
            next(outputs)
        else:
            example, output = next(outputs)
            body = f"$ {example.source}\n{output}"
        return f"```{kind}\n{body}```"

    return _BLOCK.sub(block, page)


if __name__ == "__main__":
    file, project = Path(sys.argv[1]), Path(sys.argv[2])
    text = file.read_text("utf-8")
    file.write_text(recorded(text, run(text, project)), "utf-8")
