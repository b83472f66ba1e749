"""Checkpoint folders: whole, with the files that never change unchanged, and the optimizer at the right update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hacpo.artifacts.model_folder import GGUF, gguf_hash, gguf_of
from hacpo.artifacts.text_files import load_json, parse_json
from hacpo.artifacts.weights import ADAPTER_FILES, is_weights, optimizer_files
from hacpo.errors import ArtifactError, ModelError
from hacpo.settings.agents import AgentSettings
from hacpo.settings.model_source import COMMIT, STARTED_FROM, hub_repository, read_started_from, read_unpacked_from
from hacpo.tools.audit.adapters import check_adapter
from hacpo.tools.audit.audit_run import AuditRun

_HEADER_LENGTH = 8


def check_checkpoint(run: AuditRun, step: int, agent: str) -> None:
    """Check one checkpoint folder; step 0 is the model that the run began with."""
    folder, first = run.layout.checkpoint(step, agent), run.layout.checkpoint(0, agent)
    names = {path.name for path in folder.iterdir() if path.is_file()}
    run.looked_at("checkpoints", 1, len(names))
    adapter = run.settings.agents[agent].adapter if step > 0 else None
    if adapter is not None:
        check_adapter(run, folder, agent, adapter, names)
    elif "config.json" not in names:
        run.find("checkpoint", folder, expected="config.json", found="no such file")
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if not weights:
        run.find("checkpoint", folder, expected="*.safetensors", found="no weights")
    for name in weights:
        _check_safetensors(run, folder / name)
    if step == 0:
        _check_started_from(run, folder, agent)
        for name in sorted(names & {*ADAPTER_FILES}):
            run.find("checkpoint", folder / name, expected="no such file", found="an adapter before any training")
        return
    for name in sorted(name for name in names if is_weights(Path(name)) and ".safetensors" not in name):
        run.find("checkpoint", folder / name, expected="no such file", found="weights that no update writes")
    if first.is_dir():
        _check_unchanged(run, folder, first, names, whole=adapter is None)
    trainer = folder / "trainer"
    state = optimizer_files(trainer)
    if not state:
        run.find("checkpoint", trainer, expected="optimizer.safetensors", found="not all of it")
    for file in state:
        _check_safetensors(run, file)
    _check_state(run, trainer / "state.json", step * run.settings.updates_per_step + _updates_before(first))


def _check_started_from(run: AuditRun, folder: Path, agent: str) -> None:
    """An agent from the hub says which commit it is, and that is the one asked for, if one was; one from a GGUF file
    its SHA-256."""
    settings, path = run.settings.agents[agent], folder / STARTED_FROM
    repository = hub_repository(settings.model, run.pipeline.root)
    try:
        stated, unpacked = read_started_from(folder), read_unpacked_from(folder)
    except ArtifactError:
        run.find("checkpoint", path, expected="a hub repository and a commit", found="not readable")
        return
    if unpacked is not None or (settings.model or "").endswith(GGUF) or _gguf_file(run, settings.model) is not None:
        _check_unpacked_from(run, path, settings, unpacked)
        return
    if stated is None:
        if repository is not None:
            note = "unless it was taken from a folder that is gone"
            run.find("checkpoint", path, expected=f"{repository} and its commit", found="no such file", note=note)
        return
    if stated[0] != settings.model:
        run.find("checkpoint", path, column="hub", expected=settings.model or "no such file", found=stated[0])
    elif settings.revision and COMMIT.fullmatch(settings.revision) and stated[1] != settings.revision:
        run.find("checkpoint", path, column="commit", expected=settings.revision, found=stated[1])


def _check_unpacked_from(run: AuditRun, path: Path, settings: AgentSettings, unpacked: tuple[str, str] | None) -> None:
    """An agent from a GGUF file says which it is: the one asked for, if one was, or the one that is here, if it is."""
    if unpacked is None:
        run.find("checkpoint", path, expected="the name and SHA-256 of a GGUF file", found="no such file")
        return
    name, digest = unpacked
    model, gguf = run.pipeline.root / (settings.model or ""), _gguf_file(run, settings.model)
    named = model if model.suffix == GGUF else gguf
    if settings.model is None or (named is None and (model / "config.json").is_file()):
        run.find("checkpoint", path, column="gguf", expected=settings.model or "no such file", found=name)
    elif named is not None and named.name != name:
        run.find("checkpoint", path, column="gguf", expected=named.name, found=name)
    elif digest != (wanted := settings.revision or (digest if gguf is None else gguf_hash(gguf))):
        run.find("checkpoint", path, column="sha256", expected=wanted, found=digest)


def _gguf_file(run: AuditRun, model: str | None) -> Path | None:
    """The GGUF file that an agent starts from, if it is here."""
    try:
        return None if model is None else gguf_of(run.pipeline.root / model)
    except ModelError:
        return None


def _check_unchanged(run: AuditRun, folder: Path, first: Path, names: set[str], *, whole: bool) -> None:
    """Config (of a whole model), tokenizer and template are byte for byte those of the start."""
    wanted = {path.name for path in first.iterdir() if path.is_file() and not is_weights(path)}
    if not whole:
        wanted, names = wanted - {"config.json"}, names - {*ADAPTER_FILES}
    for name in sorted(wanted | {name for name in names if not is_weights(Path(name))}):
        if name not in names:
            run.find("checkpoint", folder / name, expected="as at the start", found="no such file")
        elif name not in wanted:
            run.find("checkpoint", folder / name, expected="no such file", found="a file that the start has not")
        elif (folder / name).read_bytes() != (first / name).read_bytes():
            run.find("checkpoint", folder / name, expected="the same bytes as at the start", found="other bytes")


def _check_state(run: AuditRun, path: Path, updates: int) -> None:
    state = _json(path)
    found = state.get("updates_done") if isinstance(state, dict) else None
    if found != updates:
        shown = "not readable" if found is None else found
        run.find("checkpoint", path, column="updates_done", expected=updates, found=shown)


def _updates_before(first: Path) -> int:
    """Updates behind a start that brings its own optimizer along."""
    state = _json(first / "trainer" / "state.json")
    value = state.get("updates_done", 0) if isinstance(state, dict) else 0
    return value if isinstance(value, int) else 0


def _json(path: Path) -> Any:
    try:
        return load_json(path)
    except (OSError, ValueError, RecursionError):
        return None


def _check_safetensors(run: AuditRun, path: Path) -> None:
    """The file is as long as its header says (https://github.com/huggingface/safetensors, "Format")."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_HEADER_LENGTH), "little")
            header = parse_json(stream.read(length if length <= size else 0))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        wanted = _HEADER_LENGTH + length + max(ends, default=0)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
        run.find("checkpoint", path, expected="a safetensors header", found="damaged")
        return
    if size != wanted:
        run.find("checkpoint", path, expected=f"{wanted} bytes, as its header says", found=f"{size} bytes")
