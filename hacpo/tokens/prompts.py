"""From a problem to the chat messages of a prompt, and to the tokens that an agent's own template makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hacpo.artifacts.problem_rows import Asked
from hacpo.errors import DataError, ModelError, TemplateError
from hacpo.settings.agents import PromptSettings

if TYPE_CHECKING:
    from hacpo.tokens.tokenizers import ChatTokenizer

Message = dict[str, str]

_QUESTION = "1+1=?"


class PromptTokenizer(Protocol):
    """What rendering needs of a tokenizer."""

    def render(self, problem_id: str, messages: list[Message], thinking: bool | None = None) -> list[int]:
        """Token ids of a prompt; `thinking` as in `PromptSettings`."""


def messages(problem_id: str, problem: str, settings: PromptSettings) -> list[Message]:
    """The messages of one prompt.

    Raises:
        DataError: the problem has no text.
    """
    if not problem.strip():
        raise DataError("the problem has no text to make a message from", where=f"problem {problem_id!r}")
    user = {"role": "user", "content": settings.user.replace("{problem}", problem)}
    return [{"role": "system", "content": settings.system}, user] if settings.system is not None else [user]


def prompt_token_ids(tokenizer: PromptTokenizer, asked: Asked, settings: PromptSettings) -> list[int]:
    """A problem as an agent's prompt.

    Raises:
        DataError: the problem has no text, or the template refuses it.
    """
    said = messages(asked.problem_id, asked.problem, settings)
    return tokenizer.render(asked.problem_id, said, settings.thinking)


def prompt_with_room(tokenizer: ChatTokenizer, asked: Asked, settings: PromptSettings) -> list[int]:
    """A problem as a prompt that a response is sampled to.

    Raises:
        DataError: as for `prompt_token_ids`; or the prompt leaves no room for a token in the model's context, whose
            memory it may be far beyond (a template may repeat what it is given).
    """
    token_ids, longest = prompt_token_ids(tokenizer, asked, settings), tokenizer.context_length
    if longest is not None and len(token_ids) >= longest:
        raise DataError(
            f"a prompt of {len(token_ids):,} tokens leaves no room for a response in the model's context",
            where=f"problem {asked.problem_id!r} with {tokenizer.folder}",
            expected=f"at most {longest - 1:,} tokens",
            remedy="leave the problem out, mend the chat template, or use a model with a longer context",
        )
    return token_ids


def check_template(tokenizer: PromptTokenizer, agent: str, settings: PromptSettings) -> None:
    """Refuse settings that an agent's chat template refuses or takes no notice of, before anything else is done.

    Raises:
        ModelError: the template has no place for a system message, or does not know thinking on and off.
    """

    def rendered(system: str | None, thinking: bool | None) -> list[int]:
        asked = settings.model_copy(update={"system": system})
        return tokenizer.render(agent, messages(agent, _QUESTION, asked), thinking)

    if settings.system is not None:
        remedy = (
            f"leave agents.{agent}.prompt.system out, or set it to null where prompt.system says it for all agents, "
            f"and say it in agents.{agent}.prompt.user"
        )
        try:
            heard = rendered(settings.system, None) != rendered(f"{settings.system} {settings.system}", None)
        except TemplateError as error:
            rendered(None, None)  # a template that refuses everything says so itself
            reason = f"the chat template refuses a system message ({error.reason})"
            raise ModelError(reason, where=f"agents.{agent}.prompt.system", remedy=remedy) from None
        if not heard:
            reason = "the chat template leaves the system message out"
            raise ModelError(reason, where=f"agents.{agent}.prompt.system", remedy=remedy)
    if settings.thinking is not None and rendered(settings.system, True) == rendered(settings.system, False):
        raise ModelError(
            "the chat template takes no notice of `enable_thinking`, so this would do nothing",
            where=f"agents.{agent}.prompt.thinking",
            remedy=f"set agents.{agent}.prompt.thinking to null, or ask for it in the prompt",
        )
