"""Boxed answers made to stall, crash or fool a verifier; none of them is 5."""

from __future__ import annotations

from collections.abc import Callable

FAMILIES: dict[str, Callable[[int], str]] = {
    "tower of powers": lambda i: f"9^{{9^{{{i + 9}}}}}",
    "factorials of factorials": lambda i: f"{i + 9}!!!",
    "large factorial": lambda i: f"{i + 10**6}!",
    "nesting beyond the limit": lambda i: "(" * 400 + str(i) + ")" * 400,
    "nesting below the limit": lambda i: "{" * 7 + str(i + 6) + "}" * 7,
    "sums nested to the limit": lambda i: r"\sqrt{1+" * 9 + str(i + 2) + "}" * 9,
    "long number": lambda i: f"{i + 1}" * 200,
    "open fractions": lambda i: rf"\frac{{1}}{{1+\frac{{{i}}}" * 5,
    "a library's function": lambda i: rf"\operatorname{{zeros}}({i + 99999}, 99999)",
    "large binomial": lambda i: rf"\binom{{{i + 10**7}}}{{5000}}",
    "control characters": lambda i: f"\x00{i}\ud800\u202e" + "𝟗" * 50,
    "minus signs": lambda i: "-" * 100 + str(i + 6),
    "carets": lambda i: "^" * 100 + "_" * 100 + str(i),
    "symbolic tower": lambda i: f"x^{{x^{{x^{{{i + 2}}}}}}}",
    "code": lambda i: f"__import__('os').system('{i}') or 5",
    "long list": lambda i: ",".join(str(i + j) for j in range(150)),
    "long text": lambda i: rf"\text{{{'a b ' * 100}{i}}}",
    "expansion that never ends": lambda i: f"(x+1)^{{{i + 10**5}}}",
    "product of sums": lambda i: "".join(f"(x+{i + j})" for j in range(40)),
    "sum of roots": lambda i: "+".join(rf"\sqrt{{{i + 2 * j + 3}}}" for j in range(30)),
    "long sum": lambda i: rf"\sum_{{k=1}}^{{{i + 10**9}}} \frac{{1}}{{k^2}}",
    "integral": lambda i: rf"\int_0^{{{i + 1}}} e^{{x^{{x}}}} \sin(x^{{{i + 2}}}) dx",
    "matrix": lambda i: (
        r"\begin{pmatrix}" + r"\\".join("&".join(["x+" + str(i)] * 12) for _ in range(8)) + r"\end{pmatrix}"
    ),
    "trigonometric powers": lambda i: "+".join(rf"\sin^{{{i + j}}}(x)\cos^{{{j}}}(x)" for j in range(2, 14)),
}


def answers(count: int) -> list[str]:
    """`count` different answers, the families in turn."""
    families = list(FAMILIES.values())
    return [families[index % len(families)](index // len(families)) for index in range(count)]
