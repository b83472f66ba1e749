"""From a problem to the chat messages that every agent's own template renders."""

from __future__ import annotations

from hacpo.config import PromptSettings
from hacpo.errors import DataError


def messages(problem_id: str, problem: str, settings: PromptSettings) -> list[dict[str, str]]:
    """The messages of one prompt, the same for every agent.

    Raises:
        DataError: the problem has no text.
    """
    if not problem.strip():
        raise DataError("the problem has no text to make a message from", where=f"problem {problem_id!r}")
    user = {"role": "user", "content": settings.user.replace("{problem}", problem)}
    return [{"role": "system", "content": settings.system}, user] if settings.system is not None else [user]
