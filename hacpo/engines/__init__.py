"""Engines, which sample, score and train: the only place that opens models with torch, or imports vLLM."""
