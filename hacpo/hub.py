"""The Hugging Face hub: dataset files and models at one commit, and uploads of model folders. Whatever fails is one
line.

`HF_ENDPOINT` names another hub, `HF_TOKEN` or `hf auth login` the account, as for every Hugging Face library.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo.artifacts.model_folder import MODEL_FILES
from hacpo.callbacks import OnProgress
from hacpo.errors import HacpoError, StorageError, first_line

if TYPE_CHECKING:
    from huggingface_hub import HfApi


_LONGEST_LICENCE = 300
"""Characters of a licence's name that are taken over."""


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
    return HubDataset(repository, info.sha, _licence(stated))


def _licence(stated: object) -> str | None:
    """What a card says in the place of a licence: a text, or several; None where it says anything else."""
    said: list[object] = stated if isinstance(stated, list) else [stated]
    texts = [text for text in said if isinstance(text, str)]
    return ", ".join(texts)[:_LONGEST_LICENCE] if texts and len(texts) == len(said) else None


def download(dataset: HubDataset, file: str) -> Path:
    """A file of the dataset, from the hub or from its cache on this machine.

    Raises:
        HacpoError: it cannot be had.
    """
    with _one_line(dataset.uri(file)):
        return Path(_api().hf_hub_download(dataset.repository, file, repo_type="dataset", revision=dataset.commit))


_UNWANTED = ("*/*", "consolidated*")
"""Other copies of the same weights: in folders (`original/`, `onnx/`), or in the format of the model's makers."""


def fetch_model(
    repository: str,
    revision: str | None,
    *,
    where: str,
    on_progress: OnProgress | None = None,
) -> tuple[Path, str]:
    """A model's weights, config, tokenizer, chat template and licence, from the hub or from its cache on this machine.

    Without a network the cache alone is asked.

    Args:
        revision: branch, tag or commit; None: the repository's main branch.
        where: the setting that names the model, for messages.
        on_progress: called with bytes done and in all.

    Returns:
        Its folder in the cache, and the commit (40 hexadecimal digits).

    Raises:
        HacpoError: it cannot be had.
        StorageError: the cache cannot be written.
    """
    from huggingface_hub import constants, snapshot_download

    with _model_errors(repository, revision, where), _storage(Path(constants.HF_HUB_CACHE)):
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(MODEL_FILES),
            ignore_patterns=list(_UNWANTED),
            tqdm_class=_silent_bar(on_progress),
            endpoint=os.environ.get("HF_ENDPOINT") or None,
            library_name="hacpo",
        )
    return Path(folder), Path(folder).name


def model_files(repository: str, revision: str | None, *, where: str) -> list[str]:
    """The names of a model's files, if this account may download them. Nothing is downloaded.

    Raises:
        HacpoError: it may not, or there is no such model or revision, or the hub cannot be reached.
    """
    with _model_errors(repository, revision, where):
        api = _api()
        api.auth_check(repository)
        info = api.model_info(repository, revision=revision)
    return [sibling.rfilename for sibling in info.siblings or []]


@contextlib.contextmanager
def _model_errors(repository: str, revision: str | None, where: str) -> Iterator[None]:
    """Turn what the hub's library raises into one line with the remedy that fits."""
    from huggingface_hub import errors

    named = f"{repository} at {revision}" if revision else repository
    option = f" --revision {revision}" if revision else ""
    page = f"{(os.environ.get('HF_ENDPOINT') or 'https://huggingface.co').rstrip('/')}/{repository}"
    with _one_line(where, remedy=f"once this is mended, repeat; or name a folder that holds {repository}"):
        try:
            yield
        except errors.GatedRepoError:
            raise HacpoError(
                f"{repository} is gated: its owner wants its licence accepted",
                where=where,
                remedy=f"accept it on {page} and log in with `hf auth login` (or set HF_TOKEN)",
            ) from None
        except errors.RevisionNotFoundError:
            raise HacpoError(f"{repository} has no revision {revision!r}", where=where) from None
        except errors.RepositoryNotFoundError:
            raise HacpoError(
                f"there is no folder {repository} here, and the hub shows no such model to this account",
                where=where,
                remedy="correct the name; if the model is private or gated, log in with `hf auth login`",
            ) from None
        except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError, errors.OfflineModeIsEnabled):
            raise HacpoError(
                f"the hub cannot be reached, and {named} is not whole in its cache here",
                where=where,
                remedy=f"with a network run `hf download {repository}{option}`, or name a folder that holds the model",
            ) from None


@contextlib.contextmanager
def _storage(cache: Path) -> Iterator[None]:
    """A full or forbidden disk is not the hub's fault."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        reason = os.strerror(error.errno)
        raise StorageError(
            f"the hub's cache cannot be written: {reason}",
            where=cache,
            remedy="make room, or name another folder in HF_HOME",
            reason=reason,
        ) from None


def _silent_bar(on_progress: OnProgress | None) -> Any:
    """A progress bar class that prints nothing and passes on how many bytes are there."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            # One bar counts files. Of two that count bytes, the one for the network guesses its total.
            self._counts = options.get("unit") == "B" and not str(options.get("desc")).startswith("Downloading")
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts and on_progress is not None:
                on_progress(int(self.n), int(self.total or self.n))

    return Bar


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
def _one_line(where: object, remedy: str = "") -> Iterator[None]:
    try:
        yield
    except HacpoError:
        raise
    except Exception as error:
        # huggingface_hub raises errors of its HTTP library, OSError, ValueError and others, depending on what fails.
        reason = first_line(error, 160).rstrip(".")
        raise HacpoError(f"the hub cannot be used: {reason}", where=where, remedy=remedy) from None
