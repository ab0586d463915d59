"""Bodies that are large, deep, unfinished or larger than they look."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from bench.abuse_connections import connections
from bench.abuse_scene import Answer, Class, Played, Scene, ask, at_once, request

MIB = 1 << 20
CORPUS = Path(__file__).resolve().parents[2] / "tests" / "fuzz" / "corpus"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SPECIAL = 0
"""The number of the tiny model's first special token."""
MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'


async def one_by_one(scene: Scene, path: str, bodies: list[bytes]) -> Played:
    played = Played()
    for body in bodies:
        played.saw([await ask(scene, path, body)])
    return played


def wrapped(scene: Scene, before: bytes, fill: bytes, mib: float, after: bytes) -> bytes:
    """A body of about ``mib`` MiB."""
    start = b'{"model":"' + scene.model.encode() + b'",'
    return start + before + fill * int(mib * MIB / len(fill)) + after


async def unfinished_bodies(scene: Scene) -> Played:
    """Bodies of 32 MB whose last byte never comes."""
    count, size = 30, 32 * MIB
    pieces = scene.many(31, 8)

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(request(scene, CHAT, b"{", length=size))
            for _ in range(pieces):
                writer.write(b" " * MIB)
                await writer.drain()
            await asyncio.sleep(scene.hold_s(40))
        except OSError:
            return  # refused

    async with connections(scene.port, count) as pairs:
        await asyncio.gather(
            *(asyncio.wait_for(hold(*pair), scene.hold_s(60)) for pair in pairs),
            return_exceptions=True,
        )
    return Played(attempts=count)


async def empty_prompts(scene: Scene) -> Played:
    mib = 30 if scene.scale == 1 else 8
    body = wrapped(scene, b'"prompt":[', b"[],", mib, b"[]]}")
    return await one_by_one(scene, COMPLETIONS, [body] * scene.many(3, 1))


async def template_arguments(scene: Scene) -> Played:
    mib = 23 if scene.scale == 1 else 8
    kwargs = wrapped(
        scene, MESSAGES + b',"chat_template_kwargs":{"a":[', b'{"b":[1]},', mib, b"1]}}"
    )
    return await one_by_one(scene, CHAT, [kwargs] * scene.many(3, 1))


async def tool_schemas(scene: Scene) -> Played:
    mib = 23 if scene.scale == 1 else 8
    tools = wrapped(
        scene,
        MESSAGES + b',"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[',
        b'{"b":[1]},', mib, b"1]}}}]}",
    )  # fmt: skip
    return await one_by_one(scene, CHAT, [tools] * scene.many(3, 1))


async def long_texts(scene: Scene) -> Played:
    bodies = [
        wrapped(scene, b'"prompt":"', fill, mib, b'"}')
        for fill in (b"a", b"tide ", "é".encode(), b"\\u00e9")
        for mib in (0.02, 0.5, 8)
    ]
    return await one_by_one(scene, COMPLETIONS, bodies[: scene.many(len(bodies), 6)])


async def tokens_to_text(scene: Scene) -> Played:
    mib = 30 if scene.scale == 1 else 8
    bodies = [wrapped(scene, b'"tokens":[', b"1,", mib, b"1]}")] * scene.many(3, 1)
    return await one_by_one(scene, "/detokenize", bodies)


async def deep_bodies(scene: Scene) -> Played:
    bodies = [
        wrapped(scene, b'"messages":', opened, mib, b"")
        for opened in (b"[", b'{"a":')
        for mib in (0.01, 1, 8)
    ]
    return await one_by_one(scene, CHAT, bodies)


async def decompression_bombs(scene: Scene) -> Played:
    """Images that are small as files, and a compressed body."""
    played = Played()
    for width, height in ((30_000, 30_000), (6_300, 6_300), (65_000, 100)):
        url = "data:image/png;base64," + base64.b64encode(png(width, height)).decode()
        part = {"type": "image_url", "image_url": {"url": url}}
        body = {"model": scene.model, "messages": [{"role": "user", "content": [part]}]}
        count = scene.many(8, 2)
        played.saw(await at_once(ask(scene, CHAT, {**body, "max_tokens": 1}) for _ in range(count)))
    played.saw([await ask(scene, CHAT, zlib.compress(b" " * (64 * MIB)))])
    return played


def png(width: int, height: int) -> bytes:
    """A black image of one bit a pixel, made row by row."""
    packer, row = zlib.compressobj(), b"\0" * (1 + -(-width // 8))
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


async def conversations(scene: Scene) -> Played:
    """Messages of every form that is rewritten, looked for in the prompt, or told in a header."""

    def one(number: int) -> dict[str, Any]:
        parts = [{"type": "text", "text": f"{number}"}] * 8
        forms: list[dict[str, Any]] = [
            {"role": "developer", "content": "Speak French."},
            {"role": f"role-{number}", "content": parts},
            {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [
                {"id": "c", "function": {"name": "f", "arguments": '{"a": "x\ny'}}]},
            {"role": "tool", "tool_call_id": "c", "content": '{"é": "' + "\\" * 40 + '"}'},
        ]  # fmt: skip
        return forms[number % len(forms)]

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    bodies = [
        (path, {"model": scene.model, "max_tokens": 1, "tools": [tool], "messages": [
            one(number) for number in range(count)]})
        for path in (CHAT, "/tokenize")
        for count in (24, 400, 4_000)
    ]  # fmt: skip
    played = Played()
    for _ in range(scene.many(8, 1)):
        played.saw(await at_once(ask(scene, path, body) for path, body in bodies))
    return played


async def forced_calls(scene: Scene) -> Played:
    """Tools that must be called, with schemas that are wide, deep, or refer to themselves."""
    wide = {f"p{number}": {"type": "string"} for number in range(400)}
    deep: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#"}}}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    patterns = {f"p{n}": {"type": "string", "pattern": "(a|b|ab)*" * 20} for n in range(20)}
    schemas = ({"type": "object", "properties": wide}, deep,
               {"type": "object", "properties": patterns}, {"type": "object"})  # fmt: skip
    played = Played()
    for tools in (1, 128):
        for schema in schemas:
            listed = [
                {"type": "function", "function": {"name": f"f{n}", "parameters": schema}}
                for n in range(tools)
            ]
            body = {
                "model": scene.model, "messages": [{"role": "user", "content": "a"}],
                "tools": listed, "tool_choice": "required", "max_tokens": 32,
            }  # fmt: skip
            count = scene.many(8, 1)
            played.saw(await at_once(ask(scene, CHAT, body) for _ in range(count)))
    return played


async def large_answers(scene: Scene) -> Played:
    """As many log probabilities as the context allows, in one piece."""
    played = Played()
    body = {
        "model": scene.model,
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": scene.many(1_900, 100),
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
    }
    played.saw(await at_once(ask(scene, CHAT, body) for _ in range(4)))
    return played


async def tokens_without_text(scene: Scene) -> Played:
    """Answers of special tokens alone, which show nothing of them and get longer and longer."""
    body = {
        "model": scene.model, "prompt": "a", "max_tokens": scene.many(1_900, 100),
        "allowed_token_ids": [SPECIAL], "ignore_eos": True, "stream": True,
    }  # fmt: skip
    played = Played()
    played.saw(await at_once(ask(scene, COMPLETIONS, body) for _ in range(scene.many(32, 4))))
    return played


async def choices_of_a_long_prompt(scene: Scene) -> Played:
    """The most choices, each of which the engine admits with the whole prompt."""
    prompt = [7 + number % 400 for number in range(1_900)]
    body = {"model": scene.model, "prompt": prompt, "n": 128, "max_tokens": 1, "temperature": 1}
    # One by one: two of them fill the queue, which refuses others, too.
    return await one_by_one(scene, COMPLETIONS, [json.dumps(body).encode()] * scene.many(10, 1))


async def garbage(scene: Scene) -> Played:
    """The inputs of the fuzzers, over HTTP."""
    paths = {"chat": CHAT, "chat-images": CHAT, "completions": COMPLETIONS,
             "tokenize": "/tokenize", "detokenize": "/detokenize"}  # fmt: skip
    played = Played()
    for name, path in paths.items():
        files = sorted((CORPUS / name).glob("*"))
        bodies = [file.read_bytes() for file in files[: scene.many(len(files), 12)]]
        wide = [body for body in bodies if b'"stream":true' not in body]
        answers: list[Answer] = await at_once(ask(scene, path, body) for body in wide)
        played.saw(answers)
    return played


CLASSES: dict[str, Class] = {
    one.__name__: one
    for one in (
        unfinished_bodies, empty_prompts, template_arguments, tool_schemas, long_texts,
        tokens_to_text, deep_bodies, decompression_bombs, conversations, forced_calls,
        large_answers, tokens_without_text, choices_of_a_long_prompt, garbage,
    )
}  # fmt: skip
