"""Three vocabularies for agents made from scratch, which cut the same text differently, so that agents with different
ones have responses to translate:

| vocabulary      | tokens                                                   | `12+3 has` becomes    |
|-----------------|----------------------------------------------------------|-----------------------|
| `characters`    | every printable ASCII character                          | 1 2 + 3 _ h a s       |
| `numbers_words` | the same, the numbers 10-99 and the tasks' words         | 12 + 3 _ has          |
| `digits_words`  | digits, punctuation, `x` and the tasks' words            | 1 2 + 3 _ has         |

In all of them `\\boxed{` is one token, and whatever has no token becomes `<unk>`.
"""

from __future__ import annotations

import string

from hacpo.data.tasks import WORDS

BOX = "\\boxed{"
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ROLES = ("system", "user", "assistant")
"""Each role's messages start with its own control token, `<user>` and so on; the assistant's end with `<eos>`."""

CONTROL_TOKENS = (PAD, EOS, UNK, *(f"<{role}>" for role in ROLES))
"""The first ids of each vocabulary; its `PIECES` follow."""

_NUMBERS = tuple(str(number) for number in range(10, 100))
_PUNCTUATION = (" ", *string.punctuation)
PIECES: dict[str, tuple[str, ...]] = {
    "characters": (*string.digits, *_PUNCTUATION, *string.ascii_letters, BOX),
    "numbers_words": (*string.digits, *_PUNCTUATION, *string.ascii_letters, BOX, *_NUMBERS, *WORDS),
    "digits_words": (*string.digits, *_PUNCTUATION, "x", BOX, *WORDS),
}
"""Vocabulary -> its pieces of text."""
