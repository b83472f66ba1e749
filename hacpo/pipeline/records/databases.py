"""DVC's notes about what it has hashed and linked: SQLite databases in its site cache, by `diskcache`."""

from __future__ import annotations

import functools
from typing import Any


def give_up_when_refused(repo: Any) -> None:
    """Have DVC (dvc_data 3, diskcache 5) raise where its databases cannot be written.

    `diskcache` repeats the beginning of a transaction for ever, whatever the reason, wherever an item is assigned, as
    DVC does: on a full disk a command would never end. Without its retry, SQLite still waits a minute for others.

    Raises:
        `Timeout` of diskcache: by what is then called with the repository; its context is SQLite's error.
    """
    for database in (repo.state.hashes, repo.state.links):
        database._transact = functools.partial(_begin_once, database._transact)


def _begin_once(transact: Any, retry: bool = False, filename: str | None = None) -> Any:  # noqa: ARG001
    return transact(False, filename)
