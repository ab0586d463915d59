"""Output that must match a grammar: every text does, and a bad grammar harms nobody.

Tests ``core/grammar/grammars.py``.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from plimsoll_engine.api import tool_families
from plimsoll_engine.api.output_grammar import build_grammar
from plimsoll_engine.api.protocol import ChatRequest
from plimsoll_engine.api.validation import decode_body
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.grammar.grammars import MIN_COMPILED_BYTES, GrammarCompiler, Vocabulary
from plimsoll_engine.frontend.requests import tokenizer as frontend
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages.worker_ipc import Grammar, RequestFailure, Token
from plimsoll_faults.models import tiny_text

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"port": {"enum": ["Hull", "Leith"]}, "draught": {"type": "integer"}},
        "required": ["port", "draught"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def vocabulary(tiny_checkpoint: Path) -> Vocabulary:
    found = Vocabulary.load(tiny_checkpoint)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))


@pytest.fixture
def engine(make_engine: Any, vocabulary: Vocabulary) -> EngineCore:
    made: EngineCore = make_engine(num_blocks=48, grammars=GrammarCompiler(vocabulary))
    return made


def run(engine: EngineCore) -> tuple[dict[str, list[Token]], list[RequestFailure]]:
    tokens: dict[str, list[Token]] = {}
    dropped: list[RequestFailure] = []
    deadline = time.monotonic() + 120
    while engine.has_work:
        assert time.monotonic() < deadline, "hangs"
        output = engine.step()
        if not output.tokens:
            time.sleep(0.001)  # for the thread that compiles
        dropped += output.dropped
        for token in output.tokens:
            tokens.setdefault(token.request_id, []).append(token)
    assert run_audit(engine, Ledger())[2] == []
    return tokens, dropped


def ids(tokens: list[Token]) -> list[int]:
    return [token.token_id for token in tokens]


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[0-9]{3}-[a-f]{2}"), "[0-9]{3}-[a-f]{2}"),
        (Grammar("lark", 'start: "north" | "south-west"'), "north|south-west"),
        (Grammar("json_schema", SCHEMA), r"\s*\{.*\}\s*"),
        (Grammar("json_schema", '{"type": "boolean"}'), "true|false"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_the_text_matches(
    grammar: Grammar, pattern: str, temperature: float, engine: EngineCore, helpers: Any,
    tokenizer: Tokenizer,
) -> None:  # fmt: skip
    for seed in range(3):
        # A bias against line breaks and blanks: JSON allows any number of them.
        engine.submit(
            helpers.submit(
                str(seed), [5 + seed] * 9, 200, temperature=temperature, seed=seed, grammar=grammar,
                logit_bias={tokenizer.token_to_id(c): -100.0 for c in ("Ġ", "Ċ", "č", "ĉ")},
                stop_token_ids=[0, 2],
            )
        )  # fmt: skip
    tokens, dropped = run(engine)
    assert dropped == []
    for found in tokens.values():
        text = tokenizer.decode(ids(found))
        assert found[-1].finish_reason in ("stop", "length")
        if found[-1].finish_reason == "stop":
            assert re.fullmatch(pattern, text), text
            if grammar.kind == "json_schema":
                json.loads(text)
        else:  # an integer may have any number of digits
            assert grammar.text == SCHEMA
            assert re.match(r'\s*\{\s*"port"\s*:\s*"(Hull|Leith)"', text)


TAG, END_TAG, SPECIAL_TAG = "<tool_call>", "</tool_call>", "<|tool|>"


@pytest.fixture(scope="module")
def with_added_tokens(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("added")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint / name, folder)
    tiny_text.add_tokens(folder, [TAG, END_TAG, SPECIAL_TAG], special=[SPECIAL_TAG])
    return folder


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar("lark", f'start: "a{TAG} <|im_end|>{SPECIAL_TAG}"'),
         f"a{TAG} <|im_end|>{SPECIAL_TAG}"),
        (Grammar("regex", f"a{TAG} <[|]im_end[|]>"), f"a{TAG} <|im_end|>"),
        (Grammar("json_schema", f'{{"const": "{TAG}<|endoftext|>"}}'), f'"{TAG}<|endoftext|>"'),
        (Grammar("lark", f'start: <[511]> "{END_TAG}" <|im_end|> "x" {SPECIAL_TAG} "<|im_end|>"'),
         f"{TAG}{END_TAG}<|im_end|>x{SPECIAL_TAG}<|im_end|>"),
    ],
)  # fmt: skip
def test_a_text_may_hold_the_names_of_added_tokens(
    with_added_tokens: Path, grammar: Grammar, text: str
) -> None:
    """Only where the grammar names the token is it the token; in a text it is spelled."""
    vocabulary = Vocabulary.load(with_added_tokens)
    assert vocabulary is not None
    tokenizer = Tokenizer.from_file(str(with_added_tokens / "tokenizer.json"))
    matcher = vocabulary.compile(grammar)
    found: list[int] = []
    while not matcher.is_stopped() and len(found) < 60:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        found.append(mask.bit_length() - 1)
        assert matcher.consume_token(found[-1]), matcher.get_error()
    assert not matcher.is_error()
    assert tokenizer.decode(found, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_object"),
        Grammar("json_schema", '{"type": "object"}'),
        Grammar("lark", 'start: "a" json\njson: %json {"type": "object"}'),
        Grammar("lark", 'start: "a" json\njson: %json { }'),
    ],
)
def test_white_space_in_json_is_bounded(vocabulary: Vocabulary, grammar: Grammar) -> None:
    matcher = vocabulary.compile(grammar)
    begin = "a{" if grammar.kind == "lark" else "{"
    taken = matcher.try_consume_tokens(vocabulary.tokenizer.tokenize_str(begin + "\n" * 99))
    assert len(begin) < taken < len(begin) + 25


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("text", ["", "(?:)"])
def test_a_grammar_of_the_empty_text_ends_at_once(
    text: str, ignore_eos: bool, engine: EngineCore, helpers: Any
) -> None:
    for grammar in (Grammar("regex", text), Grammar("lark", 'start: ""')):
        engine.submit(
            helpers.submit("r", [5] * 9, 9, grammar=grammar, stop_token_ids=[0, 2],
                           ignore_eos=ignore_eos)
        )  # fmt: skip
        tokens, dropped = run(engine)
        assert dropped == []
        assert [token.finish_reason for token in tokens["r"]] == ["stop"]
        assert tokens["r"][0].token_id in (0, 2)


def test_a_request_carried_after_its_last_token_ends(
    make_engine: Any, vocabulary: Vocabulary, helpers: Any, tokenizer: Tokenizer
) -> None:
    """The worker had made the token and died before it could say that the text is complete."""
    output = tokenizer.encode("north").ids
    engine = make_engine(grammars=GrammarCompiler(vocabulary))
    grammar = Grammar("regex", "north")
    engine.submit(
        helpers.submit("r", [9], 9 + len(output), output_ids=output, grammar=grammar,
                       stop_token_ids=[0, 2])
    )  # fmt: skip
    tokens, dropped = run(engine)
    assert dropped == []
    assert [token.finish_reason for token in tokens["r"]] == ["stop"]


def test_a_vocabulary_with_gaps_matches_like_any_other(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_checkpoint / name).read_bytes())
    content = json.loads((tiny_checkpoint / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    last = max(words, key=words.__getitem__)
    words[last] += 40
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": words[last] + 1}))
    vocabulary = Vocabulary.load(tmp_path)
    assert vocabulary is not None
    text = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode([words[last]])
    compiled = vocabulary.compile(Grammar("regex", re.escape(text)))
    mask = compiled.compute_bitmask()
    assert mask[words[last] // 8] >> words[last] % 8 & 1
    assert compiled.consume_token(words[last])


def test_an_added_token_may_be_what_a_merge_makes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """As in Gemma's tokenizer.json: its grammars were all refused."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_checkpoint / name).read_bytes())
    content = json.loads((tiny_checkpoint / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    made = max(("".join(merge) for merge in content["model"]["merges"]), key=vocabulary.__getitem__)
    content["added_tokens"].append(
        {"id": vocabulary[made], "content": made, "special": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = Vocabulary.load(tmp_path)
    assert found is not None
    matcher = found.compile(Grammar("json_schema", SCHEMA))
    text = '{"port": "Hull", "draught": 7}'
    ids = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json")).encode(text).ids
    assert all(matcher.consume_token(number) for number in ids)


def test_a_carried_request_goes_on_inside_its_grammar(
    make_engine: Any, vocabulary: Vocabulary, helpers: Any
) -> None:
    grammar = Grammar("regex", "([a-z]{4} ){6}[a-z]{4}")
    how = {"temperature": 1.5, "seed": 9, "grammar": grammar}
    whole_engine = make_engine(grammars=GrammarCompiler(vocabulary))
    whole_engine.submit(helpers.submit("r", [9] * 20, 99, **how))
    whole = ids(run(whole_engine)[0]["r"])
    for cut in (1, len(whole) // 2, len(whole) - 1):
        successor = make_engine(grammars=GrammarCompiler(vocabulary), budget=9)
        successor.submit(helpers.submit("r", [9] * 20, 99, output_ids=whole[:cut], **how))
        assert ids(run(successor)[0]["r"]) == whole[cut:]


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "[a-z", "structured_outputs.regex"), "unclosed character class"),
        (Grammar("lark", "start: nothing", "tools"), "unknown name"),
        (Grammar("json_schema", '{"type": "objct"}', "response_format"), "Invalid type: objct"),
        (Grammar("json_schema", "[", "structured_outputs.json"), "structured_outputs.json"),
        (Grammar("regex", r"[^\s\S]", "structured_outputs.regex"), "found no text that matches"),
        (Grammar("json_schema", '{"oneOf": [{"const": 1}, {"const": 2}]}', "response_format"),
         "Use anyOf"),
        (Grammar("regex", "(a{1000}){1000}b{9999}", "structured_outputs.regex"), "regex"),
    ],
)  # fmt: skip
def test_a_bad_grammar_is_refused_by_its_field(
    grammar: Grammar, message: str, engine: EngineCore, helpers: Any
) -> None:
    engine.submit(helpers.submit("good", [5] * 9, 20))
    engine.submit(helpers.submit("bad", [6] * 9, 20, grammar=grammar))
    tokens, dropped = run(engine)
    assert len(tokens["good"]) == 20
    assert [(d.request_id, d.reason, d.param) for d in dropped] == [
        ("bad", "invalid", grammar.field)
    ]
    assert message in dropped[0].message
    assert len(dropped[0].message) < 2_000


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "object", "properties": {"a": {}}, "required": "a"},
         "Expected array for 'required', got \"a\""),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
         "regex parse error:\n    (\n    ^\nerror: unclosed group"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}, "required": ["a"]},
         "Invalid type: strin"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}},
         "Pointer '/$defs/b' does not exist"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", tool_families.FAMILY_NAMES)
def test_a_bad_schema_of_a_forced_tool_is_refused_by_the_tool(
    family: str, schema: Any, fault: str, engine: EngineCore, helpers: Any, tiny_checkpoint: Path
) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in (("f", {"type": "object"}), ("g", schema))
    ]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    request = decode_body(json.dumps(body | {"tool_choice": "required"}).encode(), ChatRequest)
    grammar = build_grammar(request, frontend.Tokenizer(tiny_checkpoint), family)
    engine.submit(helpers.submit("bad", [6] * 9, 20, grammar=grammar))
    (failure,) = run(engine)[1]
    assert failure.param == "tools[1].function.parameters"
    assert failure.message == f"{failure.param}: {fault}"


def chain(rules: int, rule: str, last: str) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = ["".join(name) for name in itertools.product(letters, repeat=3)][: rules + 1]
    if rule == "lark":
        lines = [f"{a}:{b}" for a, b in itertools.pairwise(names)]
        return "\n".join(["start: aaa", *lines, f"{names[-1]}: {last}"])
    defs = {a: {"items": {"$ref": f"#/$defs/{b}"}} for a, b in itertools.pairwise(names)}
    return json.dumps({"$ref": "#/$defs/aaa", "$defs": defs | {names[-1]: {"type": last}}})


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("lark", chain(8_000, "lark", '"z"')),
        Grammar("json_schema", chain(1_500, "json", "null")),
    ],
)
def test_a_deep_grammar_does_not_overflow_the_stack(
    grammar: Grammar, engine: EngineCore, helpers: Any
) -> None:
    engine.submit(helpers.submit("deep", [5] * 9, 3, grammar=grammar))
    tokens, dropped = run(engine)
    assert dropped == []
    assert tokens["deep"]


def test_without_a_vocabulary_grammars_alone_are_refused(make_engine: Any, helpers: Any) -> None:
    engine = make_engine()
    engine.submit(helpers.submit("r", [5] * 9, 20, grammar=Grammar("regex", "a")))
    (dropped,) = run(engine)[1]
    assert dropped.reason == "invalid"
    assert "llguidance" in dropped.message


def test_an_abort_before_the_grammar_is_compiled_leaves_nothing(
    engine: EngineCore, helpers: Any
) -> None:
    for number in range(8):
        grammar = Grammar("regex", f"[a-z]{{{number + 1},400}}")
        engine.submit(helpers.submit(str(number), [5] * 9, 20, grammar=grammar))
        assert engine.abort(str(number))
    assert not engine.has_work
    assert len(engine.grammars) == 0
    assert run_audit(engine, Ledger())[2] == []


def test_the_cache_is_bounded_and_shared(vocabulary: Vocabulary) -> None:
    grammars = GrammarCompiler(vocabulary, cache_bytes=4 * MIN_COMPILED_BYTES)
    for number in range(9):
        for copy in range(2):
            grammars.start_compilation(f"{number}-{copy}", Grammar("regex", f"a{{{number}}}b"), [])
    seen: dict[str, Any] = {}
    while len(grammars):
        seen |= dict(grammars.collect_finished(5.0))
        assert grammars.bytes <= grammars.bytes_bound
    assert len(seen) == 18
    assert len(grammars._cache) == 3
    own = seen["8-0"].mask
    seen["8-1"].consume_token(next(t for t in range(512) if own[t // 8] >> t % 8 & 1))
    assert seen["8-0"].mask == own
    assert grammars.flush() > 0
    assert grammars.bytes == vocabulary.bytes
    grammars.close()
    grammars.close()
    assert grammars.bytes == 0


def test_a_tokenizer_that_cannot_be_read_gives_no_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert Vocabulary.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert Vocabulary.load(tmp_path) is None
