"""The paper's recipes and its neighbours' as values of the `algorithm` block."""

from __future__ import annotations

from typing import Any

from hacpo.settings.algorithm import AlgorithmSettings
from hacpo.settings.base import merged

_HACPO: dict[str, Any] = {
    "rollouts": {
        "share": True,
        "group_multiplier": 1,
        "passes": 1,
        "share_rewards": False,
        "select": "all",
        "own_fraction": 1.0,
        "external_fraction": 1.0,
        "draw_seed": None,
    },
    "capability": {
        "metric": "reward_mean",
        "window": 5,
        "samples": None,
        "oracle_table": None,
        "oracle_samples": None,
        "floor": 1e-8,
        "ratio_min": 0.1,
        "ratio_max": 10.0,
    },
    "advantage": {
        "epsilon": 1e-6,
        "baseline": "capability",
        "kappa": 4.0,
        "discrepancy": True,
        "cross_baseline": "source",
        "baseline_guard": True,
    },
    "importance": {
        "alpha": 1.0,
        "ratio_norm": "learner_tokens",
        "level": "sequence",
        "reference": "source",
        "score_eos": True,
    },
    "clip": {"own_low": 3e-4, "own_high": 4e-4, "cross": "stepwise", "cross_delta": 0.2, "cross_step": 0.025},
    "loss": {
        "aggregation": "sum",
        "cross_weight": 1.0,
        "minibatch_order": "mixed",
        "ranks": 1,
        "shuffle": True,
        "kl_coef": 0.0,
        "kl_cap": None,
        "kl_responses": "all",
        "sampler_correction": "none",
        "sampler_correction_cap": 2.0,
    },
}

_OWN_ONLY: dict[str, Any] = {"rollouts": {"share": False}, "advantage": {"baseline": "joint", "discrepancy": False}}

RECIPES: dict[str, dict[str, Any]] = {
    name: merged(_HACPO, changes)
    for name, changes in {
        "hacpo": {},
        "gspo": _OWN_ONLY,
        "gspo_x2": merged(_OWN_ONLY, {"rollouts": {"group_multiplier": 2}}),
        "gspo_two_passes": merged(_OWN_ONLY, {"rollouts": {"passes": 2}}),
        "grpo": merged(_OWN_ONLY, {"importance": {"level": "token"}, "clip": {"own_low": 0.2, "own_high": 0.28}}),
        "naive": {
            "advantage": {"baseline": "joint", "discrepancy": False},
            "importance": {"alpha": 0.0},
            "clip": {"cross": "own"},
        },
        "xgrpo": merged(_OWN_ONLY, {"rollouts": {"share_rewards": True}}),
        "sgt": {
            "rollouts": {"select": "rescue"},
            "advantage": {"baseline": "group", "discrepancy": False},
            "importance": {"alpha": 0.0},
            "clip": {"cross": "likelihood"},
            "loss": {"cross_weight": 0.1},
        },
        "sapo": {
            "rollouts": {"select": "sample", "own_fraction": 0.5, "external_fraction": 0.5},
            "advantage": {"baseline": "group", "discrepancy": False},
            "importance": {"alpha": 0.0, "reference": "self"},
            "clip": {"cross": "own"},
            "loss": {"aggregation": "mean"},
        },
        "no_capability_baseline": {"advantage": {"baseline": "joint"}},
        "no_discrepancy": {"advantage": {"discrepancy": False}},
        "no_clip": {"clip": {"cross": "none"}},
        "no_stepwise": {"clip": {"cross_step": 0.0}},
        "reference_code": {
            "capability": {"metric": "positive_rate"},
            "advantage": {"cross_baseline": "learner"},
            "importance": {"ratio_norm": "own_tokens", "score_eos": False},
            "loss": {
                "aggregation": "mean",
                "minibatch_order": "self_first",
                "ranks": 8,
                "shuffle": False,
                "kl_coef": 0.001,
                "kl_cap": 10.0,
                "kl_responses": "own",
            },
        },
        "reference_code_main": {
            "advantage": {"cross_baseline": "learner"},
            "importance": {"ratio_norm": "own_tokens"},
            "loss": {
                "aggregation": "mean",
                "minibatch_order": "balanced",
                "ranks": 8,
                "shuffle": False,
                "kl_coef": 0.001,
                "kl_cap": 10.0,
                "kl_responses": "own",
            },
        },
    }.items()
}
"""Every recipe of the paper and of its neighbours as values of the `algorithm` block (docs/recipes.md), and what the
authors' two code bases do where they differ (docs/reference_code.md). What else one more needs: docs/house.md, "How to
add"."""


_FILLED_IN = ("draw_seed",)
"""Keys that are never a choice where they differ: `hacpo.settings.params` says with what they are filled in."""


def overridden(algorithm: AlgorithmSettings) -> list[str]:
    """The keys that differ from the recipe's preset, as `clip.own_low 0.03 (recipe: 0.0003)`."""
    preset, found = RECIPES[algorithm.recipe], algorithm.model_dump()
    return [
        f"{block}.{key} {found[block][key]} (recipe: {value})"
        for block, values in preset.items()
        for key, value in values.items()
        if found[block][key] != value and key not in _FILLED_IN
    ]
