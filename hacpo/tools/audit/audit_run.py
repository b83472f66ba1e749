"""What the checks of an audit share: the run, the findings, and the account of what was looked at.

A check is a function that takes an `AuditRun` and a part of the run, reads its tables through `table_checks.read`,
calls `find` for each disagreement, `looked_at` for what it read and `skip` for what it could not check.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacpo.artifacts.layout import Layout
from hacpo.artifacts.model_folder import config_hash, read_mapping
from hacpo.artifacts.run_files import RunFiles
from hacpo.artifacts.weights import policy_hash
from hacpo.errors import ArtifactError, HacpoError
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.elsewhere import not_here
from hacpo.pipeline.retention.pruned import Pruned, read_record
from hacpo.settings.root import Settings
from hacpo.tokens.context_length import context_length
from hacpo.tokens.same_tokenizer import same_tokenizer
from hacpo.tokens.stopping import eos_token_ids
from hacpo.tools.audit.findings import Finding


@dataclass
class AuditRun:
    """One audit of one run.

    Attributes:
        pipeline: the run; its settings are those the audit goes by.
        findings: every disagreement so far, in the order of the checks.
        rows: table -> rows read.
        files: table -> files read.
        skipped: (what was not checked, why) -> how many times.
    """

    pipeline: Pipeline
    findings: list[Finding] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Agent -> its config.json (see `config`)."""
    policies: dict[tuple[int, str], str | None] = field(default_factory=dict)
    """Step and agent -> content hash of the checkpoint's weights (see `policy`)."""
    tokenizers: dict[frozenset[str], bool | None] = field(default_factory=dict)
    """Two agents -> whether they have the same tokenizer (see `same_tokenizer`)."""
    stage_settings: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)
    """What the files of each table must say that their stage read (see `table_checks.stage_settings`)."""

    @property
    def settings(self) -> Settings:
        """The settings that the audit goes by."""
        return self.pipeline.settings

    @property
    def layout(self) -> Layout:
        """Where the run's artifacts live."""
        return self.pipeline.layout

    @property
    def run_files(self) -> RunFiles:
        """The run's tables; what is not finite in them is a finding of the row it is in."""
        return RunFiles(self.pipeline.run, self.layout, finite=False)

    @property
    def agents(self) -> list[str]:
        """Names, in the order of params.yaml."""
        return list(self.settings.agents)

    def sources(self, learner: str) -> list[str]:
        """Whose rollouts a learner learns from."""
        return self.settings.learned_from(learner)

    def policy(self, step: int, agent: str) -> str | None:
        """Content hash of a checkpoint's weights; None if the checkpoint, or its weights, are not there."""
        if (step, agent) not in self.policies:
            self.policies[step, agent] = None
            with contextlib.suppress(HacpoError, OSError):
                self.policies[step, agent] = policy_hash(self.layout.checkpoint(step, agent))
        return self.policies[step, agent]

    def policy_config(self, step: int, agent: str) -> str | None:
        """Hash of what a checkpoint has libraries read beside its weights; None if it is not there."""
        with contextlib.suppress(OSError):
            return config_hash(self.layout.checkpoint(step, agent))
        return None

    @functools.cached_property
    def pruned(self) -> dict[str, dict[int, Pruned]]:
        """The record of the checkpoints that retention removed."""
        try:
            return read_record(self.layout)
        except ArtifactError:
            self.find("files", self.layout.pruned, expected="a record of pruned checkpoints", found="damaged")
            return {}

    @functools.cached_property
    def not_here(self) -> list[int]:
        """Steps whose checkpoints are somewhere else; see `elsewhere.not_here`."""
        with contextlib.suppress(ArtifactError):  # a finding of `pruned`
            return not_here(self.pipeline)
        return []

    def context_length(self, agent: str) -> int | None:
        """Most tokens in one sequence that the agent's config allows; None if it does not say."""
        return context_length(self.config(agent))

    def config(self, agent: str) -> dict[str, Any]:
        """The config.json of an agent's first checkpoint; empty if it cannot be read."""
        if agent not in self.configs:
            self.configs[agent] = {}
            with contextlib.suppress(OSError, HacpoError):
                self.configs[agent] = read_mapping(self.layout.checkpoint(0, agent) / "config.json")
        return self.configs[agent]

    def same_tokenizer(self, agent: str, other: str) -> bool | None:
        """Whether two agents have the same tokenizer; None if their first checkpoints do not say."""
        pair = frozenset((agent, other))
        if pair not in self.tokenizers:
            self.tokenizers[pair] = None
            with contextlib.suppress(OSError, HacpoError):
                folders = [self.layout.checkpoint(0, name) for name in (agent, other)]
                if all(folder.is_dir() for folder in folders):
                    self.tokenizers[pair] = same_tokenizer(*folders)
        return self.tokenizers[pair]

    def eos_token_ids(self, agent: str) -> list[int]:
        """Tokens that end the agent's responses, as its first checkpoint declares them; none if it does not."""
        with contextlib.suppress(OSError, HacpoError):
            return eos_token_ids(self.layout.checkpoint(0, agent))
        return []

    def find(self, check: str, path: Path, row: str = "", column: str = "", **facts: Any) -> None:
        """Note a disagreement; `path` below the project's root, `facts` are further fields of `Finding`."""
        file = path.relative_to(self.pipeline.root) if path.is_relative_to(self.pipeline.root) else path
        self.findings.append(Finding(check, file, row, column, **facts))

    def skip(self, what: str, why: str) -> None:
        """Note what could not be checked."""
        self.skipped[what, why] += 1

    def looked_at(self, table: str, rows: int, files: int = 1) -> None:
        """Note what was read."""
        self.rows[table] += rows
        self.files[table] += files
