"""The user's config file: which key goes to which service."""

import json
import os
from pathlib import Path

KEY_VARIABLE = "DRESSAGE_API_KEY"


def config_file() -> Path:
    """Where it is: `dressage/config.json` in the user's folder for configuration."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "dressage" / "config.json"


def stored_key(url: str) -> str | None:
    """The key for a service: from the environment, else from the config file."""
    given = os.environ.get(KEY_VARIABLE)
    if given:
        return given
    key = _read().get(_normal(url))
    return key if isinstance(key, str) else None


def store_key(url: str, key: str) -> Path:
    """Keep a key, readable for this user alone. Returns the file."""
    file = config_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"keys": {**_read(), _normal(url): key}}
    partial = file.with_suffix(".partial")
    partial.touch(mode=0o600)
    partial.write_text(json.dumps(content, indent=1))
    partial.replace(file)
    return file


def _read() -> dict[str, object]:
    try:
        keys = json.loads(config_file().read_text())["keys"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return keys if isinstance(keys, dict) else {}


def _normal(url: str) -> str:
    return url.rstrip("/").replace("//localhost", "//127.0.0.1")
