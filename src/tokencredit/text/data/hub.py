"""Uploading a policy to the Hugging Face hub: whether that will work, and the upload."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, and not in __all__

from tokencredit.errors import ConfigError, RunStopped


def check_push(repository: str) -> str:
    """The name of the user who may upload to a repository of the hub, which need not exist yet.

    Raises:
        ConfigError: it is no name of a repository, nobody is logged in, the token may not write there, or the hub
            cannot be reached.
    """
    about = f"run.push_to_hub is {repository!r}"
    try:
        validate_repo_id(repository)
        user = HfApi().whoami()
    except HFValidationError as error:
        raise ConfigError(f"{about}; it must be a name such as me/policy: {error}") from error
    except LocalTokenNotFoundError as error:
        raise ConfigError(f"{about}, and nobody is logged in; run hf auth login, or set HF_TOKEN") from error
    except HfHubHTTPError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{about}, and the hub refuses the login: {reason}; run hf auth login") from error
    except Exception as error:  # the HTTP library, and so its exceptions, depends on the version of huggingface_hub
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{about}, and the hub cannot be reached: {reason}; leave it out, and upload the policy's folder later"
        ) from error
    owner = repository.rpartition("/")[0] or user["name"]
    roles = {user["name"]: "admin"} | {x["name"]: x.get("roleInOrg", "write") for x in user.get("orgs") or ()}
    if owner not in roles:
        raise ConfigError(
            f"{about}, and {owner} is neither {user['name']} nor one of its organizations; choose another"
        )
    token = (user.get("auth") or {}).get("accessToken") or {}
    scopes = [x for x in (token.get("fineGrained") or {}).get("scoped") or () if "repo.write" in x["permissions"]]
    fine = any(x["entity"].get("name") in (owner, repository) for x in scopes)
    if "read" in (token.get("role"), roles[owner]) or (token.get("role") == "fineGrained" and not fine):
        raise ConfigError(f"{about}, and {user['name']}'s token may not write there; give one with write access")
    return str(user["name"])


def upload(folder: Path, repository: str, private: bool | None = None) -> None:
    """Upload a policy's folder to the Hugging Face hub; `RunStopped` if it refuses or cannot be reached.

    A new repository is `private`, or with None what its owner's new ones are.
    """
    try:
        HfApi().create_repo(repository, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # the HTTP library, and so its exceptions, depends on the version of huggingface_hub
        reason = " ".join(str(error).split())
        raise RunStopped(
            f"could not upload {folder} to the hub as {repository!r}: {reason}; try hf upload {repository} {folder}"
        ) from error
