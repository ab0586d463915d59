"""Version of the installed distribution."""

from __future__ import annotations

UNKNOWN_VERSION = "unknown"


def get_version() -> str:
    """Return the installed version; ``unknown`` if the distribution has no metadata."""
    # Import it only here: it loads half of the email package, which most programs do not need.
    from importlib import metadata

    try:
        return metadata.version("plimsoll")
    except metadata.PackageNotFoundError:
        return UNKNOWN_VERSION
