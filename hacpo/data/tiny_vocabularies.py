"""Three vocabularies for agents made from scratch, which cut the same text differently, so that agents with different
ones have responses to translate:

| vocabulary      | tokens                                                   | `12+3 has` becomes    |
|-----------------|----------------------------------------------------------|-----------------------|
| `characters`    | every printable ASCII character                          | 1 2 + 3 _ h a s       |
| `numbers_words` | the same, the numbers 10-99 and the tasks' words         | 12 + 3 _ has          |
| `digits_words`  | digits, punctuation, `x` and the tasks' words            | 1 2 + 3 _ has         |

`gym_characters`, `gym_numbers` and `gym_words` are like these for the tasks of reasoning-gym in `PHRASES`: what frames
the numbers in their questions is one token in the first two, and one for each word in the third. So a question is as
short as one of `hacpo.data.tasks`. In all of them `\\boxed{` is one token, and whatever has no token becomes `<unk>`.
"""

from __future__ import annotations

import re
import string

from hacpo.data.tasks import WORDS

BOX = "\\boxed{"
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ROLES = ("system", "user", "assistant")
"""Each role's messages start with its own control token, `<user>` and so on; the assistant's end with `<eos>`."""

CONTROL_TOKENS = (PAD, EOS, UNK, *(f"<{role}>" for role in ROLES))
"""The first ids of each vocabulary; its `PIECES` follow."""

PHRASES = (
    "State the final answer to the following arithmetic problem: ",  # chain_sum
    "Solve for ",  # simple_equations, three ways
    "Find the value of ",
    " in the equation: ",
    "Determine the value of ",
    " that satisfies: ",
    "Find the Greatest Common Divisor (GCD) of these numbers: ",  # gcd
    ". Give only the GCD as your final answer.",
    "Find the Least Common Multiple (LCM) of these numbers: ",  # lcm
    "Solve the following multiplication: ",  # products
    ". Give only the result as your final answer.",
)
"""What frames the numbers in the questions of reasoning-gym's tasks with short questions."""

_PHRASE_WORDS = tuple(sorted({word for phrase in PHRASES for word in re.findall("[A-Za-z]{2,}", phrase)}))
_NUMBERS = tuple(str(number) for number in range(10, 100))
_PUNCTUATION = (" ", *string.punctuation)
PIECES: dict[str, tuple[str, ...]] = {
    "characters": (*string.digits, *_PUNCTUATION, *string.ascii_letters, BOX),
    "numbers_words": (*string.digits, *_PUNCTUATION, *string.ascii_letters, BOX, *_NUMBERS, *WORDS),
    "digits_words": (*string.digits, *_PUNCTUATION, "x", BOX, *WORDS),
    "gym_characters": (*string.digits, *_PUNCTUATION, *string.ascii_letters, BOX, *PHRASES),
    "gym_numbers": (*string.digits, *_PUNCTUATION, *string.ascii_letters, BOX, *_NUMBERS, *PHRASES),
    "gym_words": (*string.digits, *_PUNCTUATION, *string.ascii_lowercase, BOX, *_PHRASE_WORDS),
}
"""Vocabulary -> its pieces of text."""
