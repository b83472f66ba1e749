"""The study's pairs below pipelines/study/: what they share, and that problems and tokens are enough."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")

from conftest import ROOT
from hacpo.data import problems
from hacpo.engines.models.tiny import build_model, build_tokenizer
from hacpo.engines.training.warm_start import Corpus
from hacpo.settings import params as settings_of
from hacpo.settings.agents import TinySettings
from hacpo.settings.root import Settings

_FOLDER = ROOT / "pipelines" / "study" / "pairs"
PAIRS = {path.stem: path for path in _FOLDER.glob("*.yaml") if path.name != "sweep.yaml"}


def tinies(settings: Settings) -> dict[str, TinySettings]:
    return {name: agent.tiny for name, agent in settings.agents.items() if agent.tiny is not None}


@pytest.fixture(scope="module")
def pairs() -> dict[str, Settings]:
    return {name: settings_of.load(path) for name, path in PAIRS.items()}


def test_the_pairs_are_there_and_differ_in_their_agents_alone(pairs: dict[str, Settings]) -> None:
    assert set(pairs) == {"state", "size", "model", "gap", "trio"}
    trees = [settings_of.dump(settings) for settings in pairs.values()]
    agents: dict[str, object] = {}
    for tree in trees:
        for name, agent in tree.pop("agents").items():
            assert agents.setdefault(name, agent) == agent  # of one name: the same warm start
        tree.pop("agent_names")
    assert all(tree == trees[0] for tree in trees)


def test_agents_learn_beforehand_what_they_are_trained_on(pairs: dict[str, Settings]) -> None:
    for settings in pairs.values():
        mixtures = [source.mixture for source in settings.data.sets.values()]
        mixtures += [tiny.warmup.mixture for tiny in tinies(settings).values()]
        assert all(mixture == mixtures[0] for mixture in mixtures)
        assert {source.split for source in settings.data.sets.values()} == {"train", "heldout", "final"}
        # `final` is looked at once, after the runs.
        assert "gym/final" not in {benchmark.data for benchmark in settings.evaluation.benchmarks.values()}


def test_each_pair_is_what_its_name_says(pairs: dict[str, Settings]) -> None:
    def shapes(pair: str) -> list[tuple[str, str, int, int]]:
        made = tinies(pairs[pair]).values()
        return [(tiny.architecture, tiny.vocabulary, tiny.layers, tiny.hidden) for tiny in made]

    first, second = shapes("state")
    assert first == second
    first, second = shapes("size")
    assert first[:2] == second[:2]
    assert first[2:] != second[2:]
    assert all(one != other for one, other in zip(*shapes("model"), strict=True) if isinstance(one, str))
    assert len({shape[:2] for shape in shapes("trio")}) == 3
    for settings in pairs.values():
        for tiny in tinies(settings).values():
            parameters = build_model(tiny, build_tokenizer(tiny), seed=1).num_parameters()
            assert 60_000 < parameters < 700_000


def test_there_are_problems_enough_and_rows_long_enough(pairs: dict[str, Settings]) -> None:
    settings = pairs["trio"]
    texts: set[str] = set()
    for name, source in settings.data.sets.items():
        rows = problems.load(name, source, Path())
        assert len(rows) == source.problems
        assert not texts & {row.problem for row in rows}
        texts |= {row.problem for row in rows}
    for name, tiny in tinies(settings).items():
        Corpus(name, tiny, build_tokenizer(tiny), seed=1)  # refuses a context that is too short
