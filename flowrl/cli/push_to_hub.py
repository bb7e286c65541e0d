"""A folder pushed to the Hugging Face hub; who cannot push is told before anything is done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError


@dataclass(frozen=True)
class OpenHub:
    """The hub, as it has answered who is there: ``OpenHub(api, "user/name")``."""

    api: Any
    name: str

    def push(self, folder: Path, *, private: bool) -> str:
        """Push a folder as one commit; return its address. Raises UsageError, with the folder left as it is."""
        try:
            self.api.create_repo(self.name, private=private, exist_ok=True)
            return str(
                self.api.upload_folder(repo_id=self.name, folder_path=str(folder), commit_message="flowrl export")
            )
        except Exception as error:
            raise UsageError(
                f"{self.name} was not pushed: {_first_line(error)}",
                fix=f"The model is in {folder}; upload_folder of huggingface_hub pushes it later.",
            ) from None


def open_hub(name: str) -> OpenHub:
    """Ask the hub who pushes. Raises UsageError where that is forbidden, unknown, or the hub does not answer."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(f"--push-to-hub: {_first_line(error)}", fix="Write it as USER/NAME.") from None
    if constants.HF_HUB_OFFLINE:
        raise UsageError("--push-to-hub: HF_HUB_OFFLINE is set, so nothing may leave this machine.", fix="Unset it.")
    if get_token() is None:
        raise UsageError(
            "--push-to-hub: this machine has no token of the hub.",
            fix="Log in with login of huggingface_hub, or set HF_TOKEN.",
        )
    api = HfApi()
    try:
        api.whoami()
    except Exception as error:
        raise UsageError(
            f"--push-to-hub: {constants.ENDPOINT} does not let us in: {_first_line(error)}",
            fix="Leave --push-to-hub out; upload_folder of huggingface_hub pushes the folder later.",
        ) from None
    return OpenHub(api, name)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
