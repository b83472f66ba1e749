"""From problems to tokens and back: tokenizers, chat templates, prompts, stops, retokenisation."""
