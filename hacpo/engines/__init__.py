"""Engines: the only place that imports torch models, tokenizers or vLLM."""
