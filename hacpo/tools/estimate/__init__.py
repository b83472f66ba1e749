"""What a run will need, from its settings alone: rollouts, tokens, memory, disk and time (docs/estimate.md)."""
