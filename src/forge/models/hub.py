"""The Hugging Face hub: names with a revision, model cards, uploads."""

import re
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from ..system.masking import without_secrets

PACKAGES = ("torchforge-rl", "torch", "transformers", "torchmonarch")
NAME = re.compile(r"[\w.-]+/[\w.-]+")


def split_revision(name: str) -> tuple[str, str | None]:
    """Split `owner/model@revision` into (owner/model, revision); the revision, a branch, tag or commit, is optional.

    >>> split_revision("owner/model@main")
    ('owner/model', 'main')
    """
    # "owner/model@" is an empty revision, and not the default one.
    repository, separator, revision = name.partition("@")
    return repository, revision if separator else None


def check_model_name(model: object) -> None:
    """Raise ValueError if a model's name is neither text nor a path: None would be looked for as "None" on the hub."""
    if not isinstance(model, str | PathLike) or not str(model):
        raise ValueError(f"model must be a directory or hub id, got {model!r:.80}")


def is_hub_id(name: str) -> bool:
    """Return whether a name is `owner/model`, with or without `@revision`, and cannot mean a local folder.

    A misspelt folder is not a hub id either: a name in a folder that exists, or one that starts like a path.

    >>> is_hub_id("owner/model")
    True
    >>> is_hub_id("./model")
    False
    """
    folder = Path(name)
    repository, _ = split_revision(name)
    is_local = folder.is_dir() or name.startswith((".", "/", "~")) or folder.parent.is_dir()
    return NAME.fullmatch(repository) is not None and not is_local


def is_hub_reachable() -> bool:
    """Return whether the hub answers within seconds, by one request: its own client tries five times, with pauses."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5.0)
    except Exception:  # errors of the network, the HTTP client and the offline mode have no common class
        return False
    return True


def check_upload(repository: str) -> None:
    """Check before a run that its model can be uploaded when it ends.

    Raises:
        ValueError: the repository is not `owner/name`, the hub is switched off, or there is no token.
    """
    from huggingface_hub import constants, get_token

    # Before the run: an upload that fails at its end would lose the model's card.
    if NAME.fullmatch(repository) is None:
        raise ValueError(f"checkpoint.push_to_hub must be owner/name, got {repository!r}")
    if constants.HF_HUB_OFFLINE:
        raise ValueError("checkpoint.push_to_hub needs the hub, but HF_HUB_OFFLINE is set: unset one of them")
    if get_token() is None:
        raise ValueError("checkpoint.push_to_hub needs a token of the hub: run `hf auth login`, or set HF_TOKEN")


def upload_folder(folder: Path, repository: str) -> str:
    """Upload a model's folder to a repository, which is made private if it is new; return the repository's address.

    Raises:
        OSError, ValueError: the upload failed; the hub's own errors.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    address = api.create_repo(repository, private=True, exist_ok=True)
    api.upload_folder(folder_path=folder, repo_id=repository, commit_message="Trained with torchforge")
    return str(address)


def write_card(folder: Path, recipe: str, config: dict[str, Any], history: list[dict[str, Any]]) -> None:
    """Write `README.md` into an exported model's folder: recipe, data, metrics, versions and configuration.

    Args:
        recipe: its name, such as "grpo".
        config: the run's configuration; secrets in it are masked, as the card may be published.
        history: rows of metrics.jsonl.
    """
    from huggingface_hub import ModelCardData

    config = without_secrets(config)
    dataset = config.get("dataset") or {}
    start = config.get("model")
    rows = [dataset, *(dataset.get("sources") or ())]
    data = [str(row.get("path") or row.get("task")) for row in rows if row.get("path") or row.get("task")]
    card = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["torchforge", recipe],
        base_model=split_revision(start)[0] if start and is_hub_id(start) else None,
        datasets=[name for name in data if NAME.fullmatch(name) and not Path(name).exists()] or None,
    )

    # First and last value of the most important metrics.
    table = []
    for key in ("eval/accuracy", "eval/reward", "eval/loss", "reward", "accuracy", "loss"):
        cells = [f"{row[key]:.4g} (step {row['step']:.0f})" for row in history if key in row]
        if cells:
            table.append(f"| {key} | {cells[0]} | {cells[-1]} |")

    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:  # forge on the path, without being installed
            versions.append(f"{package} (version unknown)")

    # The card: front matter that the hub reads, then text for people.
    sections = [
        f"---\n{card.to_yaml()}\n---",
        f"# {(config.get('run') or {}).get('name', recipe)}",
        f"Trained with torchforge, recipe `{recipe}`, from {f'`{start}`' if start else 'random weights'}, on "
        f"{', '.join(f'`{name}`' for name in data) or 'its own data'}.",
        "\n".join(["| metric | first | last |", "|---|---|---|", *table]) if table else "It left no metrics.",
        f"Versions: {', '.join(versions)}.",
        f"## Configuration\n\n```yaml\n{yaml.safe_dump(config, sort_keys=False, allow_unicode=True)}```",
    ]
    (folder / "README.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")
