"""Mixtures of reasoning-gym's tasks, and which of its tasks may be in one.

[reasoning-gym](https://github.com/open-thought/reasoning-gym) (Apache-2.0) makes problems of a hundred kinds, each with
a scorer, `score_answer`. What a scorer is given was written by a model, so only tasks are here whose scorer was read,
in the version of reasoning-gym that pyproject.toml names, and found to

- evaluate nothing: no `eval` (not of the gold answer either, which a handed-over table may hold), no parser of SymPy's;
- take time and memory in proportion to the answer's length: no number that is written shorter than it is (`1e999999`
  as an exact fraction), no search;
- give 1 to the task's own answer and to nothing that says something else, and raise for no text.

Tasks whose problems depend on a clock, on Python's order of hashes or on how many are asked for, or whose answers are
grids of several lines, are not here either.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ConfigDict, model_validator

from hacpo.settings.base import Section, knob

VERSION = "0.1.25"
"""Of reasoning-gym: the one whose scorers were read."""

SCORED_WITH: Mapping[str, tuple[str, ...]] = {
    "ab": (),
    "aiw": (),
    "base_conversion": (),
    "basic_arithmetic": (),
    "binary_alternation": (),
    "caesar_cipher": (),
    "chain_sum": (),
    "circuit_logic": (),
    "count_bits": (),
    "count_primes": (),
    "course_schedule": (),
    "decimal_chain_sum": (),
    "dice": (),
    "family_relationships": (),
    "gcd": (),
    "largest_island": (),
    "lcm": (),
    "leg_counting": (),
    "letter_counting": (),
    "needle_haystack": (),
    "number_filtering": (),
    "number_sequence": (),
    "path_star": (),
    "products": (),
    "rotten_oranges": (),
    "self_reference": (),
    "simple_equations": (),
    "simple_geometry": (),
    "string_manipulation": (),
    "syllogism": (),
    "word_sequence_reversal": (),
    "word_sorting": ("sorted_words",),
}
"""Task -> what of an entry's metadata its scorer reads, beside the answer."""

Option = bool | int | float | str | list[bool | int | float | str]


class GymTask(Section):
    """A task's share of a mixture; any other key is an option of the task's own (docs/data.md)."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Option]

    weight: float = knob(1.0, doc="Its problems are `weight` / the sum of all weights.", gt=0)

    @model_validator(mode="after")
    def _ours(self) -> GymTask:
        for key in ("seed", "size"):
            if key in self.options:
                raise ValueError(f"{key} is no option here: `seed` and `problems` of the set say it")
        return self

    @property
    def options(self) -> dict[str, Option]:
        """What the task's generator is told."""
        return dict(self.__pydantic_extra__ or {})


def refuse_other_tasks(names: Mapping[str, object]) -> None:
    """Raise a ValueError where a mixture has a task that may not be in one."""
    for name in names:
        if name not in SCORED_WITH:
            raise ValueError(
                f"mixture.{name}: no such task of reasoning_gym is allowed (docs/data.md says which, and why not all); "
                f"expected {', '.join(SCORED_WITH)}"
            )
