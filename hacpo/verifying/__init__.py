"""Whether a response earns its reward: math-verify behind bounds, or a function of the user's own."""
