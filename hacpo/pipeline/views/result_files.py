"""Files of results: of one run, beside a sweep, and collected, as they are handed to others.

A stranger's file may hold anything: it is read in bounds, and believed where it holds what `run_results` would make.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from hacpo.artifacts import storage
from hacpo.artifacts.text_files import DEEPEST, check_regular, is_deeper, parse_json
from hacpo.artifacts.trial import try_reading
from hacpo.errors import ArtifactError, first_line
from hacpo.pipeline.views.run_results import SCHEMA, SPENT
from hacpo.settings import params
from hacpo.settings.root import Settings

MOST_ROWS = 200_000
"""Of one file: 400 runs with 4 agents, 5 benchmarks and 20 evaluations have 160,000."""

MOST_ANSWERED = 20_000_000
"""Problems of all rows together."""

MOST_PROBLEMS = 50_000
"""Of one row."""

MOST_RUNS = 10_000
MOST_BENCHMARKS = 1000
MOST_KEYS = 5000
"""Of the settings of all runs."""

MOST_LETTERS = 500
"""Of a name."""

MOST_SETTINGS = 1 << 20
"""Letters of one run's."""

MOST_SPENT = 2**53
"""Of anything: what is above is no whole number in floating point."""

_MADE = b"hacpo.results"
_NAMES = ("run", "base", "variant", "agent", "benchmark")
_OF_RUN = ("base", "variant", "seed", "start_seed", "settings")
_LISTS = ("problem_ids", "samples", "correct")
_KEY = ("run", "agent", "benchmark", "step")
_SHOWN = 60
"""Letters of a text that an error names."""

_GIVEN = "name a pipeline folder, a folder with a sweep.yaml, or a file that `hacpo sweep --collect` has written"
_PARTS = "collect fewer runs into it (`hacpo sweep --collect FILE --only PATTERN`)"


# --- writing ---------------------------------------------------------------------------------------------------------


def write_results(path: Path, results: pa.Table, settings: Settings | None = None) -> None:
    """Write results whole.

    Args:
        settings: what they were made with, where they are of one run.

    Raises:
        StorageError: the disk refuses.
    """
    made_with = "" if settings is None else json.dumps(params.dump(settings), sort_keys=True)
    with storage.atomic(path) as scratch:
        pq.write_table(
            results.replace_schema_metadata({_MADE: b"1", b"hacpo.settings": made_with.encode()}),
            scratch,
            compression="zstd",
        )


def holds_results(path: Path) -> bool:
    """Whether a regular file is one that `write_results` has written."""
    try:
        return _MADE in (pq.read_schema(path).metadata or {})
    except (OSError, pa.ArrowException):
        return False


def settings_of(path: Path) -> dict[str, Any] | None:
    """The settings that a file of one run's results was made with; None where there is none, or it is no such file."""
    try:
        tree = parse_json((pq.read_schema(path).metadata or {})[b"hacpo.settings"])
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return None
    return tree if isinstance(tree, dict) else None


# --- reading ---------------------------------------------------------------------------------------------------------


def read_given_results(path: Path) -> pa.Table:
    """`read_results` of a stranger's file, which is read first in a process whose memory and time are bounded.

    Raises:
        ArtifactError: it cannot be read, holds something else, or too much.
    """
    too_large = ArtifactError("takes more memory than is spent on a file of results", where=path, remedy=_PARTS)
    try_reading(path, read_results, ArtifactError, too_large, parts=_PARTS)
    return read_results(path)


def read_results(path: Path, remedy: str = _GIVEN) -> pa.Table:
    """The results in a file, as `run_results.results_of` makes them: columns and their types, ranges, every row once,
    and of every run one name, seed and settings.

    Args:
        remedy: what to do where it is no such file.

    Raises:
        ArtifactError: it cannot be read, holds something else, or too much.
    """
    given = _Given(path, remedy)
    try:
        check_regular(path)
        _check_columns(given, pq.read_schema(path))
        with pq.ParquetFile(path, read_dictionary=[*_NAMES, "settings"], page_checksum_verification=True) as file:
            _check_size(given, file.metadata)
            table = file.read(columns=SCHEMA.names, use_threads=False)
        table = table.select(SCHEMA.names).cast(SCHEMA).unify_dictionaries()  # no nulls, as SCHEMA has it
        table.validate(full=True)  # texts are not looked at where they are read
    except MemoryError:  # Arrow's is one of its own errors, too
        raise
    except (OSError, pa.ArrowException, ValueError) as error:
        raise given.odd(f"cannot be read: {first_line(error)}") from None
    if not len(table):
        raise given.odd("holds no results", expected="a row for each evaluation", found="no row")
    _check_texts(given, table)
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    _check_rows(given, frame)
    _check_runs(given, frame)
    return table


@dataclass(frozen=True)
class _Given:
    """A file, and what to do where it is none of results."""

    path: Path
    remedy: str

    def odd(self, what: str, expected: object = None, found: object = None) -> ArtifactError:
        """The error that says what is wrong with it."""
        return ArtifactError(what, where=self.path, expected=expected, found=found, remedy=self.remedy)

    def check_number(self, what: str, found: int, most: int) -> None:
        """Refuse more of something than is compared."""
        if found > most:
            given = _Given(self.path, _PARTS)
            raise given.odd(f"holds too many {what}", expected=f"at most {most:,}", found=f"{found:,}")


def _check_columns(given: _Given, schema: pa.Schema) -> None:
    for field in SCHEMA:
        times = schema.names.count(field.name)
        if times != 1:
            raise given.odd("holds no results of runs", f"one column {field.name!r}", times or "none")
        expected, found = _kind(field.type), _kind(schema.field(field.name).type)
        if expected != found:
            raise given.odd(f"column {field.name!r} has the wrong type", expected, str(found)[:80])


def _kind(kind: pa.DataType) -> pa.DataType:
    """A type, however its texts and lists are laid out."""
    if pa.types.is_dictionary(kind):
        return _kind(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_kind(kind.value_type))
    return pa.string() if pa.types.is_large_string(kind) else kind


def _check_size(given: _Given, metadata: pq.FileMetaData) -> None:
    """Refuse what the file itself says is too much."""
    given.check_number("rows", metadata.num_rows, MOST_ROWS)
    given.check_number("groups of rows", metadata.num_row_groups, MOST_ROWS)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    for at in range(metadata.num_columns):
        if metadata.schema.column(at).path.partition(".")[0] in _LISTS:
            given.check_number("problems", sum(group.column(at).num_values for group in groups), MOST_ANSWERED)


def _check_texts(given: _Given, table: pa.Table) -> None:
    """Names that can be shown on one line, settings that can be compared; each of them is looked at once."""
    keys: set[str] = set()
    for name in (*_NAMES, "settings"):
        for text in table[name].chunk(0).dictionary.to_pylist():
            problem = _odd_settings(text, keys) if name == "settings" else _odd_name(text, empty=name == "base")
            if problem:
                found = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
                raise given.odd(f"column {name!r} holds {problem}", found=found)
            given.check_number("settings", len(keys), MOST_KEYS)


def _odd_name(text: str, *, empty: bool) -> str:
    """What it is instead of a name; nothing if it is one."""
    if len(text) > MOST_LETTERS:
        return f"a name of more than {MOST_LETTERS} letters"
    return "" if text.isprintable() and (text or empty) else "a name that cannot be shown"


def _odd_settings(text: str, keys: set[str]) -> str:
    """What it is instead of a run's settings; nothing if it is a tree that can be shown and compared, whose dotted keys
    are added to `keys`."""
    if len(text) > MOST_SETTINGS:
        return f"settings of more than {MOST_SETTINGS:,} letters"
    try:
        tree = parse_json(text, deepest=None)
    except ValueError:
        return "no JSON"
    if not isinstance(tree, dict):
        return "no mapping of settings"
    if is_deeper(tree, DEEPEST):
        return f"settings nested more than {DEEPEST} levels deep"
    own = params.leaves(tree)
    keys.update(own)
    return "" if all(key.isprintable() for key in own) else "a key that cannot be shown"


def _check_rows(given: _Given, frame: pl.DataFrame) -> None:
    """The first row with something that no run has."""
    given.check_number("runs", frame["run"].n_unique(), MOST_RUNS)
    given.check_number("benchmarks", frame["benchmark"].n_unique(), MOST_BENCHMARKS)
    ids, samples, correct = (pl.col(name) for name in _LISTS)
    number = ids.list.len()
    rules = [
        *((name, f"0 to {MOST_SPENT:,}", ~pl.col(name).is_between(0, MOST_SPENT)) for name in SPENT),
        ("step", "0 or more", pl.col("step") < 0),
        ("accuracy", "a number", ~pl.col("accuracy").is_finite()),
        ("problem_ids", f"1 to {MOST_PROBLEMS:,} problems", ~number.is_between(1, MOST_PROBLEMS)),
        ("problem_ids", "every problem once", ids.list.n_unique() < number),
        *((name, "a value for each problem", pl.col(name).list.drop_nulls().list.len() != number) for name in _LISTS),
        ("samples", "1 response or more to each problem", samples.list.min() < 1),
        ("correct", "0 or more of each problem", correct.list.min() < 0),
        ("correct", "no more of a problem than its samples", (samples - correct).list.min() < 0),
    ]
    for name, expected, wrong in rules:
        rows = frame.select(pl.arg_where(wrong)).to_series()
        if len(rows):
            value = frame[name][int(rows[0])]
            shown = f"{len(value)} values" if name in _LISTS else value
            raise given.odd(f"column {name!r} is wrong in row {rows[0]}", expected, shown)


def _check_runs(given: _Given, frame: pl.DataFrame) -> None:
    """Of every run one name, seed and settings, every row once, and costs that only grow."""
    told = frame.group_by("run", maintain_order=True).agg(pl.col(name).n_unique() for name in _OF_RUN)
    for name in _OF_RUN:
        several = told.filter(pl.col(name) > 1)
        if several.height:
            raise given.odd(f"run {several['run'][0]} has more than one {name!r}")
    rows = frame.select(*_KEY, *SPENT).sort(_KEY)
    same = pl.all_horizontal(pl.col(name) == pl.col(name).shift() for name in _KEY[:-1])
    steps = pl.col("step") == pl.col("step").shift()
    rules = [
        ("the same row is there twice", same & steps),
        *(
            (f"column {name!r} falls from an evaluation to the next", same & (pl.col(name).diff() < 0))
            for name in SPENT
        ),
    ]
    for what, wrong in rules:
        for run, agent, benchmark, step in rows.filter(wrong).select(_KEY).head(1).iter_rows():
            raise given.odd(what, found=f"run {run}, agent {agent}, {benchmark}, step {step}")
