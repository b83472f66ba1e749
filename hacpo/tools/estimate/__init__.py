"""What a run will need, from its settings alone: rollouts, tokens, arithmetic, memory and disk (docs/estimate.md)."""
