"""The story of an incident as lines of text: for the live view, the list and ``explain``."""

from __future__ import annotations

from rich.text import Text

from plimsoll_api.incident_story import Story, StoryStep
from plimsoll_api.times import clock_time

SHOWN_STEPS = 8
STYLE = {
    "Succeeded": "green", "Failed": "red", "Refused": "red", "Begun": "yellow",
    "Requested": "yellow",
    "Resolved": "bold green", "Unresolved": "bold red", "Suppressed": "bold magenta",
}  # fmt: skip
"""Of phases and of outcomes of steps."""
OPEN_STYLE = "bold yellow"


def state(story: Story) -> Text:
    """Return where the incident stands, in its colour."""
    text = Text(story.phase, style=STYLE.get(story.phase, OPEN_STYLE))
    return text.append(story.state.removeprefix(story.phase), style="default")


def cut(line: Text, width: int, plain: bool) -> Text:
    """Cut a line to ``width`` columns; ``plain`` marks the cut in ASCII."""
    if line.cell_len > width:
        line.truncate(width - 3 if plain else width, overflow="crop" if plain else "ellipsis")
        line.append("..." if plain else "")
    return line


def incident_lines(story: Story, width: int, plain: bool = False) -> list[Text]:
    """Write the head of an incident and its newest steps, each cut to ``width`` columns."""
    head = Text.assemble(
        f"{clock_time(story.opened_at)} ", (story.name, "bold"), " ", state(story), ": ",
        story.headline,
    )  # fmt: skip
    steps = (
        step_line(f"{clock_time(step.at)} {step.name} ", step)
        for step in story.steps[-SHOWN_STEPS:]
    )
    return [cut(line, width, plain) for line in (head, *steps)]


def step_line(start: str, step: StoryStep, width: int = 0) -> Text:
    """Return one step after ``start``: its outcome, at least ``width`` columns, and its text."""
    outcome = (f"{step.outcome:<{width}}", STYLE.get(step.outcome, ""))
    return Text.assemble("  ", start, outcome, "  " if step.text else "", step.text)
