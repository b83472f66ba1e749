"""Reading params.yaml, and giving each stage exactly the settings that it declares.

The file is YAML 1.2 (so `1e-6` is a number). Unknown keys are refused with the nearest known one. `algorithm.recipe`
names a preset (`hacpo.settings.recipes`); any key of the `algorithm` block that the file gives overrides it. The
resolved tree is what every stage reads and what `hacpo resolve` writes to `artifacts/<run>/settings.json`, where DVC
tracks each key on its own.
"""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hacpo.artifacts.text_files import YamlError, load_json, load_yaml, parse_yaml
from hacpo.errors import SettingsError
from hacpo.settings.agents import INHERITED
from hacpo.settings.base import merged
from hacpo.settings.recipes import RECIPES
from hacpo.settings.root import Settings


def files(path: Path) -> list[Path]:
    """A params.yaml and the files that it `extends`, one after another, nearest first.

    Raises:
        SettingsError: one is missing or no mapping, or they extend each other in a circle.
    """
    return [file for file, _ in _chain(path)]


def read_params(path: Path) -> dict[str, Any]:
    """The settings in a params.yaml, laid over those of the file that it `extends`.

    Mappings are merged key by key; a key given as null leaves out what the extended file says there (JSON merge patch,
    RFC 7386); anything else replaces.

    Raises:
        SettingsError: a file is missing, is no YAML, or is no mapping, or they extend each other in a circle.
    """
    result: dict[str, Any] = {}
    for _, content in reversed(_chain(path)):
        result = laid_over(result, content)
    return result


def _chain(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    chain: list[tuple[Path, dict[str, Any]]] = []
    following: Path | None = path
    while following is not None:
        if following.resolve() in [file.resolve() for file, _ in chain]:
            raise SettingsError("the files extend each other in a circle", where=chain[-1][0], found=following)
        content = _read_yaml(following, extended_by=chain[-1][0] if chain else None)
        base = content.pop("extends", None)
        if base is not None and (not isinstance(base, str) or not base):
            raise SettingsError("extends: expected a path relative to this file", where=following, found=repr(base))
        chain.append((following, content))
        following = None if base is None else Path(os.path.normpath(following.parent / base))
    return chain


def laid_over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they are written, with others laid over them as by a file that `extends` theirs."""
    result = dict(base)
    for key, value in changes.items():
        if isinstance(value, Mapping):
            inner = result.get(key)
            result[key] = laid_over(inner if isinstance(inner, Mapping) else {}, value)
        elif value is None and key in result:
            del result[key]
        else:
            result[key] = value
    return result


def _read_yaml(path: Path, extended_by: Path | None) -> dict[str, Any]:
    try:
        raw = load_yaml(path)
    except FileNotFoundError:
        if extended_by is not None:
            raise SettingsError("extends a file that is not there", where=extended_by, found=path) from None
        raise SettingsError(
            "there is no params.yaml", where=path, remedy="name a pipeline folder, for example pipelines/quickstart"
        ) from None
    except OSError as error:
        raise SettingsError(f"cannot be read: {error.strerror}", where=path) from None
    except YamlError as error:
        where = f"{path}:{error.line}" if error.line else path
        raise SettingsError(f"not valid YAML: {error}", where=where) from None
    if not isinstance(raw, dict):
        raise SettingsError("expected a mapping of settings", where=path, found=type(raw).__name__)
    return raw


def resolve(raw: Mapping[str, Any], *, where: object = "settings") -> Settings:
    """Validated settings, the recipe's preset filled in.

    Raises:
        SettingsError: one line for the first thing that is wrong.
    """
    tree = _with_recipe(raw, where)
    try:
        return _with_draws(_with_schedule(_with_start(Settings.model_validate(tree))))
    except ValidationError as error:
        raise _one_line(error, where) from None


def complaints(path: Path) -> list[SettingsError]:
    """Everything that is wrong with a params.yaml, one line each (`load` says the first); empty if it is usable."""
    try:
        Settings.model_validate(_with_recipe(read_params(path), None))
    except ValidationError as error:
        items = error.errors()
        places = {item["loc"] for item in items}
        # What all agents inherit is wrong once.
        return [_line(item, None) for item in items if not (_of_an_agent(item["loc"]) and item["loc"][2:] in places)]
    except SettingsError as error:
        return [error]
    return []


def _with_recipe(raw: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The settings as written, the recipe's preset filled in."""
    tree = copy.deepcopy(dict(raw))
    algorithm = tree.get("algorithm")
    if isinstance(algorithm, dict):
        recipe = algorithm.get("recipe", "hacpo")
        if not isinstance(recipe, str) or recipe not in RECIPES:
            near = difflib.get_close_matches(str(recipe), RECIPES, n=1)
            raise SettingsError(
                f"algorithm.recipe: unknown recipe {recipe!r}",
                where=where,
                expected=" or ".join(RECIPES),
                remedy=f"did you mean {near[0]!r}?" if near else "",
            )
        tree["algorithm"] = merged({"recipe": recipe, **RECIPES[recipe]}, algorithm)
    return tree


def _with_start(settings: Settings) -> Settings:
    """The seed of the starts filled in: `warmup` reads it, and need not read the run's."""
    return settings if settings.start_seed is not None else settings.model_copy(update={"start_seed": settings.seed})


def _with_schedule(settings: Settings) -> Settings:
    """The length of the step size's schedule filled in: `update` reads it, and need not read the number of steps."""
    optimizer = settings.optimizer
    if optimizer.schedule == "constant" or optimizer.schedule_updates is not None:
        return settings
    length = settings.steps * settings.updates_per_step
    return settings.model_copy(update={"optimizer": optimizer.model_copy(update={"schedule_updates": length})})


def _with_draws(settings: Settings) -> Settings:
    """The seed of what is drawn among shared responses filled in: stages that draw need not read the run's."""
    rollouts = settings.algorithm.rollouts
    if rollouts.select == "all" or rollouts.draw_seed is not None:
        return settings
    drawn = rollouts.model_copy(update={"draw_seed": settings.seed})
    return settings.model_copy(update={"algorithm": settings.algorithm.model_copy(update={"rollouts": drawn})})


def load(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """Settings of a params.yaml, with `key.path=value` overrides (values are YAML) laid over it.

    Raises:
        SettingsError: the file or an override is not usable.
    """
    raw = read_params(path)
    for override in overrides:
        key, sign, text = (part.strip() for part in override.partition("="))
        if not sign or not key:
            raise SettingsError("not of the form key=value", where=f"--set {override}")
        node: Any = raw
        *parents, leaf = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise SettingsError(f"{part!r} is a value, not a block", where=f"--set {override}")
        try:
            value = parse_yaml(text)
        except YamlError:
            raise SettingsError("the value is not valid YAML", where=f"--set {override}") from None
        # A block is merged key by key, as under `extends`.
        both = isinstance(value, dict) and isinstance(node.get(leaf), dict)
        node[leaf] = laid_over(node[leaf], value) if both else value
    return resolve(raw, where=f"{path} with --set {' --set '.join(overrides)}" if overrides else path)


def complaint(error: ValidationError, where: object) -> SettingsError:
    """The first thing that is wrong with a part of the settings that was validated alone, as one line."""
    return _line(error.errors()[0], where)


def _one_line(error: ValidationError, where: object) -> SettingsError:
    # What an agent inherits is wrong where it was written, in the run's block.
    first = min(error.errors(), key=lambda item: (item["type"] != "extra_forbidden", _of_an_agent(item["loc"])))
    return _line(first, where)


def refusal(error: ValidationError, where: object, model: type[BaseModel]) -> SettingsError:
    """One line for the first thing that is wrong with a file that is no params.yaml."""
    return _line(error.errors()[0], where, model)


def _line(item: ErrorDetails, where: object, model: type[BaseModel] = Settings) -> SettingsError:
    location = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _known_keys(item["loc"][:-1], model)
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        return SettingsError(
            f"unknown key {location!r}",
            where=where,
            remedy=f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}",
        )
    if item["type"] == "missing":
        return SettingsError(
            f"{location!r} is missing",
            where=where,
            remedy=f"see {'docs/settings.md' if model is Settings else 'the documentation'}",
        )
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return SettingsError(f"{location}: {message}" if location else message, where=where)
    return SettingsError(f"{location}: {message[:1].lower()}{message[1:]}", where=where, found=repr(item["input"])[:80])


def _of_an_agent(location: Sequence[int | str]) -> bool:
    return location[:1] == ("agents",) and location[2:3] != () and location[2] in INHERITED


def _known_keys(location: Iterable[int | str], model: type[BaseModel]) -> list[str]:
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:
            continue  # a name in a mapping such as agents or benchmarks
        inner = [kind for kind in _types_in(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if inner:
            model = inner[0]
    return list(model.model_fields)


def _types_in(annotation: Any) -> list[Any]:
    arguments = get_args(annotation)
    return [annotation] if not arguments else [kind for argument in arguments for kind in _types_in(argument)]


SILENT: Mapping[str, Any] = {
    "algorithm.rollouts.passes": 1,
    "algorithm.rollouts.share_rewards": False,
    "algorithm.rollouts.select": "all",
    "algorithm.rollouts.own_fraction": 1.0,
    "algorithm.rollouts.external_fraction": 1.0,
    "algorithm.rollouts.draw_seed": None,
    "algorithm.loss.cross_weight": 1.0,
    "agents.*.warmup": None,
    "agents.*.tiny.warmup.mixture": {},
    "agents.*.tiny.warmup.problems": 4000,
    "data.sets.*.mixture": {},
    "verification.partial_scores": False,
}
"""Settings of a few runs (`*`: any name), and the value at which they do nothing. Where a run and, in `algorithm`, its
recipe's preset have that value, neither its settings.json nor its tables name them: their bytes, and what DVC compares,
are those of a run that was made without the setting. `start_seed` is another, at the value of `seed`."""


def dump(settings: Settings) -> dict[str, Any]:
    """The resolved settings as plain JSON values, with `agent_names` beside them so that names can be tracked alone;
    without the settings that do nothing (`SILENT`), and without `executor`, which is not of the run."""
    tree = settings.model_dump(mode="json", exclude={"executor"})
    preset = leaves(RECIPES[settings.algorithm.recipe], "algorithm")
    for key, value in SILENT.items():
        for block, name in _blocks(tree, key):
            if name in block and block[name] == value == preset.get(key, value):
                del block[name]
    return {**_without_start(tree), "agent_names": list(settings.agents)}


def spoken_out(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A part of what `dump` gives, as `hacpo.settings` has it, with the settings that it is silent about: those of the
    blocks that it holds."""
    result = copy.deepcopy(dict(tree))
    for key, value in SILENT.items():
        for block, name in _blocks(result, key):
            block.setdefault(name, copy.deepcopy(value))
    return result


def _blocks(tree: dict[str, Any], key: str) -> list[tuple[dict[str, Any], str]]:
    """The blocks of a tree that a dotted key, in which `*` is any name, may stand in, and its name there."""
    *parents, name = key.split(".")
    blocks: list[Any] = [tree]
    for parent in parents:
        inner = [block.values() if parent == "*" else [block.get(parent)] for block in blocks]
        blocks = [block for values in inner for block in values if isinstance(block, dict)]
    return [(block, name) for block in blocks]


def _without_start(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree that does not name the seed of the starts where it is the run's."""
    return {key: value for key, value in tree.items() if key != "start_seed" or value not in (None, tree.get("seed"))}


ADDED = {"disk.fsync": True, "retention.cache": None}
"""Keys that a settings.json made before may lack, and what holds there. No stage reads them."""


def recorded(path: Path) -> dict[str, Any]:
    """What a settings.json says, with the keys that it may have been made without.

    Raises:
        OSError: see `text_files.load_json`.
        ValueError: it is no JSON, or no mapping.
    """
    tree = load_json(path)
    if not isinstance(tree, dict):
        raise ValueError("holds no settings")
    for key, value in ADDED.items():
        block, _, name = key.partition(".")
        if isinstance(inner := tree.setdefault(block, {}), dict):
            inner.setdefault(name, value)
    return _without_start(tree)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of everything in a tree of settings."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else key
        found |= leaves(value, name) if isinstance(value, Mapping) else {name: value}
    return found


def changed(before: Mapping[str, Any], now: Mapping[str, Any], *, in_both: bool = False) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old, new) value of what differs between two trees of settings, in their order; a key that only one
    has is None in the other.

    Args:
        in_both: only keys that both have: between them others were introduced or retired.
    """
    was, new = leaves(before), leaves(now)
    return {
        key: (was.get(key), new.get(key))
        for key in {**was, **new}
        if was.get(key) != new.get(key) and not (in_both and (key not in was or key not in new))
    }


def declared(keys: Iterable[str], agent: str | None = None) -> list[str]:
    """Dotted keys of the settings that a stage declares, for an agent."""
    return [key.replace("{agent}", str(agent)) for key in keys]


def tracked(settings: Settings, keys: Iterable[str], agent: str | None = None) -> list[str]:
    """Dotted keys of `dump` for an agent: what DVC re-runs a stage for that declares `keys`."""
    starts_apart = settings.start_seed not in (None, settings.seed)
    return [
        "seed" if key == "start_seed" and not starts_apart else key
        for key in declared(keys, agent)
        if not _does_nothing(settings, key)
    ]


TRACKED_WHERE_SET = ("start_seed", "warmup")
"""Last parts of the keys that `tracked` names where they are set alone."""


def _does_nothing(settings: Settings, key: str) -> bool:
    """Whether a key that a stage declares is one that `dump` is silent about (`SILENT`)."""
    parts = key.split(".")
    for silent, value in SILENT.items():
        known = silent.split(".")
        if len(known) == len(parts) and all(name in ("*", part) for name, part in zip(known, parts, strict=True)):
            held: Any = settings
            for part in parts:
                held = held.get(part) if isinstance(held, Mapping) else getattr(held, part, None)
            return bool(held == value)
    return False


def reads(settings: Settings, keys: Iterable[str], agent: str | None = None) -> dict[str, Any]:
    """The settings of some keys, nested: the content of `hacpo.settings` in the files of a stage that reads them."""
    result: dict[str, Any] = {}
    everything = dump(settings)
    for key in tracked(settings, keys, agent):
        value: Any = everything
        target = result
        *parents, leaf = key.split(".")
        for part in parents:
            value = value[part]
            target = target.setdefault(part, {})
        target[leaf] = value[leaf]
    return result


def restrict(settings: Settings, keys: Iterable[str], agent: str | None = None) -> Settings:
    """The settings with only the keys that a stage declares: any other attribute raises AttributeError,
    any other agent KeyError.

    This is what makes narrow DVC parameters safe: a stage cannot read a setting that would not re-run it. A stage gets
    its settings from here, by `hacpo.pipeline.execution.opening`.
    """
    keys = declared(keys, agent)
    view: Settings = _restricted(settings, [key for key in keys if key != "agent_names"])
    if "agent_names" in keys:
        seen = view.__dict__.get("agents", {})
        view.__dict__["agents"] = {
            name: seen.get(name, _restricted(whole, [])) for name, whole in settings.agents.items()
        }
    return view


def _restricted(model: Any, keys: list[str]) -> Any:
    whole = {key for key in keys if "." not in key}
    inner: dict[str, list[str]] = {}
    for key in keys:
        head, _, rest = key.partition(".")
        if rest and head not in whole:
            inner.setdefault(head, []).append(rest)
    if isinstance(model, dict):
        return {name: model[name] for name in whole} | {n: _restricted(model[n], rest) for n, rest in inner.items()}
    values = {name: getattr(model, name) for name in whole}
    values |= {name: _restricted(getattr(model, name), rest) for name, rest in inner.items()}
    view = type(model).model_construct()
    view.__dict__.clear()  # the defaults that model_construct filled in
    view.__dict__.update(values)
    return view
