"""Explain why an injection leaves pods unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll_operator.injection.options import InjectionOptions


def format_unchanged_note(reason: str) -> str:
    """Return the note about pods that stay unchanged for the reason ``reason``."""
    return f"left unchanged: {reason}"


def explain_selector_mismatch(labels: Mapping[str, Any], options: InjectionOptions) -> str | None:
    """Return why the selector does not match ``labels``; None if it does."""
    text_labels = {str(key): str(value) for key, value in labels.items()}
    if options.selector is None or options.selector.matches(text_labels):
        return None
    shown = ", ".join(f"{key}={value}" for key, value in text_labels.items()) or "none"
    return f"{options.fields.selector} does not match the pod's labels ({shown})"


def explain_group_restart(
    options: InjectionOptions, policy: str = "RecreateGroupOnPodRestart"
) -> str:
    """Return the message that asks the user to accept the restart policy of a group of pods."""
    return (
        f"restartPolicy {policy} recreates the whole group whenever a container restarts,"
        f" including the supervisor: to accept this, use {options.fields.group_restarts};"
        " otherwise, set leaderWorkerTemplate.restartPolicy to None"
    )
