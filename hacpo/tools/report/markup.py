"""The page's templates: `template.html` is the page, `parts.html` its pieces as macros. Values are escaped in both."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from hacpo.tools.report.scales import count, number, percent, points, short_count


@cache
def environment() -> Environment:
    """What renders the templates."""
    made = Environment(
        loader=PackageLoader("hacpo.tools.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    made.filters |= {
        "count": count,
        "error_size": lambda error, share: f"{100 * error:.1f}" if share else f"{error:.2g}",
        "many": lambda number, what: f"{count(number)} {what}{'s' if number != 1 else ''}",
        "percentage": lambda share, digits: f"{100 * share:.{digits}f}%",
        "prose": _prose,
        "short": lambda text, most: text if len(text) <= most else text[: most - 1] + "…",
        "short_count": short_count,
        "shown": lambda value, share: percent(value) if share else number(value),
        "signed": signed,
    }
    return made


@cache
def parts() -> Any:
    """The macros of `parts.html`, as functions that return markup."""
    return environment().get_template("parts.html").module


def _prose(text: str) -> Markup:
    """Text with `code` set as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def signed(difference: float, share: bool) -> str:
    """A difference: of shares in percentage points."""
    return points(difference) if share else f"{'+' if difference > 0 else ''}{number(difference)}"
