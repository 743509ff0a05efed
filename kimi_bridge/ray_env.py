"""The environment that Ray workers need to find the same models and files as the driver."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

# What huggingface_hub's constants do not hold under the variable's own name, and what transformers and
# datasets read beside them.
_OTHERS = (
    "HF_ENDPOINT",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_MODULES_CACHE",
    "HF_DATASETS_CACHE",
    "HF_DATASETS_OFFLINE",
    "TRANSFORMERS_CACHE",
    "TRANSFORMERS_OFFLINE",
)
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|KEY)$")
_PATH = re.compile(r"(CACHE|HOME|PATH)$")
_MASK = "***"


class EnvVars(dict[str, str]):
    """A dict whose repr shows no secrets: neither values of names like HF_TOKEN nor logins in URLs."""

    def masked(self) -> dict[str, str]:
        """A copy to show."""
        return {name: _MASK if _is_secret(name, value) else value for name, value in self.items()}

    def __repr__(self) -> str:
        return repr(self.masked())

    def __rich_repr__(self) -> Iterator[Any]:
        yield self.masked()

    # Python's own return a plain dict, which would show what this one hides.
    def __or__(self, other: Any) -> Self:  # type: ignore[override]
        return type(self)({**self, **other})

    def __ror__(self, other: Any) -> Self:  # type: ignore[override]
        return type(self)({**other, **self})

    def copy(self) -> Self:
        return type(self)(self)


def worker_env_vars(secrets: bool = True) -> EnvVars:
    """The Hugging Face variables that are set here, for Ray: `runtime_env={"env_vars": worker_env_vars()}`.

    The variables are those that huggingface_hub.constants has a value of the same name for (HF_HOME,
    HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN_PATH, HF_XET_CACHE, HF_ASSETS_CACHE, HUGGINGFACE_HUB_CACHE,
    HF_HUB_DISABLE_* and so on, as its version has them), and HF_ENDPOINT, HF_TOKEN,
    HUGGING_FACE_HUB_TOKEN, HF_MODULES_CACHE, HF_DATASETS_CACHE, HF_DATASETS_OFFLINE, TRANSFORMERS_CACHE,
    TRANSFORMERS_OFFLINE. Paths are made absolute, for a worker has another working directory; HF_HOME also
    stands for a driver's XDG_CACHE_HOME. Variables that are not set stay unset.

    The dict's repr, str and pretty forms show no secrets (its items and JSON do), and Ray itself writes every
    runtime_env, values and all, into runtime_env_agent.log on its nodes. With `secrets=False` tokens stay
    out, and workers log in with the file that HF_TOKEN_PATH or HF_HOME names (`hf auth login` writes it).
    """
    from huggingface_hub import constants

    names = {name for name in dir(constants) if name.startswith(("HF_", "HUGGINGFACE_"))}
    found = EnvVars()
    if cache := os.environ.get("XDG_CACHE_HOME"):
        found["HF_HOME"] = _absolute(str(Path(cache) / "huggingface"))
    for name in sorted(names | {*_OTHERS}):
        value = os.environ.get(name)
        if value and (secrets or not _is_secret(name, value)):
            found[name] = _absolute(value) if _PATH.search(name) else value
    return found


def _is_secret(name: str, value: object) -> bool:
    return bool(_SECRET.search(name)) or bool(re.search(r"://.*@", str(value)))


def _absolute(path: str) -> str:
    found = Path(os.path.expandvars(path))
    # huggingface_hub leaves the home of an unknown user as it is.
    with suppress(RuntimeError):
        found = found.expanduser()
    return str(found.absolute())
