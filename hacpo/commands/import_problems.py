"""import: problems from the Hugging Face hub, a local file or reasoning-gym, as data/<set>/<split>.parquet."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hacpo.errors import harmless
from hacpo.pipeline.execution.command_line import main_of

if TYPE_CHECKING:
    from hacpo.artifacts.problem_rows import Problem
    from hacpo.data.importing.known import KnownSet

GYM = "reasoning_gym"
"""The set whose problems are made."""

_SHOWN = 20
"""Lines of one finding, and values in a line; the rest is counted."""

_WIDEST = 400
"""Characters of such a line: what ids and reasons hold is others' text."""

_VALUE_WIDEST = 60
"""Characters of one value in it."""


def import_problems(
    name: Annotated[
        str,
        typer.Argument(
            help="math, gsm8k, math500, aime2025, amc2023, minerva or olympiadbench; reasoning_gym, with --mixture; "
            "any name of yours with --from."
        ),
    ],
    file: Annotated[
        Path | None, typer.Option("--from", help="A local Parquet, JSONL, JSON, CSV or TSV file instead of the hub.")
    ] = None,
    mapping: Annotated[
        list[str] | None,
        typer.Option("--map", help="Which column is what: problem=question,answer=final (default: guessed by name)."),
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Only this split; with --from, what the file is (default: train).")
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option("--revision", help="Another branch, tag or commit of the hub's dataset than the pinned."),
    ] = None,
    mixture: Annotated[
        str | None,
        typer.Option("--mixture", help="Of reasoning_gym: tasks as in data.sets, '{chain_sum: {weight: 2}, gcd: {}}'."),
    ] = None,
    problems_each: Annotated[
        int, typer.Option("--problems", help="Of reasoning_gym: how many problems of each split.", min=1)
    ] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Of reasoning_gym: which problems are drawn.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write to (default: data/NAME).")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse answers that cannot be verified.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there and differ.")] = False,
) -> None:
    """Import a problem set: check it, write it, and say how to use it."""
    from hacpo.data.importing.columns import parse_map
    from hacpo.data.importing.known import KNOWN
    from hacpo.errors import SettingsError
    from hacpo.settings.base import NAME

    for word in (name, *([split] if split else [])):
        if not NAME.fullmatch(word):
            raise SettingsError(f"{word!r} cannot be a name", expected="letters, digits, '-' and '_'")
    folder = out or Path("data") / name
    by_gym = file is None and name == GYM
    if mixture is not None and not by_gym:
        raise SettingsError("--mixture belongs to `hacpo import reasoning_gym`")
    if by_gym:
        if mapping or revision is not None:
            raise SettingsError("--map and --revision do not belong to `hacpo import reasoning_gym`")
        problems = _from_gym(mixture, split, problems_each, seed)
    elif file is not None:
        if revision is not None:
            raise SettingsError("--revision belongs to the hub, not to --from")
        chosen = split or "train"
        problems = {chosen: _from_file(name, chosen, file, parse_map(mapping or []))}
    else:
        if name not in KNOWN:
            raise SettingsError(
                f"no set {name!r} is known",
                expected=f"{', '.join(KNOWN)} or {GYM}",
                remedy="import a file of yours with --from FILE",
            )
        if mapping:
            raise SettingsError("--map belongs to --from: the columns of this set are known")
        problems = _from_hub(name, KNOWN[name], split, revision)
    targets = _targets(folder, problems)
    beside = _problem_files(folder.parent, targets.values())
    for chosen, rows in problems.items():
        together = {
            f"{name}/{other}": [(row.problem_id, row.problem) for row in those]
            for other, those in problems.items()
            if other != chosen
        }
        _check(f"{name}/{chosen}", rows, together | beside, strict=strict, by_gym=by_gym)
    for chosen, rows in problems.items():
        _write(f"{name}/{chosen}", rows, targets[chosen], force=force)
    _print_usage(name, folder, list(problems), by_gym=by_gym)


# --- reading ---------------------------------------------------------------------------------------------------------


def _from_file(name: str, split: str, file: Path, given: dict[str, str]) -> list[Problem]:
    from hacpo.data.importing.columns import choose_columns, convert
    from hacpo.data.importing.formats import read_rows

    rows = read_rows(file)
    columns = choose_columns(rows, given, file)
    print(f"{name}/{split}: {len(rows):,} rows of {harmless(str(file))}")
    _line("columns", ", ".join(f"{target} from {column}" for target, column in columns.items()))
    if "answer" not in columns:
        _line("", r"the answer is what the solution ends with: its last \boxed{}, or what follows ####")
    sources = [f"{file.name}#{number}" for number in range(len(rows))]
    return convert(rows, columns, name=f"{name}/{split}", sources=sources)


def _from_gym(mixture: str | None, split: str | None, count: int, seed: int) -> dict[str, list[Problem]]:
    from pydantic import ValidationError

    from hacpo.artifacts.text_files import YamlError, parse_yaml
    from hacpo.data.problems import load
    from hacpo.errors import SettingsError
    from hacpo.settings.params import complaint
    from hacpo.settings.root import SPLITS, DataSet

    example = "for example --mixture '{chain_sum: {weight: 2, max_terms: 3}, gcd: {}}'"
    if mixture is None:
        raise SettingsError("reasoning_gym needs --mixture: which tasks, in which shares", remedy=example)
    try:
        tasks = parse_yaml(mixture)
    except YamlError as error:
        raise SettingsError(f"--mixture is not valid YAML: {error}", remedy=example) from None
    given = tasks if isinstance(tasks, dict) else {}
    given = {task: {} if options is None else options for task, options in given.items()}
    problems = {}
    for chosen in [split] if split else SPLITS:
        fields = {"task": GYM, "mixture": given, "split": chosen, "problems": count, "seed": seed}
        try:
            source = DataSet.model_validate(fields)
        except ValidationError as error:
            raise complaint(error, f"{GYM}/{chosen}") from None
        problems[chosen] = load(f"{GYM}/{chosen}", source, Path())
    return problems


def _from_hub(name: str, known: KnownSet, split: str | None, revision: str | None) -> dict[str, list[Problem]]:
    from hacpo.data.importing.columns import choose_columns, convert
    from hacpo.data.importing.formats import read_rows
    from hacpo.errors import SettingsError
    from hacpo.hub import download, find_dataset

    if split is not None and split not in known.files:
        raise SettingsError(f"{name} has no split {split!r}", expected=" or ".join(known.files))
    dataset = find_dataset(known.repository, revision or known.revision)
    print(f"{name}: {dataset.repository} on the hub, commit {dataset.commit}")
    _line("licence", f"the dataset card states {dataset.licence or 'none'}; {known.terms}")
    problems = {}
    for chosen in [split] if split else known.files:
        rows, sources = [], []
        for part in known.files[chosen]:
            piece = read_rows(download(dataset, part))
            rows += piece
            sources += [f"{dataset.uri(part)}#{number}" for number in range(len(piece))]
        given = {target: known.columns.get(target, "") for target in ("problem_id", "source", *_TARGETS)}
        problems[chosen] = convert(
            rows,
            choose_columns(rows, given, dataset.uri(known.files[chosen][0])),
            name=f"{name}/{chosen}",
            sources=sources,
            name_row=known.name_row,
            answers=known.answers,
        )
        if len(rows) != known.problems[chosen]:
            _line("warning", f"{name}/{chosen} has {len(rows):,} problems, expected {known.problems[chosen]:,}")
    return problems


_TARGETS = ("problem", "answer", "solution", "subject", "level")


# --- checking --------------------------------------------------------------------------------------------------------


def _check(
    name: str, problems: list[Problem], others: Mapping[str, Sequence[tuple[str, str]]], *, strict: bool, by_gym: bool
) -> None:
    from hacpo.data.importing import problem_checks as checks
    from hacpo.data.importing.cells import normalised
    from hacpo.errors import DataError
    from hacpo.pipeline.execution.session import ConsoleProgress
    from hacpo.settings.verification import VerificationSettings

    print(f"{name}: {len(problems):,} problems")
    checks.refuse_unusable(problems, name)
    _line("ids", "all different")
    # Made problems differ in a sign: 3 + 4 and 3 - 4.
    spelled = str if by_gym else normalised
    same = checks.same_texts(problems, spelled)
    _line("texts", f"{len(same):,} occur more than once" if same else "all different")
    _listed([_joined(group) for group in same])
    progress = ConsoleProgress()
    settings = VerificationSettings(workers=2, reward=GYM if by_gym else "math")
    with progress.showing(f"answers of {name}"):
        doubts = checks.doubtful_answers(problems, settings, lambda done, total: progress.report("", done, total, {}))
    _line("answers", f"{len(doubts):,} cannot be verified" if doubts else "each can be verified")
    _listed([f"{doubt.problem_id} {doubt.answer[:60]!r}: {doubt.reason}" for doubt in doubts])
    if doubts and strict:
        raise DataError(
            f"{len(doubts)} answers cannot be verified",
            where=name,
            found=f"first: {doubts[0].problem_id}",
            remedy="mend or remove them, or leave --strict out to keep them",
        )
    overlaps = checks.overlaps(problems, others, spelled)
    _line("overlap", f"{len(overlaps)} of {len(others)} other sets share problems" if overlaps else _no_overlap(others))
    _listed(
        [f"{len(overlap.pairs):,} with {overlap.other}, first {' = '.join(overlap.pairs[0])}" for overlap in overlaps]
    )
    for column in ("subject", "level"):
        counted = checks.counts(getattr(row, column) for row in problems)
        if set(counted) != {"none"}:
            _line(
                column,
                ", ".join(f"{_cut(value, _VALUE_WIDEST)} {count:,}" for value, count in list(counted.items())[:_SHOWN]),
            )


def _no_overlap(others: Collection[str]) -> str:
    return f"none with the {len(others)} other sets" if others else "no other set beside it to compare with"


def _problem_files(data: Path, written: Collection[Path]) -> dict[str, list[tuple[str, str]]]:
    """The texts of all problem files `data/*/*.parquet` but those that are about to be written."""
    from hacpo.data.importing.problem_checks import texts_of

    files = sorted(file for file in data.glob("*/*.parquet") if file not in written)
    return {str(file): texts for file in files if (texts := texts_of(file)) is not None}


def _line(label: str, text: str) -> None:
    print(f"  {label:<9} {harmless(text)}")


def _joined(same: Sequence[str]) -> str:
    """Names of the same thing, as many as are shown."""
    rest = f" and {len(same) - _SHOWN:,} more" if len(same) > _SHOWN else ""
    most = _WIDEST - len(rest)
    return _cut(" = ".join(same[:_SHOWN]), most) + rest


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _listed(lines: Sequence[str]) -> None:
    for line in lines[:_SHOWN]:
        print(f"            {harmless(_cut(line, _WIDEST))}")
    if len(lines) > _SHOWN:
        print(f"            and {len(lines) - _SHOWN:,} more")


# --- writing ---------------------------------------------------------------------------------------------------------


def _targets(folder: Path, splits: Iterable[str]) -> dict[str, Path]:
    """Where each split is written; what a file there holds `_write` looks at."""
    from hacpo.artifacts.targets import check_file

    targets = {split: folder / f"{split}.parquet" for split in splits}
    for target in targets.values():
        check_file(target, lambda _: True, what="problem file")
    return targets


def _write(name: str, problems: list[Problem], path: Path, *, force: bool) -> None:
    import pyarrow.parquet as pq

    from hacpo.artifacts import parquet, storage, tables
    from hacpo.data.problems import load
    from hacpo.errors import SettingsError
    from hacpo.settings.root import DataSet

    table = parquet.to_arrow(tables.PROBLEMS, [vars(row) for row in problems])
    with storage.atomic(path) as scratch:
        pq.write_table(table, scratch, compression="zstd", write_page_checksum=True)
        load(name, DataSet(path=scratch.name), scratch.parent)
        if path.exists() and path.read_bytes() != scratch.read_bytes() and not force:
            raise SettingsError("is there and differs", where=path, remedy="add --force to replace it, or name --out")
    print(f"{name}: written to {path}")


def _print_usage(name: str, folder: Path, splits: Sequence[str], *, by_gym: bool) -> None:
    print("\nIn params.yaml:\n\ndata:")
    if "train" in splits:
        print(f"  train: {name}/train")
    print("  sets:")
    for split in splits:
        print(f"    {name}/{split}: {{path: {(folder / f'{split}.parquet').as_posix()}}}")
    # A study looks at the final split once, and not at every so many steps.
    held_out = [split for split in splits if split not in ("train", "final")]
    if held_out:
        print("evaluation:\n  benchmarks:")
        for split in held_out:
            label = name if len(held_out) == 1 else f"{name}_{split}"
            print(f"    {label}: {{data: {name}/{split}}}")
    if by_gym:
        print(f"verification: {{reward: {GYM}}}")


if __name__ == "__main__":
    main_of(import_problems)
