"""Whether a model that is no folder can be had: it is in the cache, or the hub has it and answers."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import ModelError
from ...hub import cached_file
from ...placement.model.zoo import SHIPPED
from ...workers.model_folder import folder_fix

SECONDS = 10.0  # in which the hub has to answer


def check_on_hub(name: str, files: Iterable[str], *, revision: str | None = None, what: str = "model") -> None:
    """Raise ModelError for a name of the hub of which no one of ``files`` is cached and that the hub does not give.

    The hub is asked once. transformers would ask it for each file, again and again, and name another cause.
    """
    if any(cached_file(name, file) is not None for file in files):
        return
    if name.lower() in SHIPPED:
        hub = SHIPPED[name.lower()][0]
        raise ModelError(
            f"'{name}' is a size for check, plan and simulate: it has no weights.",
            fix=f"Name a saved model of that size, such as {hub} of the hub: --model WORKER={hub}.",
        )
    why = _refusal(name, revision)
    if why is not None:
        fix = f"Name a folder that holds one or a name of the hub, in the driver or with --model WORKER=NAME; {why[1]}."
        raise ModelError(f"The {what} '{name}' {why[0]}.", fix=fix if "/" in name else folder_fix(name, fix))


def _refusal(name: str, revision: str | None) -> tuple[str, str] | None:
    """Return why the hub does not give a model, and what helps; None where it does, or says what transformers tells."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        HfApi().model_info(name, revision=revision, timeout=SECONDS)
    except RepositoryNotFoundError:
        return "is not in the cache, and the hub has none of that name", "for a private one set HF_TOKEN"
    except HfHubHTTPError:
        return None
    except HFValidationError:
        return "is no folder here, and no name that the hub could have", "a name of the hub is USER/NAME"
    except OfflineModeIsEnabled:
        return "is not in the cache, and HF_HUB_OFFLINE is set", "or unset it"
    except Exception:  # of the connection: which class it has depends on the library below the hub's
        return "is not in the cache, and the hub cannot be reached", "or fetch it once where the hub can be reached"
    return None
