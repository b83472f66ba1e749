"""Responses side by side: as many agents beside each other as the terminal has room for, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hacpo.errors import harmless as in_one_line
from hacpo.phrases import number, signed
from hacpo.tools.inspect.plain import excerpt, harmless, interval, packed
from hacpo.tools.inspect.side_by_side import ProblemLine, SideBySide
from hacpo.tools.inspect.step_reader import Missing
from hacpo.tools.inspect.step_view import Response, Terms, Use, Worth

_NARROWEST = 36
"""Columns an agent needs; with less, agents stand below each other."""

_VERDICT_STYLES = {"correct": "bold green", "wrong": "bold red"}


def print_side_by_side(console: Console, shown: SideBySide) -> None:
    """Problem and gold answer, what each learner measured the groups against, then every response."""
    title = f"{shown.run}, step {shown.step}, problem {shown.problem_id}"
    if not console.is_terminal:
        _print_lines(console, [harmless(title), *_question(shown), Text()])
        _print_lines(console, [line for row in _group_rows(shown) for line in packed(row, None)])
        for response in shown.responses:
            first, *rest = _lines(shown, response, None)
            head = harmless(f"{response.agent} sample {response.sample}: ").append_text(first)
            _print_lines(console, [Text(), head, *rest])
        print_missing(console, shown.missing)
        return
    console.print(Panel(Group(*_question(shown)), title=harmless(title), title_align="left", border_style="cyan"))
    groups = _group_rows(shown)
    if groups:
        table = Table(box=None, padding=(0, 2, 0, 1))
        for name in ("learner", "from", "baseline", "sigma", "omega", "group"):
            table.add_column(name, style="bold" if name == "learner" else "", header_style="dim")
        for row in groups:
            table.add_row(*[Text(cell.plain.partition(" ")[2], style=cell.style) for cell in row])
        console.print(table)
    beside = max(1, min(len(shown.agents), (console.width - 1) // (_NARROWEST + 3)))
    width = (console.width - 1) // beside - 3
    for start in range(0, len(shown.agents), beside):
        console.print(_columns(shown, shown.agents[start : start + beside], width))
    print_missing(console, shown.missing)


def print_problems(
    console: Console,
    title: str,
    lines: Sequence[ProblemLine],
    agents: Sequence[str],
    learners: Sequence[str],
) -> None:
    """The step's problems, one a line; below each agent's name its correct responses, with a reward function their mean
    reward."""
    earned = [value for line in lines for value in line.mean_reward.values()]
    table = Table(
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        pad_edge=False,
        title=harmless(title, "bold"),
        title_justify="left",
        padding=(0, 1),
    )
    table.add_column("#", justify="right", style="dim", no_wrap=True)
    table.add_column("problem_id", no_wrap=True)
    for agent in agents:
        table.add_column(harmless(agent), justify="right", no_wrap=True)
    for name in ("group", "gold"):
        table.add_column(name, no_wrap=True)
    table.add_column("problem", overflow="fold")
    for line in lines:
        table.add_row(
            str(line.position),
            harmless(line.problem_id),
            *[_earned(line, agent, earned) for agent in agents],
            _group(line, learners),
            harmless(excerpt(line.answer, 24)),
            harmless(excerpt(line.problem, 120)),
        )
    console.print(table)


def print_missing(console: Console, missing: Sequence[Missing]) -> None:
    """Which tables are not there yet, one line each."""
    for table in missing:
        of = f" of {table.of}" if table.of else ""
        _print_lines(console, [Text(f"not there yet: {table.table}{of} (`{table.command}`)", style="yellow")])


def _print_lines(console: Console, lines: Sequence[Text]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)


def _question(shown: SideBySide) -> list[Text]:
    return [harmless(shown.problem), Text("gold answer: ", style="dim").append_text(harmless(shown.answer, "bold"))]


def _group_rows(shown: SideBySide) -> list[list[Text]]:
    """What each learner measured each source's responses against; the first word of a cell names it."""
    rows = []
    for learner in shown.learners:
        for source in shown.agents:
            uses = [use for response in shown.of(source) for use in response.uses if use.learner == learner]
            worths = [use.worth for use in uses if use.worth]
            if worths:
                rows.append(
                    [
                        Text("learner ").append_text(harmless(learner)),
                        Text("from ").append_text(harmless("itself" if source == learner else source)),
                        Text(f"baseline {_same([worth.baseline for worth in worths])}"),
                        Text(f"sigma {_same([worth.sigma for worth in worths])}"),
                        Text(f"omega {_same([worth.omega for worth in worths])}"),
                        _state(worths),
                    ]
                )
    return rows


def _same(values: Sequence[float]) -> str:
    return number(values[0]) if min(values) == max(values) else f"{number(min(values))} to {number(max(values))}"


def _state(worths: Sequence[Worth]) -> Text:
    uniform = all(worth.uniform for worth in worths)
    words = "uniform: no signal" if uniform else "live"
    if not uniform and any(worth.guarded for worth in worths):
        words += ", guarded"
    return Text(f"group {words}", style="dim" if uniform else "yellow" if "guarded" in words else "green")


def _columns(shown: SideBySide, agents: Sequence[str], width: int) -> RenderableType:
    groups = [shown.of(agent) for agent in agents]
    table = Table(box=box.ROUNDED, show_lines=True, border_style="dim")
    for agent, responses in zip(agents, groups, strict=True):
        table.add_column(Text("\n").join(packed(_heading(shown, agent, responses), width)), width=width)
    for number_of_row in range(max((len(responses) for responses in groups), default=0)):
        table.add_row(
            *[
                Group(*_lines(shown, responses[number_of_row], width)) if number_of_row < len(responses) else ""
                for responses in groups
            ]
        )
    return table


def _heading(shown: SideBySide, agent: str, responses: Sequence[Response]) -> list[Text]:
    rewards = [response.reward for response in responses if response.reward is not None]
    pieces = [harmless(agent, "bold cyan")]
    if rewards:
        earned = f"{sum(reward == 1 for reward in rewards)} of {len(rewards)} correct"
        if shown.measure != "accuracy":
            earned = f"{shown.measure} {sum(rewards) / len(rewards):.3f}"
        pieces.append(Text(earned, style="not bold"))
    if agent in shown.capability:
        pieces.append(Text(f"capability {shown.capability[agent]:.3f}", style="not bold dim"))
    return pieces


def _judged(shown: SideBySide, response: Response) -> list[Text]:
    """Verdict and reward. A function's `correct` and `wrong` say no more than whether a reward is above 0: there the
    reward has the colour, by its place among those of the problem."""
    verdict = harmless(
        in_one_line(response.verdict or "not verified"), _VERDICT_STYLES.get(response.verdict or "", "yellow")
    )
    if response.reward is None:
        return [verdict]
    if shown.measure == "accuracy":
        return [verdict, Text(f"reward {response.reward:g}")]
    rewards = [other.reward for other in shown.responses if other.reward is not None]
    reward = Text(f"reward {response.reward:g}", style=f"bold {_shade(response.reward, rewards)}")
    return [reward] if response.verdict in _VERDICT_STYLES else [reward, verdict]


def _lines(shown: SideBySide, response: Response, width: int | None) -> list[Text]:
    """One response: what was made of it, its text, then a line or two for each learner."""
    head = [Text(f"#{response.sample}", style="dim")] if width else []
    head += _judged(shown, response)
    if response.extracted is not None:
        head.append(Text("extracted ").append_text(harmless(response.extracted, "bold")))
    head.append(harmless(in_one_line(response.finish_reason), "" if response.finish_reason == "stop" else "yellow"))
    head.append(Text(f"{response.tokens} tokens", style="dim"))
    text = harmless(response.text) if response.text else Text("(empty)", style="dim")
    lines = [*packed(head, width, indent=0), Text("  ").append_text(text) if width is None else text]
    if width is None and "\n" in text.plain:
        lines[-1] = Text("\n").join(Text("  ").append_text(line) for line in text.split("\n"))
    used = [line for use in response.uses for line in _use_lines(use, width)]
    return lines + [Text("  ").append_text(line) if width is None else line for line in used]


def _use_lines(use: Use, width: int | None) -> list[Text]:
    name = harmless(f"→ {use.learner}", "cyan")
    if use.status not in (None, "kept"):
        return packed([name, harmless(in_one_line(f"not used: {use.status}"), "yellow")], width)
    pieces = [name]
    if use.roundtrip is False:
        pieces.append(Text("text changed by retokenising", style="yellow"))
    if use.worth:
        style = "dim" if use.worth.effective_advantage == 0 else "green" if use.worth.effective_advantage > 0 else "red"
        pieces.append(Text(f"advantage {signed(use.worth.advantage)}"))
        pieces.append(Text(f"effective {signed(use.worth.effective_advantage)}", style=style))
    lines = packed(pieces, width)
    for terms in use.updates:
        following = packed(_terms(terms), None if width is None else width - 2, indent=0)
        lines += following if width is None else [Text("  ").append_text(line) for line in following]
    return packed(lines, None) if width is None else lines


def _terms(terms: Terms) -> list[Text]:
    pieces = [
        Text(f"update {terms.update}", style="dim"),
        Text(f"ratio {number(terms.ratio, 4)} {interval(terms.lower, terms.upper)}"),
    ]
    if terms.clipped:
        pieces.append(Text("clipped", style="magenta"))
    return [*pieces, Text(f"weight {number(terms.is_weight)}"), Text(f"objective {signed(terms.objective)}")]


def _earned(line: ProblemLine, agent: str, all_of_step: Sequence[float]) -> Text:
    if agent not in line.mean_reward:
        return Text("-", style="dim")
    if agent not in line.correct:
        return Text(f"{line.mean_reward[agent]:.3f}", style=_shade(line.mean_reward[agent], all_of_step))
    right, all_of = line.correct[agent]
    return Text(f"{right}/{all_of}", style="green" if right == all_of else "red" if right == 0 else "")


def _shade(value: float, others: Sequence[float]) -> str:
    """The colour of a reward by its place between the lowest and the highest of `others`: red, yellow, green thirds."""
    low, high = min(others), max(others)
    return ("red", "yellow", "green")[min(int(3 * (value - low) / (high - low)), 2)] if high > low else ""


def _group(line: ProblemLine, learners: Sequence[str]) -> Text:
    """`live`, `uniform`, or who it is live for; with what to look out for."""
    if not line.live:
        return Text("-", style="dim")
    alive = [learner for learner in learners if line.live.get(learner)]
    words = "uniform" if not alive else "live" if len(alive) == len(line.live) else f"live for {' '.join(alive)}"
    shown = Text(words, style="green" if alive else "dim")
    if line.guarded and alive:
        shown.append(" guarded", style="yellow")
    if line.punished:
        shown.append(f" {line.punished} punished", style="red")
    return shown
