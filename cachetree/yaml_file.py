"""Files that operators write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cachetree.errors import ConfigError
from cachetree.unreadable import UNREADABLE, written


def read_yaml(path: Path, what: str) -> Any:
    """What the file says, None where that is nothing; raises ConfigError naming `what` and it."""
    try:
        return yaml.safe_load(path.read_text())
    except OSError as exc:
        raise ConfigError(f"{what} {written(path)} cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, *UNREADABLE) as exc:
        raise ConfigError(f"{what} {path} is not YAML: {' '.join(str(exc).split())}") from exc
