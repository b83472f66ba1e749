r"""Worked solutions of reasoning-gym's problems, for the warm start of agents made from scratch: short, the box last.

| task               | problem                    | solution                             |
|--------------------|----------------------------|--------------------------------------|
| `chain_sum`        | `... 7 + 3 - 2 =`          | `7+3=10 10-2=8 \boxed{8}`            |
| `basic_arithmetic` | `Calculate 7 - 3 * 2.`     | `3*2=6 7-6=1 \boxed{1}`              |
| `simple_equations` | `Solve for x: 4*x + 3 = 27`| `27-3=24 24/4=6 \boxed{6}`           |
| `gcd`              | `... 30, 12. ...`          | `30%12=6 12%6=0 \boxed{6}`           |
| `lcm`              | `... 12, 8`                | `12*8=96 96/4=24 \boxed{24}`         |
| `products`         | `... 43 * 6. ...`          | `40*6=240 3*6=18 240+18=258 \boxed{258}` |

What none of these rules fits (parentheses, three numbers to divide, another task) has the boxed answer alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from hacpo.data.tasks import Step, worked

_SUM = re.compile(r"\d+(?: [-+*] \d+)+")
_PRODUCT = re.compile(r"(\d{1,2}) \* (\d{1,2})")
_LINEAR = re.compile(r"(?:(\d+) (\+|-) )?(?:(\d+)\*)?[a-z](?: (\+|-) (\d+))? = (-?\d+)")


def solution(task: str, entry: Mapping[str, Any]) -> str:
    """The solution of an entry of a task: its steps, if a rule fits it, and the boxed answer."""
    rule = _RULES.get(task)
    steps = rule(entry["metadata"]) if rule else []
    if not steps or str(_result(task, steps)) != entry["answer"]:
        steps = []
    return worked(steps, entry["answer"])


def _result(task: str, steps: list[Step]) -> int:
    """What the steps say is the answer; Euclid's is the divisor of the last one."""
    last = steps[-1]
    return int(last.expression.split("%")[1]) if task == "gcd" else last.result


def _sum(metadata: Mapping[str, Any]) -> list[Step]:
    if not _SUM.fullmatch(metadata["expression"]):
        return []
    numbers, signs = [int(part) for part in metadata["expression"].split()[::2]], metadata["expression"].split()[1::2]
    steps = []
    while signs:
        at = signs.index("*") if "*" in signs else 0
        left, sign, right = numbers[at], signs.pop(at), numbers.pop(at + 1)
        numbers[at] = {"+": left + right, "-": left - right, "*": left * right}[sign]
        steps.append(Step(f"{left}{sign}{right}", numbers[at]))
    return steps


def _equation(metadata: Mapping[str, Any]) -> list[Step]:
    parts = _LINEAR.fullmatch(metadata["equation"])
    if parts is None:
        return []
    before, before_sign, factor, after_sign, after = parts.groups()[:5]
    right, steps = int(parts[6]), []
    if before is not None and after is not None:
        return []
    if before_sign == "-":  # 12 - 3x = -6: 3x is 12 + 6
        steps.append(Step(f"{before}{_signed(-right)}", int(before) - right))
    elif before is not None or after is not None:
        moved = -int(after or before) if after_sign != "-" else int(after)
        steps.append(Step(f"{right}{_signed(moved)}", right + moved))
    if factor is not None:
        whole = steps[-1].result if steps else right
        steps.append(Step(f"{whole}/{factor}", whole // int(factor)))
    return steps


def _signed(number: int) -> str:
    return f"{number:+d}"


def _euclid(metadata: Mapping[str, Any]) -> list[Step]:
    if len(metadata["numbers"]) != 2:
        return []
    left, right = sorted(metadata["numbers"], reverse=True)
    steps = []
    while right:
        steps.append(Step(f"{left}%{right}", left % right))
        left, right = right, left % right
    return steps


def _multiple(metadata: Mapping[str, Any]) -> list[Step]:
    if len(metadata["numbers"]) != 2:
        return []
    left, right = metadata["numbers"]
    divisor = math.gcd(left, right)
    product = Step(f"{left}*{right}", left * right)
    return [product] if divisor == 1 else [product, Step(f"{product.result}/{divisor}", product.result // divisor)]


def _product(metadata: Mapping[str, Any]) -> list[Step]:
    factors = _PRODUCT.fullmatch(metadata["expression"])
    if factors is None:
        return []
    small, large = sorted(map(int, factors.groups()))
    if small > 9:
        return []
    if large < 10:
        return [Step(f"{large}*{small}", large * small)]
    tens, ones = large // 10 * 10, large % 10
    parts = [Step(f"{tens}*{small}", tens * small), Step(f"{ones}*{small}", ones * small)]
    return [*parts, Step(f"{parts[0].result}+{parts[1].result}", large * small)]


_RULES: Mapping[str, Callable[[Mapping[str, Any]], list[Step]]] = {
    "basic_arithmetic": _sum,
    "chain_sum": _sum,
    "gcd": _euclid,
    "lcm": _multiple,
    "products": _product,
    "simple_equations": _equation,
}
