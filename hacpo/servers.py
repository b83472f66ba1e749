"""Which running vLLM server samples for which agent: `servers.yaml` beside params.yaml, agent -> URL.

Where a server listens says nothing about what it samples, so it is no setting: a server that moves to another port or
machine re-runs nothing. What a server must hold and how it must sample is settings, and checked before it is used.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from hacpo.errors import SettingsError

NAME = "servers.yaml"

_LOOPBACK = re.compile(r"127(?:\.\d{1,3}){3}")


def server_url(folder: Path, agent: str) -> str:
    """The URL of an agent's server, without a slash at its end.

    Args:
        folder: the pipeline's folder.

    Raises:
        SettingsError: `servers.yaml` is missing, names no server for the agent, something that is no URL, or one with a
            password, which messages would show.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    path = folder / NAME
    remedy = f"start `hacpo serve {folder} --agent {agent}` and write the line that it prints into {path}"
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(
            "engine.name is vllm_server, and no file says where the servers are", where=path, remedy=remedy
        ) from None
    except OSError as error:
        raise SettingsError(f"cannot be read: {error.strerror}", where=path, remedy=remedy) from None
    except (YAMLError, UnicodeDecodeError):
        raise SettingsError("not valid YAML", where=path, expected=f"lines such as `{agent}: http://...`") from None
    if not isinstance(content, dict) or agent not in content:
        raise SettingsError(f"names no server for agent {agent!r}", where=path, remedy=remedy)
    url = content[agent]
    if isinstance(url, str) and "@" in url:
        raise SettingsError(
            "a URL of a server may hold no user and no password",
            where=f"{path}: {agent}",
            remedy="give the key of a server in the environment variable VLLM_API_KEY",
        )
    if not isinstance(url, str) or not _is_url(url):
        raise SettingsError(
            "is no URL of a server", where=f"{path}: {agent}", expected="such as http://127.0.0.1:8000", found=repr(url)
        )
    return url.rstrip("/")


def keeps_secrets(url: str) -> bool:
    """Whether nobody on the way can read what is sent: https, or this machine's own addresses."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return parts.scheme == "https" or host in ("localhost", "::1") or _LOOPBACK.fullmatch(host) is not None


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # of a port that is no number, or brackets that do not match
        return False
