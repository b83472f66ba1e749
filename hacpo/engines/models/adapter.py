"""LoRA adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685) through PEFT.

A model with an adapter is the transformers model itself with PEFT's layers put in the place of some linear ones: it
samples, scores and trains as any other, and only the adapter has gradients. B is zero at first, so step 0 is the base
alone. Later checkpoints hold the adapter without its base (docs/lora.md); whoever needs one whole model gets the two
merged, on demand.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hacpo.artifacts.model_config import check_config
from hacpo.artifacts.model_folder import why_unloadable
from hacpo.artifacts.text_files import check_regular, load_json
from hacpo.artifacts.weights import ADAPTER_BASE, ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config, policy_hash
from hacpo.errors import ArtifactError, ModelError, SettingsError, first_line
from hacpo.seeds import derive_seed
from hacpo.settings.agents import AdapterSettings, TinySettings
from hacpo.tokens.tokenizers import never_ask

_NAME = "default"  # PEFT's, of a model's only adapter
_PREFIX = "base_model.model."  # what PEFT puts before the base's own names in its files


@dataclass(frozen=True)
class Adapter:
    """What a model's adapter is beside its weights: the content of `ADAPTER_CONFIG` and of `ADAPTER_BASE`."""

    config: Mapping[str, Any]
    base: Mapping[str, str]


def adapter_of(model: Any) -> Adapter | None:
    """The adapter of a model; None where all of its weights are trained."""
    return getattr(model, "_hacpo_adapter", None)


def settle_adapter(
    model: Any,
    settings: AdapterSettings | None,
    *,
    step: int,
    before: Path,
    base: Path,
    seed: int,
    where: str,
) -> None:
    """Make a model fit to be trained in a step: before the first one it gets its adapter, later it must have it.

    Args:
        model: of the step before; changed in place.
        settings: `agents.<name>.adapter`; None: all weights are trained.
        step: the one to be trained, from 1.
        before: the checkpoint that the model was loaded from.
        base: the folder of step 0's checkpoint, relative to the project's root: where other tools look for it.
        seed: what A is drawn from.
        where: `agents.<name>.adapter`, for messages.

    Raises:
        SettingsError: the settings do not fit the model, or not the checkpoint.
        ModelError: PEFT is not installed.
    """
    held = adapter_of(model)
    if step == 1 and held is None and settings is not None:
        _require_peft(where)
        config = _config(settings, resolve_targets(model, settings, where), model, base.as_posix())
        _inject(model, config)
        _draw(model, seed)
        inside = Path("..", "..", *base.parts[-2:]).as_posix()  # of checkpoints/step/agent
        model._hacpo_adapter = Adapter(config, {"folder": inside, "policy": policy_hash(before)})
        return
    asked = "none" if settings is None else f"rank {settings.rank}, alpha {settings.alpha}"
    given = "none" if held is None else f"rank {held.config['r']}, alpha {held.config['lora_alpha']}"
    if settings is not None and held is not None and isinstance(settings.targets, list):
        asked += f", targets {', '.join(sorted(settings.targets))}"
        given += f", targets {', '.join(sorted(held.config['target_modules']))}"
    if asked != given:
        raise SettingsError(
            f"the checkpoint of step {step - 1} has another adapter",
            where=where,
            expected=given,
            found=asked,
            remedy="`hacpo run` repeats what depends on this setting",
        )


def check_adapter(start: Path | TinySettings, settings: AdapterSettings, where: str) -> None:
    """See that an agent's first model can get such an adapter, without loading it.

    Args:
        start: its folder, of which only the config is read; or what it is made of.
        where: `agents.<name>.adapter`, for messages.

    Raises:
        SettingsError: the targets or the rank do not fit.
        ModelError: PEFT is not installed, or transformers does not know the architecture.
    """
    _require_peft(where)
    resolve_targets(skeleton(start), settings, where)


def skeleton(start: Path | TinySettings | Mapping[str, Any]) -> Any:
    """A model as its config makes it, its weights of no value.

    Args:
        start: its folder, of which only the config is read; or what it is made of; or what its config says.

    Raises:
        ModelError: transformers does not know the architecture.
    """
    if isinstance(start, TinySettings):
        from hacpo.engines.models.tiny import build_model, build_tokenizer

        return build_model(start, build_tokenizer(start), 0)
    from transformers import AutoConfig, AutoModelForCausalLM

    if isinstance(start, Path):
        check_config(start)
    never_ask()
    try:
        if isinstance(start, Path):
            config = AutoConfig.from_pretrained(str(start), local_files_only=True, trust_remote_code=False)
        else:
            config = AutoConfig.for_model(**start)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        # transformers raises OSError, ValueError, KeyError and others for configs it cannot use.
        raise ModelError(f"cannot be loaded: {why_unloadable(error)}", where=start) from None


def resolve_targets(model: Any, settings: AdapterSettings, where: str) -> list[str]:
    """Endings of the paths of the layers that get an adapter, sorted.

    Raises:
        SettingsError: a target matches no layer, or one that cannot have an adapter, or the rank is too large.
    """
    head, linear, other = model.get_output_embeddings(), {}, set()
    for path, module in model.named_modules():
        # GPT-2's Conv1D is a linear layer with its weight transposed.
        if (isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D") and module is not head:
            linear[path] = module
        else:
            other.add(path)
    names = sorted({path.rpartition(".")[2] for path in linear})
    if isinstance(settings.targets, list):
        for target in settings.targets:
            unfit = any(_matches(path, target) for path in other)
            if unfit or not any(_matches(path, target) for path in linear):
                raise SettingsError(
                    f"{target!r} is {'the output head, or no linear layer' if unfit else 'no layer of this model'}",
                    where=f"{where}.targets",
                    expected=f"some of {', '.join(names)}",
                )
        targets = sorted(settings.targets)
    else:
        targets = [name for name in names if not any(_matches(path, name) for path in other)]
    for path, module in _targeted(model, targets):
        if settings.rank >= min(module.weight.shape):
            raise SettingsError(
                "an adapter as large as its layer saves nothing",
                where=f"{where}.rank",
                expected=f"less than the {min(module.weight.shape)} of {path}",
                found=settings.rank,
            )
    return targets


def adapter_parameters(model: Any, settings: AdapterSettings, where: str) -> int:
    """Parameters of a model's adapter: rank x (inputs + outputs) of each layer that gets one.

    Raises:
        SettingsError: as `resolve_targets`.
    """
    layers = _targeted(model, resolve_targets(model, settings, where))
    return sum(settings.rank * sum(layer.weight.shape) for _, layer in layers)


def load_adapter(model: Any, folder: Path) -> None:
    """Put a checkpoint's adapter into its base, in place.

    Args:
        model: the base, in its final dtype.

    Raises:
        ModelError: PEFT is not installed.
        ArtifactError: the adapter is damaged or belongs to another base.
    """
    from safetensors.torch import load_file

    _require_peft(folder)
    try:
        config = load_json(folder / ADAPTER_CONFIG)
        base = load_json(folder / ADAPTER_BASE)
        _inject(model, config)
        check_regular(folder / ADAPTER_WEIGHTS)
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        parameters = _parameters(model)
        if odd := sorted(tensors.keys() ^ parameters.keys()):
            raise ValueError(f"{odd[0]} is {'unknown' if odd[0] in tensors else 'missing'}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                if tensors[name].shape != parameter.shape:
                    raise ValueError(f"{name} has the shape {tuple(tensors[name].shape)}")
                parameter.copy_(tensors[name])
    except Exception as error:
        # json, safetensors and PEFT each have their own errors for damaged files.
        raise ArtifactError(f"the adapter does not fit its base: {first_line(error, 160)}", where=folder) from None
    model._hacpo_adapter = Adapter(config, base)


def put_adapter(model: Any, adapter: Adapter) -> None:
    """Give a base without weights the adapter of another copy of it, without weights too; in place."""
    _inject(model, adapter.config)
    model._hacpo_adapter = adapter


def write_adapter(adapter: Adapter, state: Mapping[str, torch.Tensor], target: Path) -> None:
    """Write an adapter as PEFT reads it, and what its base is.

    Args:
        adapter: of the model.
        state: name in the model -> whole tensor, of the adapter at least.
        target: an existing folder.
    """
    from safetensors.torch import save_file

    tensors = {
        _file_name(name): tensor.detach().cpu().contiguous() for name, tensor in state.items() if _is_adapters(name)
    }
    save_file(tensors, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    for name, content in ((ADAPTER_CONFIG, adapter.config), (ADAPTER_BASE, adapter.base)):
        text = json.dumps(content, indent=2, sort_keys=True)
        (target / name).write_text(text + "\n", encoding="utf-8")


# --- PEFT ------------------------------------------------------------------------------------------------------------


def _require_peft(where: object) -> None:
    if importlib.util.find_spec("peft") is None:
        raise ModelError(
            "a LoRA adapter needs PEFT, which is not installed", where=where, remedy="run `pip install 'hacpo[lora]'`"
        )


def _config(settings: AdapterSettings, targets: list[str], model: Any, base: str) -> dict[str, Any]:
    """See `weights.adapter_config`."""
    transposed = any(type(module).__name__ == "Conv1D" for _, module in _targeted(model, targets))
    return adapter_config(base=base, rank=settings.rank, alpha=settings.alpha, targets=targets, transposed=transposed)


def _inject(model: Any, config: Mapping[str, Any]) -> None:
    """Put PEFT's layers into a model; only they have gradients then."""
    from peft import LoraConfig, inject_adapter_in_model

    known = {key: value for key, value in config.items() if key not in ("peft_type", "inference_mode")}
    with torch.random.fork_rng(devices=[]):  # PEFT draws weights of its own
        inject_adapter_in_model(LoraConfig(**known), model, _NAME)
    model.eval()


def _draw(model: Any, seed: int) -> None:
    """A uniform in +-1/sqrt(inputs), PEFT's default, from the run's seed and the layer's name; B zero."""
    with torch.no_grad():
        for name, parameter in _parameters(model).items():
            if ".lora_B." in name:
                parameter.zero_()
                continue
            generator = torch.Generator().manual_seed(derive_seed(seed, name))
            bound = 1.0 / math.sqrt(parameter.shape[1])
            parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))


def _parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The adapter's, by their names in PEFT's files."""
    return {_file_name(name): parameter for name, parameter in model.named_parameters() if _is_adapters(name)}


def _is_adapters(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _file_name(name: str) -> str:
    return _PREFIX + name.replace(f".{_NAME}.", ".")


def _targeted(model: Any, targets: Collection[str]) -> Iterator[tuple[str, Any]]:
    """(path, layer) of every layer that gets an adapter."""
    for path, module in model.named_modules():
        if any(_matches(path, target) for target in targets):
            yield path, module


def _matches(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")
