"""Sampling with vLLM, inside this process or over HTTP."""
