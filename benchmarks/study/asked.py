"""What the study compares with what: its hypotheses (docs/protocol.md), and the tables of its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hacpo.evaluation.bootstrap import holm
from hacpo.tools.compare.comparing import Compared, Comparison, Difference, compare, corrected
from hacpo.tools.compare.grouping import Group, groups_of
from hacpo.tools.compare.reading import read

FAMILIES = ("tuning", "main", "gap", "pairs", "neighbours", "ablations")
BENCHMARK = "final"
RESULTS = Path("docs/results")


def begun(family: str) -> Path:
    """Results of a family that is not whole: nobody looks at them, and who goes on with it begins there."""
    return RESULTS / "begun" / f"{family}.parquet"


@dataclass(frozen=True, eq=False)
class Study:
    """What of the study is done.

    Attributes:
        groups: family -> its groups of runs; families that are not done are not in it.
    """

    groups: Mapping[str, Sequence[Group]]
    _compared: dict[Table, Compared | None] = field(default_factory=dict, init=False, repr=False)

    def compared(self, table: Table) -> Compared | None:
        """A table's comparison, made once; None where its family is not done, or has but one of its groups."""
        if table not in self._compared:
            self._compared[table] = _compared(self.groups.get(table.family, ()), table)
        return self._compared[table]


@dataclass(frozen=True)
class Hypothesis:
    """One of the primary family: that `group` is better than `against`."""

    name: str
    claim: str
    family: str
    group: str
    against: str
    axis: str = "rollouts"


HYPOTHESES = (
    Hypothesis(
        "H2", "HACPO beats GSPO with twice the rollouts, from equally many rollouts", "main", "hacpo", "gspo_x2"
    ),
    Hypothesis(
        "H3",
        "HACPO beats GSPO from equally many rollouts and updates (two passes)",
        "main",
        "hacpo",
        "gspo_two_passes",
    ),
    Hypothesis("H4", "HACPO beats sharing without its corrections", "main", "hacpo", "naive"),
    Hypothesis("H5", "with a true gap a baseline that punishes no right answer beats HACPO's", "gap", "own", "hacpo"),
    Hypothesis(
        "H1",
        "the paper's claim: HACPO beats GSPO with twice the rollouts after equally many steps",
        "main",
        "hacpo",
        "gspo_x2",
        "steps",
    ),
)


@dataclass(frozen=True)
class Table:
    """Some groups of a family against one of them, corrected together; `groups` in their order, `against` not among
    them."""

    title: str
    family: str
    against: str
    groups: tuple[str, ...]
    axis: str = "rollouts"


TABLES = (
    Table(
        "Equal rollouts: the paper's recipes",
        "main",
        "hacpo",
        ("gspo_x2", "gspo_two_passes", "gspo", "naive", "grpo"),
    ),
    Table(
        "Equal rollouts: neighbours, and other baselines",
        "neighbours",
        "hacpo",
        ("xgrpo", "sgt", "sapo", "naive_self", "learner", "shrunk", "own"),
    ),
    Table("Equal rollouts: a true gap", "gap", "hacpo", ("own", "gspo", "gspo_x2")),
    Table("Equal rollouts: other pairs, and three agents", "pairs", "hacpo", ("gspo_x2", "gspo", "naive")),
    Table("Table 2: without the capability baseline", "ablations", "hacpo", ("no_capability_baseline",)),
    Table("Table 3: without the capability ratio", "ablations", "hacpo", ("no_discrepancy",)),
    Table("Table 4: alpha, against 1", "ablations", "hacpo", ("alpha_0", "alpha_2", "alpha_3")),
    Table("Figure 4: without the cross clip, without its steps", "ablations", "hacpo", ("no_clip", "no_stepwise")),
    Table(
        "Whose length the cross ratio is normalised by, against the learner's tokens",
        "ablations",
        "hacpo",
        ("ratio_norm_own_tokens", "ratio_norm_bytes"),
    ),
    Table("Window of the capability, against 5 steps", "ablations", "hacpo", ("window_1", "window_20")),
    Table("Group size, against 8 responses", "ablations", "hacpo", ("group_size_4", "group_size_16")),
)

PAPERS = tuple(
    Table(f"Table 1: {family}", family, "gspo", ("grpo", "gspo_x2", "naive", "hacpo"), "steps")
    for family in ("pairs", "main", "gap")
)
"""The paper's Table 1: the end of training, after equally many steps."""


def read_study(root: Path) -> Study:
    """What of the study is done: the collected files below a root.

    Raises:
        ArtifactError: one of them is no file of results.
    """
    files = {family: root / RESULTS / f"{family}.parquet" for family in FAMILIES}
    return Study({family: groups_of(read([str(file)])) for family, file in files.items() if file.is_file()})


def _compared(groups: Sequence[Group], table: Table) -> Compared | None:
    named = {(group.base, group.name): group for group in groups}
    bases = {base: None for base, name in named if name == table.against}
    chosen = [named[base, name] for base in bases for name in (table.against, *table.groups) if (base, name) in named]
    if len(chosen) == len(bases):
        return None
    whole = compare(chosen, against=table.against, axis=table.axis, benchmarks=[BENCHMARK], seed=0, most=0)
    rest = iter(corrected([each for each in whole.comparisons if hypothesis_of(table, each) is None]))
    return replace(
        whole,
        comparisons=[_uncorrected(each) if hypothesis_of(table, each) else next(rest) for each in whole.comparisons],
    )


def _uncorrected(comparison: Comparison) -> Comparison:
    return replace(comparison, differences=[replace(each, corrected=None) for each in comparison.differences])


def hypothesis_of(table: Table, comparison: Comparison) -> Hypothesis | None:
    """The hypothesis that a row of a table is about, whichever way round: its verdict is that one's, and the table has
    none."""
    for one in HYPOTHESES:
        same = {one.group, one.against} == {comparison.group, comparison.against}
        if same and (one.family, one.axis) == (table.family, table.axis):
            return one
    return None


def verdicts(study: Study) -> list[tuple[Hypothesis, Comparison | None]]:
    """The primary family: each hypothesis's comparison, None where it is not done. Their p-values are corrected for all
    of them, those that are not done included."""
    found = []
    for one in HYPOTHESES:
        whole = study.compared(Table(one.name, one.family, one.against, (one.group,), one.axis))
        found.append(whole.comparisons[0] if whole else None)
    for measure in ("area", "at_budget", "last"):
        p_values = [None if one is None else difference(one, measure).change.p for one in found]
        of_all = holm([1.0 if p is None else p for p in p_values])
        for at, (one, p) in enumerate(zip([*found], of_all, strict=True)):
            if one is not None and p_values[at] is not None:
                found[at] = _with(one, replace(difference(one, measure), corrected=p))
    return list(zip(HYPOTHESES, found, strict=True))


def by_start(study: Study, hypothesis: Hypothesis, measure: str) -> dict[int, float]:
    """A hypothesis's difference on each seed of the warm starts alone, up to the budget of these runs."""
    groups = [
        each for each in study.groups.get(hypothesis.family, ()) if each.name in (hypothesis.group, hypothesis.against)
    ]
    starts = sorted({start for group in groups for _, start in group.runs})
    found = {}
    for start in starts:
        of = [
            replace(group, runs={unit: run for unit, run in group.runs.items() if unit[1] == start}) for group in groups
        ]
        if len(of) == 2 and set.intersection(*({*group.runs} for group in of)):
            whole = compare(
                of, against=hypothesis.against, axis=hypothesis.axis, benchmarks=[BENCHMARK], seed=0, most=0
            )
            found[start] = difference(whole.comparisons[0], measure).change.mean
    return found


def difference(comparison: Comparison, measure: str, agent: str = "") -> Difference:
    """One number of a comparison; of all agents together, or of one."""
    return next(each for each in comparison.differences if (each.measure, each.agent) == (measure, agent))


def _with(comparison: Comparison, new: Difference) -> Comparison:
    kept = [new if (each.measure, each.agent) == (new.measure, new.agent) else each for each in comparison.differences]
    return replace(comparison, differences=kept)


def everything(study: Study) -> Compared | None:
    """Hypotheses and tables as one comparison, for the page with figures; each is a base of its name."""
    named = [(f"{one.name}: {one.claim}", each) for one, each in verdicts(study) if each is not None]
    comparisons = [replace(comparison, base=f"{name} ({comparison.base})") for name, comparison in named]
    groups, curves = [], {}
    for table in TABLES:
        whole = study.compared(table)
        if whole is None:
            continue
        groups += [replace(group, base=f"{table.title} ({group.base})") for group in whole.groups]
        comparisons += [
            replace(each, base=f"{table.title} ({each.base})")
            for each in whole.comparisons
            if hypothesis_of(table, each) is None  # it stands above
        ]
        curves |= {(f"{table.title} ({base})", *rest): points for (base, *rest), points in whole.curves.items()}
    return Compared(groups, comparisons, curves) if comparisons else None
