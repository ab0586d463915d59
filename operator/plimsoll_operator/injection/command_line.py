"""Parse a container's command line into simple commands, including those in its shell scripts.

Scripts are untrusted, so the parser reads each once, up to a maximum length. It evaluates no
conditions, and returns every command that may run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


def split_words(text: str) -> frozenset[str]:
    """Split ``text`` at each ``|``."""
    return frozenset(text.split("|"))


MAX_COMMAND_CHARS = 1 << 16
"""Maximum length of a container's command and arguments; the rest is ignored."""
MAX_COMMANDS = 2048
"""Maximum number of commands in a script; the rest is ignored."""
MAX_SHELL_DEPTH = 4
TOKEN_PATTERN = re.compile(
    r"""(?P<space>[ \t\r\f\v]++) | (?P<line>\n) | (?P<plain>[^\s'"\\;&|<>()#`$0-9]++)
    | (?P<redirect>[0-9]*+(?:<<<|<<-?|>>|>\||[<>]&|[<>]|&>>?)) | (?P<digits>[0-9]++)
    | (?P<operator>&&|\|\||\|&|[|;&()]) | (?P<number>\#)
    | '(?P<single>[^']*+)' | "(?P<double>(?:[^"\\]++|\\.)*+)"
    | \\(?P<escaped>.) | (?P<command>\$\(|`) | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
"""Pattern for separators and parts of words in a shell script; it matches in linear time."""
ESCAPED_PATTERN = re.compile(r"\\([\\\"$`\n])")
ASSIGNMENT_PATTERN = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
SHELL_PROGRAMS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})
SHELL_KEYWORDS = frozenset(
    {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "}", "(", ")"}
)
WRAPPER_PROGRAMS = split_words(
    "exec|nohup|time|command|builtin|stdbuf|setsid|tini|dumb-init|catatonit|nice|ionice|"
    "timeout|env|sudo|numactl|taskset|chrt|gosu|su-exec|setpriv|uv|uvx|poetry|pipenv|conda|"
    "micromamba|nsys|xvfb-run|ddtrace-run|opentelemetry-instrument|mpirun|docker-|"
    "entrypoint.sh|entrypoint.sh|nvidia_entrypoint.sh"
)
"""Programs that run the program in their arguments."""
PROGRAM_PATTERN = re.compile(r"(vllm|sglang|ray|python[0-9.]*|(ba|da|a|z|k)?sh)")


@dataclass
class CommandLine:
    """Commands that a container may run in order, and the variables that its scripts set.

    ``is_script`` is True if a shell runs the commands.
    """

    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    is_script: bool = False


def count_command_chars(container: Object) -> int:
    """Return the total length of a container's command and arguments in characters."""
    return sum(map(len, _iterate_words(container)))


def parse_container(container: Object, scripts: Mapping[str, str] | None = None) -> CommandLine:
    """Parse a container's command and arguments.

    ``scripts`` maps the paths of files in the container to their texts. Words and files beyond
    :data:`MAX_COMMAND_CHARS` are ignored.
    """
    words: list[str] = []
    remaining_chars = MAX_COMMAND_CHARS
    for word in _iterate_words(container):
        remaining_chars -= len(word)
        if remaining_chars < 0:
            break
        words.append(word)
    if not container.get("command") and len(words) == 1 and not words[0].startswith("/"):
        words = words[0].split() if "'" in words[0] else _split_argument(words[0])
    if not container.get("command") and words[:1] == ["-c"]:
        words = ["sh", *words]  # the image's entrypoint is a shell
    line = CommandLine()
    _add_command(words, line, dict(scripts or {}), 0)
    return line


def _iterate_words(container: Object) -> Iterator[str]:
    for part in (*(container.get("command") or ()), *(container.get("args") or ())):
        yield str(part)


# Some charts pass a whole command as one argument. An argument with several commands stays one
# word.
def _split_argument(text: str) -> list[str]:
    commands = list(split_commands(text))
    return commands[0] if len(commands) == 1 else [text]


def _add_command(
    words: Sequence[str], line: CommandLine, scripts: dict[str, str], depth: int
) -> None:
    run = _strip_wrappers(words, line)
    if not run:
        return
    script = (
        (_find_inline_script(run) or _pop_mounted_script(run, scripts))
        if depth < MAX_SHELL_DEPTH
        else None
    )
    if script is None:
        line.commands.append(run)
        return
    line.is_script = True
    for command in split_commands(script[0]):
        if "$@" in command:
            at = command.index("$@")
            command[at : at + 1] = script[2:]
        _add_command(command, line, scripts, depth + 1)


def _strip_wrappers(words: Sequence[str], line: CommandLine) -> list[str]:
    """Return a command without shell keywords and wrappers; move its variables to ``line``."""
    rest = list(words)
    while rest:
        if rest[0] in SHELL_KEYWORDS:
            rest = rest[1:]
        elif (match := ASSIGNMENT_PATTERN.fullmatch(rest[0])) is not None:
            line.variables[match[1]] = match[2]
            rest = rest[1:]
        elif rest[0] in ("export", "declare", "local", "readonly"):
            rest = [word for word in rest[1:] if ASSIGNMENT_PATTERN.fullmatch(word)]
        elif get_program_name(rest[0]) in WRAPPER_PROGRAMS and (
            inner := _find_wrapped_command(rest[1:])
        ):
            rest = inner
        else:
            break
    return rest


def _find_wrapped_command(words: Sequence[str]) -> list[str]:
    for at, word in enumerate(words):
        if PROGRAM_PATTERN.fullmatch(get_program_name(word)) or (
            at == 0 and ASSIGNMENT_PATTERN.fullmatch(word)
        ):
            return list(words[at:])
    rest = [at for at, word in enumerate(words) if not word.startswith("-") and not word.isdigit()]
    return list(words[rest[0] :]) if rest else []


def get_program_name(word: str) -> str:
    """Return the last component of a program's path."""
    return word.rpartition("/")[2]


def _find_inline_script(words: Sequence[str]) -> list[str] | None:
    """Return a shell command's script, its name and its arguments after ``-c``, or None."""
    if get_program_name(words[0]) not in SHELL_PROGRAMS:
        return None
    at = 1
    if get_program_name(words[0]) == "busybox":
        at += 1
    while at < len(words) and words[at].startswith(("-", "+")):
        if re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", words[at]):
            rest = list(words[at + 1 :])
            while rest and re.fullmatch(r"--|[-+][a-z]+", rest[0]):
                rest = rest[1:]
            return rest or None
        at += 2 if words[at].endswith(("o", "O")) and words[at] != "--" else 1
    return None


SHEBANG_PATTERN = re.compile(r"#![^\n]*\b(ba|da|a|z|k)?sh\b")


def _pop_mounted_script(words: Sequence[str], scripts: dict[str, str]) -> list[str] | None:
    """Return the text, path and arguments of the mounted script that a command runs, or None.

    Remove it from ``scripts``, so that a script that runs itself is parsed only once.
    """
    at = 0
    if get_program_name(words[0]) in SHELL_PROGRAMS:
        at = next((at for at, one in enumerate(words) if at and one[:1] not in ("-", "+")), 0)
    text = scripts.pop(words[at], "")
    if (
        not text
        or len(text) > MAX_COMMAND_CHARS
        or (text[:2] == "#!" and not SHEBANG_PATTERN.match(text))
    ):
        return None
    return [text, *words[at:]]


def split_commands(script: str) -> Iterator[list[str]]:
    """Yield each simple command of a shell script as a list of words.

    A script with an unterminated quote is a single command, split at whitespace.
    """
    commands: list[list[str]] = []
    words: list[str] = []
    word: list[str] | None = None
    skip, substitutes = False, True
    ends: list[str] = []
    at = 0

    def end_word() -> None:
        nonlocal word, skip
        if word is not None and not skip:
            words.append("".join(word))
        elif word is not None and ends and ends[-1] == "":
            ends[-1] = "".join(word)
        skip = skip and word is None
        word = None

    def end_command() -> None:
        nonlocal words, skip
        end_word()
        if words:
            commands.append(words)
        words, skip = [], False

    while at < len(script) and len(commands) < MAX_COMMANDS:
        found = TOKEN_PATTERN.match(script, at)
        if found is None or found["other"] in ("'", '"', "\\"):
            yield script.split()
            return
        at = found.end()
        kind, part = found.lastgroup or "", found[found.lastgroup or 0]
        if kind == "space":
            end_word()
        elif kind in ("line", "operator"):
            end_command()
            for end in ends if kind == "line" else ():
                document = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(script, at)
                at = document.end() if document is not None else len(script)
            ends = [] if kind == "line" else ends
        elif kind == "redirect":
            end_word()
            skip = True
            if part.endswith(("<<", "<<-")) and not part.endswith("<<<"):
                ends.append("")
        elif kind == "number" and word is None:
            line = script.find("\n", at)
            at = line if line >= 0 else len(script)
        elif kind == "escaped" and part == "\n":
            pass
        else:
            word = [] if word is None else word
            if kind == "command" and substitutes:
                close = _find_substitution_end(script, at, part)
                substitutes = close is not None
                part, at = script[at - len(part) : close or at], close or at
            word.append(ESCAPED_PATTERN.sub(r"\1", part) if kind == "double" else part)
    end_command()
    yield from commands


def _find_substitution_end(script: str, start: int, opening: str) -> int | None:
    """Return the index after a substitution whose content begins at ``start``, or None."""
    if opening == "`":
        found = script.find("`", start)
        return found + 1 if found >= 0 else None
    depth = 1
    for bracket in re.compile(r"[()]").finditer(script, start):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return bracket.end()
    return None


VARIABLE_REFERENCE_PATTERN = re.compile(
    r"\$\((?P<field>[A-Za-z_][A-Za-z0-9_]*)\)|\$\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)"
    r"(?::?-(?P<default>[^{}]*))?\}|\$(?P<bare>[A-Za-z_][A-Za-z0-9_]*)"
)
MAX_EXPANDED_CHARS = 4096


def expand_variables(word: str, variables: Mapping[str, str | None]) -> str:
    """Replace the known variables in ``word``: ``$(NAME)``, ``$NAME`` and ``${NAME:-default}``."""
    for _ in range(MAX_SHELL_DEPTH):
        expanded = VARIABLE_REFERENCE_PATTERN.sub(lambda found: _get_value(found, variables), word)
        if expanded == word or len(expanded) > MAX_EXPANDED_CHARS:
            break
        word = expanded
    return word


def _get_value(match: re.Match[str], variables: Mapping[str, str | None]) -> str:
    name = match["field"] or match["braced"] or match["bare"]
    value = variables.get(name)
    if value is None and name not in variables and match["default"] is not None:
        return match["default"]
    return match[0] if value is None else value
