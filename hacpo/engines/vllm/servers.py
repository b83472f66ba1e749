"""Which running vLLM server samples for which agent: `servers.yaml` beside params.yaml.

`agent: URL`, or `agent: {url: URL, key_file: PATH}` where the server wants the key in a file of the pipeline's folder,
as `hacpo serve` starts it.

Where a server listens says nothing about what it samples, so it is no setting: a server that moves to another port or
machine re-runs nothing. What a server must hold and how it must sample is settings, and checked before it is used.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hacpo.artifacts.text_files import YamlError, load_yaml, read_text
from hacpo.errors import SettingsError

NAME = "servers.yaml"

KEYS = ".keys"
"""Folder beside it for the keys of servers that run: one file a server, which git leaves out."""

KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's own name for the key that a server asks for."""

HOSTS_VARIABLE = "VLLM_API_KEY_HOSTS"
"""Hosts beside this machine that may get a key, with commas between them: `servers.yaml` may be a stranger's, the
environment is the user's own."""

_LOOPBACK = ipaddress.IPv4Network("127.0.0.0/8")
_KEY = re.compile(r"[!-~]{1,4096}")
"""What can stand in a header."""


@dataclass(frozen=True)
class Server:
    """Where an agent's server is, and the key that it asks for; no message shows the key."""

    url: str
    key: str | None = field(default=None, repr=False)


def server_of(folder: Path, agent: str) -> Server:
    """What `servers.yaml` says of an agent's server.

    Args:
        folder: the pipeline's folder.

    Raises:
        SettingsError: as `server_url` and `server_key`.
    """
    return Server(server_url(folder, agent), server_key(folder, agent))


def server_url(folder: Path, agent: str) -> str:
    """The URL of an agent's server, without a slash at its end.

    Args:
        folder: the pipeline's folder.

    Raises:
        SettingsError: `servers.yaml` is missing, names no server for the agent, something that is no URL, or one with a
            password, which messages would show.
    """
    url, where = _entry(folder, agent).get("url"), f"{folder / NAME}: {agent}"
    if isinstance(url, str) and "@" in url:
        raise SettingsError(
            "a URL of a server may hold no user and no password",
            where=where,
            remedy=f"give the key of a server in the environment variable {KEY_VARIABLE}",
        )
    if not isinstance(url, str) or not _is_url(url):
        raise SettingsError(
            "is no URL of a server", where=where, expected="such as http://127.0.0.1:8000", found=repr(url)[:80]
        )
    return url.rstrip("/")


def server_key(folder: Path, agent: str) -> str | None:
    """The key to send to an agent's server: of the file that its entry names, else of `VLLM_API_KEY`; None: no key.

    Either goes to this machine, and to the hosts that `VLLM_API_KEY_HOSTS` names.

    Raises:
        SettingsError: the file is missing, is none of the pipeline's folder, or holds no key, or is for another host.
    """
    named = _entry(folder, agent).get("key_file")
    if named is None:
        return key_of_environment() if _may_get_key(server_url(folder, agent)) else None
    where = f"{folder / NAME}: {agent}: key_file"
    # servers.yaml may be a stranger's, and what a key's file holds is sent to the server that it names.
    if not isinstance(named, str) or not Path(os.path.realpath(folder / named)).is_relative_to(folder.resolve()):
        raise SettingsError(
            "is no file of the pipeline's folder",
            where=where,
            expected=f"such as {KEYS}/{agent}-8000",
            found=repr(named)[:80],
        )
    remedy = f"start `hacpo serve {folder} --agent {agent}`, and put the line that it prints into {NAME}"
    try:
        text = read_text(folder / named)
    except FileNotFoundError:
        raise SettingsError(
            "there is no such file, so the server has ended", where=where, found=named, remedy=remedy
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise SettingsError(f"cannot be read: {reason}", where=where, found=named, remedy=remedy) from None
    key, url = _checked(text.strip(), f"{where}: {named}"), server_url(folder, agent)
    if not _may_get_key(url):  # the names of the files that `hacpo serve` writes can be guessed
        host = urlsplit(url).hostname
        raise SettingsError(
            "its key would go to another machine, which nobody here has named",
            where=f"{folder / NAME}: {agent}",
            found=host,
            remedy=f"if that server is yours, set {HOSTS_VARIABLE}={host}",
        )
    return key


def key_of_environment() -> str | None:
    """The key in `VLLM_API_KEY`; None where it is not set, or empty.

    Raises:
        SettingsError: it cannot be sent.
    """
    key = os.environ.get(KEY_VARIABLE)
    return _checked(key, KEY_VARIABLE) if key else None


def _checked(key: str, where: str) -> str:
    if not _KEY.fullmatch(key):
        raise SettingsError("is no key", where=where, expected="1 to 4096 ASCII characters without spaces")
    return key


def _entry(folder: Path, agent: str) -> Mapping[str, Any]:
    """What `servers.yaml` says of an agent's server: `url`, and perhaps `key_file`."""
    path = folder / NAME
    remedy = f"start `hacpo serve {folder} --agent {agent}` and write the line that it prints into {path}"
    try:
        content = load_yaml(path)
    except FileNotFoundError:
        raise SettingsError(
            "engine.name is vllm_server, and no file says where the servers are", where=path, remedy=remedy
        ) from None
    except OSError as error:
        raise SettingsError(f"cannot be read: {error.strerror}", where=path, remedy=remedy) from None
    except YamlError as error:
        where = f"{path}:{error.line}" if error.line else path
        raise SettingsError(
            f"not valid YAML: {error}", where=where, expected=f"lines such as `{agent}: http://...`"
        ) from None
    if not isinstance(content, dict) or agent not in content:
        raise SettingsError(f"names no server for agent {agent!r}", where=path, remedy=remedy)
    entry = content[agent]
    if not isinstance(entry, dict):
        return {"url": entry}
    unknown = [name for name in entry if name not in ("url", "key_file")]
    if unknown:
        raise SettingsError(
            f"unknown key {unknown[0]!r}", where=f"{path}: {agent}", expected="url, and perhaps key_file"
        )
    return entry


def keeps_secrets(url: str) -> bool:
    """Whether nobody on the way can read what is sent: https, or this machine's own addresses."""
    return urlsplit(url).scheme == "https" or _is_here(url)


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host in ("localhost", "::1") or ipaddress.IPv4Address(host) in _LOOPBACK
    except ValueError:
        return False


def _may_get_key(url: str) -> bool:
    """Whether a server is on this machine, or the user has said that it may get a key."""
    named = {host.strip().lower() for host in os.environ.get(HOSTS_VARIABLE, "").split(",")}
    return _is_here(url) or urlsplit(url).hostname in named


def _is_url(text: str) -> bool:
    if not text.isascii() or not text.isprintable() or " " in text:
        return False  # `urlsplit` leaves out tabs and line ends, so that another host would be seen than is asked
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # of a port that is no number, or brackets that do not match
        return False
