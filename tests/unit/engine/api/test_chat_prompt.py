"""The assistant's turn of a prompt: begun, left out, or continued. Tests ``api/chat_prompt.py``."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plimsoll_engine.api.chat_prompt import CONTINUATION_MARK, ChatPrompt
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.protocol import ChatRequest, Message
from plimsoll_engine.api.validation import decode_body
from plimsoll_engine.frontend.requests.tokenizer import TemplateError, Tokenizer
from plimsoll_faults.models import tiny, tiny_text

USER = "<|im_start|>user\nAhoy<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"


def tokenizer(folder: Path, template: str | None = None) -> Tokenizer:
    tiny.write_checkpoint(folder)
    if template is not None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> ChatPrompt:
    return ChatPrompt(tokenizer(tmp_path_factory.mktemp("tiny")), None)


def messages(*given: tuple[str, Any]) -> list[Message]:
    return [Message(role=role, content=content) for role, content in given]


def render(prompt: ChatPrompt, *given: tuple[str, Any], **turn: Any) -> str:
    return prompt.render(messages(*given), [], {}, 10_000, **turn)


def test_the_turn_is_begun_unless_it_is_not_wanted(prompt: ChatPrompt) -> None:
    assert render(prompt, ("user", "Ahoy")) == USER + OPEN
    assert render(prompt, ("user", "Ahoy"), open_turn=True) == USER + OPEN
    assert render(prompt, ("user", "Ahoy"), open_turn=False) == USER


@pytest.mark.parametrize("text", ["Sure,", "Sure, ", "", f"a {CONTINUATION_MARK}", "<|im_end|>\n"])
def test_the_last_message_stays_open(prompt: ChatPrompt, text: str) -> None:
    given = (("user", "Ahoy"), ("assistant", text))
    assert render(prompt, *given, continue_last=True) == USER + OPEN + text
    parts = (("user", "Ahoy"), ("assistant", [{"type": "text", "text": text}]))
    assert render(prompt, *parts, continue_last=True) == USER + OPEN + text


def test_a_model_that_sees_continues_as_well(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part.text }}{% endfor %}"
        ";{% endfor %}"
    )
    seeing = ChatPrompt(tokenizer(tmp_path, template), "<image>")
    given = (("user", "Ahoy"), ("assistant", "Aye, "))
    assert render(seeing, *given, continue_last=True) == "user:Ahoy;assistant:Aye, "


def test_a_template_without_the_last_message_is_told(tmp_path: Path) -> None:
    short = ChatPrompt(tokenizer(tmp_path, "{{ messages[0].content }}"), None)
    with pytest.raises(TemplateError, match="does not render the last message"):
        render(short, ("user", "Ahoy"), ("assistant", "Aye"), continue_last=True)


@pytest.mark.parametrize(
    ("given", "effort", "found"),
    [
        (None, None, {}),
        ({"a": 1}, None, {"a": 1}),
        (None, "low", {"reasoning_effort": "low", "enable_thinking": True}),
        (None, "none", {"reasoning_effort": "none", "enable_thinking": False}),
        ({"enable_thinking": True}, "none", {"reasoning_effort": "none", "enable_thinking": True}),
    ],
)
def test_an_effort_is_a_variable_of_the_template(given: Any, effort: Any, found: Any) -> None:
    assert ChatPrompt.make_template_variables(given, effort) == found
    assert msgspec.json.encode(given or {}) == msgspec.json.encode(dict(given or {}))


FIRST_ONLY = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant', 'tool']"
    " or (m.role == 'system' and loop.first) %}[{{ m.role }}:{{ m.content }}]{% endif %}"
    "{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system comes first') }}{% endif %}[{{ m.role }}:{{ m.content }}]"
    "{% endfor %}"
)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., tuple[str, list[str]]]:
    """The prompt of messages as a template writes them, and the warnings."""
    tiny_text.write_tokenizer(tiny_text.train_tokenizer(), tmp_path)
    (tmp_path / "config.json").write_text("{}")

    def write(
        template: str, *given: dict[str, Any], image: str | None = None, tools: Any = (),
        **variables: Any,
    ) -> tuple[str, list[str]]:  # fmt: skip
        (tmp_path / "chat_template.jinja").write_text(template)
        raw = msgspec.json.encode({"messages": given, "tools": list(tools) or None})
        body = decode_body(raw, ChatRequest)
        prompt, warnings = ChatPrompt(Tokenizer(tmp_path), image), list[str]()
        text = prompt.render(body.messages, body.tools or [], variables, 10_000, warnings=warnings)
        return text, warnings

    return write


SAY = {"role": "developer", "content": "Speak French."}
USER_SAYS = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("template", [FIRST_ONLY, STRICT])
@pytest.mark.parametrize(
    ("given", "text", "warned"),
    [
        ([SAY, USER_SAYS], "[system:Speak French.][user:hi]", False),
        ([{"role": "system", "content": "Be brief."}, SAY, USER_SAYS],
         "[system:Be brief.\n\nSpeak French.][user:hi]", True),
        ([USER_SAYS, SAY], "[system:Speak French.][user:hi]", True),
    ],
)  # fmt: skip
def test_no_instruction_of_a_developer_is_lost(
    written: Any, template: str, given: list[Any], text: str, warned: bool
) -> None:
    found, warnings = written(template, *given)
    assert found == text
    assert bool(warnings) is warned


def test_a_template_that_knows_developers_gets_them(written: Any) -> None:
    template = "{% for m in messages %}{{ m.role }}{# developer #}{% endfor %}"
    assert written(template, SAY)[0] == "developer"


def test_what_the_template_leaves_out_is_told(written: Any) -> None:
    tool = {"type": "function", "function": {"name": "tide"}}
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    found, warnings = written(template, SAY | {"role": "system"}, USER_SAYS, tools=[tool])
    assert found == "hi"
    assert warnings == [
        "the chat template does not render all text of messages of role system: the "
        "model does not see it",
        "the chat template does not render tools: the model does not see them",
    ]


def test_a_result_that_the_template_leaves_out_is_told(written: Any) -> None:
    result = {"role": "tool", "content": '{"port": "\u00c5rhus"}', "tool_call_id": "c"}
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    warned = [
        "the chat template does not render all text of messages of role tool: the "
        "model does not see it"
    ]
    assert written(users, USER_SAYS, result) == ("hi", warned)
    for escaped in ("tojson", "tojson(ensure_ascii=True)", "upper | lower | trim"):
        template = "{% for m in messages %}{{ m.content | " + escaped + " }}{% endfor %}"
        assert written(template, USER_SAYS, result | {"content": '{"port": "\u00e5rhus"}'})[1] == []


def test_a_message_reaches_the_template_as_it_was_sent(written: Any) -> None:
    template = "{{ messages[0] | tojson }}"
    sent = {"role": "assistant", "content": None, "refusal": None, "weather": {"a": None}}
    assert json.loads(written(template, sent)[0]) == {"role": "assistant", "weather": {"a": None}}
    for name in ("reasoning", "reasoning_content", "thinking"):
        found = json.loads(written(template, {"role": "assistant", "content": "4", name: "Hm."})[0])
        assert found["reasoning_content"] == found[name] == "Hm."
    said = {"role": "assistant", "content": None, "refusal": "No."}
    assert json.loads(written(template, said)[0])["content"] == "No."


def test_parts_are_texts_of_lines(written: Any) -> None:
    parts = [
        {"type": "text", "text": "a"}, {"type": "input_text", "text": "b"},
        {"type": "output_text", "text": "c"}, {"type": "refusal", "refusal": "d"},
    ]  # fmt: skip
    assert (
        written("{{ messages[0].content }}", {"role": "user", "content": parts})[0] == "a\nb\nc\nd"
    )
    with pytest.raises(ApiError) as error:
        written("", USER_SAYS, {"role": "user", "content": [{"type": "input_file"}]})
    assert error.value.param == "messages[1].content[0]"


def test_thoughts_among_the_parts_are_the_reasoning_of_their_message(written: Any) -> None:
    template = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    thoughts = [
        {"type": "thinking", "thinking": "a", "signature": "s"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "b"}]},
        {"type": "text", "text": "c"},
    ]
    assert written(template, {"role": "assistant", "content": thoughts})[0] == "[a\nb|c]"
    alone = {"role": "assistant", "content": thoughts[:1], "reasoning_content": "own"}
    assert written(template, alone)[0].startswith("[own|")
    with pytest.raises(ApiError):
        written(template, {"role": "user", "content": thoughts})


@pytest.mark.parametrize("role", ["tool", "function", "assistant"])
@pytest.mark.parametrize("template", [
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}",
])  # fmt: skip
def test_a_result_may_be_null(written: Any, role: str, template: str) -> None:
    assert written(template, {"role": role, "content": None}) == (f"{role}:", [])
    with pytest.raises(ApiError, match="role user is null"):
        written(template, {"role": "user", "content": None})


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"messages": [], "add_generation_prompt": False}, "messages, add_generation_prompt"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"add_generation_prompt": True, "enable_thinking": False}, None),
    ],
)
def test_what_a_template_variable_cannot_set_is_told(
    written: Any, variables: dict[str, Any], names: str | None
) -> None:
    template = "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    text, warnings = written(template, {"role": "user", "content": "a"}, **variables)
    assert text == "a>"
    told = f"{names} in chat_template_kwargs is ignored: set it as a field of the body"
    assert warnings == ([] if names is None else [told])


def test_what_is_left_out_is_looked_for_in_linear_time(written: Any) -> None:
    users = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}" + "é\u0301" * 500
    )
    given = [{"role": f"r{n % 1000}", "content": f'{{"result {n}": "é"}}'} for n in range(4000)]
    begin = time.process_time()
    _, warnings = written(users, USER_SAYS, *given)
    assert time.process_time() - begin < 10
    assert warnings == [
        "the chat template does not render all text of messages of role"
        " r0, r1, r2, r3, r4, r5, r6, r7: the model does not see it"
    ]


PARTS_ONLY = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
USERS_PARTS = (
    "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}"
    "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
TWO_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "role", "content", "text"),
    [
        (PARTS_ONLY, "user", TWO_PARTS, "[a][b]"),
        (PARTS_ONLY, "user", "Ahoy", "[Ahoy]"),  # transformers writes nothing
        (USERS_PARTS, "user", TWO_PARTS, "[a][b]"),
        (USERS_PARTS, "user", "Ahoy", "Ahoy"),
        (USERS_PARTS, "system", TWO_PARTS, "a\nb"),
    ],
)
def test_contents_are_texts_or_parts_as_the_template_reads_them(
    written: Any, template: str, role: str, content: Any, text: str
) -> None:
    assert written(template, {"role": role, "content": content}) == (text, [])


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_refused_chat_leaves_no_cycle(tmp_path: Path, role: str) -> None:
    prompt = ChatPrompt(
        tokenizer(tmp_path, "{{ raise_exception('no ' + messages[0].role) }}"), None
    )
    gone = weakref.ref(prompt)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(TemplateError, match=f"no {role}"):
            render(prompt, (role, "hi"))
        del prompt
        assert gone() is None
    finally:
        gc.enable()


def test_a_developer_is_gathered_where_the_template_reads_parts_alone(written: Any) -> None:
    template = PARTS_ONLY.replace(
        "{% for p in", "{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('first') }}{% endif %}{% for p in",
    )  # fmt: skip
    assert written(template, USER_SAYS, SAY)[0] == "[Speak French.][hi]"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'USER: ' + messages[0]['content'] | trim }}", "USER: a\n<image>"),
        ("{% for p in messages[0].content %}<{{ p.type }}>{{ p.text }}{% endfor %}",
         "<text>a<image>"),
    ],
)  # fmt: skip
def test_images_are_written_as_the_template_reads_contents(
    written: Any, template: str, text: str
) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, image]}
    assert written(template, message, image="<image>")[0] == text


def calls(arguments: object) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
    ],
)
def test_a_call_that_was_cut_short_does_not_end_the_conversation(
    written: Any, arguments: object, found: object
) -> None:
    path = "messages[0].tool_calls[0].function.arguments"
    assert json.loads(written("{{ " + path + " | tojson }}", calls(arguments))[0]) == found
    items = "{% for k, v in " + path + " | items %}{{ k }}={{ v }}{% endfor %}"
    assert written(items, calls('{"a": '))[0] == 'arguments={"a": '


def test_a_tool_is_written_as_the_client_sent_it(written: Any) -> None:
    function = {"strict": True, "description": "d", "name": "f", "parameters": None, "returns": {}}
    tools = [{"function": function, "type": "function", "cache": 1}]
    found = written("{{ tools | tojson }}", USER_SAYS, tools=tools)[0]
    kept = '[{"function": {"description": "d", "name": "f", "returns": {}}, "type": "function"'
    assert found == kept + ', "cache": 1}]'


def test_fields_keep_their_order(written: Any) -> None:
    sent = {"tool_call_id": "c", "weather": 1, "content": "a", "role": "tool", "more": 2}
    hidden = {"\ue000extra": 2}  # a name of ours, which no template knows
    found = json.loads(written("{{ messages[0] | tojson }}", sent | hidden)[0])
    assert list(found.items()) == list(sent.items())
