"""The Hugging Face hub: dataset files at one commit, and uploads of model folders. Whatever fails is one line.

`HF_ENDPOINT` names another hub, `HF_TOKEN` or `hf auth login` the account, as for every Hugging Face library.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hacpo.errors import HacpoError

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@dataclass(frozen=True)
class HubDataset:
    """A dataset repository at one commit.

    Attributes:
        repository: `owner/name`.
        commit: 40 hexadecimal digits.
        licence: what the dataset card of that commit states; None where it states none.
    """

    repository: str
    commit: str
    licence: str | None

    def uri(self, file: str) -> str:
        """`hf://datasets/<owner>/<name>@<commit>/<file>`, as fsspec, DuckDB and Polars read it."""
        return f"hf://datasets/{self.repository}@{self.commit}/{file}"


def find_dataset(repository: str, revision: str) -> HubDataset:
    """The dataset at a branch, tag or commit, the commit resolved.

    Raises:
        HacpoError: the hub cannot be reached, or has no such dataset or revision.
    """
    with _one_line(f"{repository} at {revision}", remedy="without a network, import a local copy with --from FILE"):
        info = _api().dataset_info(repository, revision=revision)
    if info.sha is None:
        raise HacpoError("the hub names no commit", where=f"{repository} at {revision}")
    stated = getattr(info.card_data, "license", None)
    licence = ", ".join(stated) if isinstance(stated, list) else stated
    return HubDataset(repository, info.sha, licence)


def download(dataset: HubDataset, file: str) -> Path:
    """A file of the dataset, from the hub or from its cache on this machine.

    Raises:
        HacpoError: it cannot be had.
    """
    with _one_line(dataset.uri(file)):
        return Path(_api().hf_hub_download(dataset.repository, file, repo_type="dataset", revision=dataset.commit))


def push(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Upload a model folder as one commit, making the repository if there is none; returns the commit's address.

    Args:
        private: of a new repository; one that exists stays as it is.

    Raises:
        HacpoError: no token, no network, or the hub refuses. The folder is untouched.
    """
    from huggingface_hub import get_token

    with _one_line(repository, remedy=f"the model folder {folder} is whole; repeat with --push once this is mended"):
        if get_token() is None:
            raise HacpoError("no token for the hub", where=repository, remedy="set HF_TOKEN, or run `hf auth login`")
        api = _api()
        created = api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message=message)
    return str(done.commit_url)


def _api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="hacpo")


@contextlib.contextmanager
def _one_line(where: object, remedy: str | None = None) -> Iterator[None]:
    try:
        yield
    except HacpoError:
        raise
    except Exception as error:
        # huggingface_hub raises errors of its HTTP library, OSError, ValueError and others, depending on what fails.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160].rstrip(".")
        raise HacpoError(f"the hub cannot be used: {reason}", where=where, remedy=remedy) from None
