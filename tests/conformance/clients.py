"""Published clients of OpenAI's API ask a server, each in an environment of its own.

    python tests/conformance/clients.py LIBRARY URL MODEL CASE    # run by the library's Python

A case that passes prints what it saw. Any model can answer: calls are forced, and so is the form of
objects. A library has the cases that it can do.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

KEY = "none"
QUESTION = "Name a harbour."
PORTS = ("Hull", "Leith", "Bergen")
TURNS = 5
SHORT = 12
"""Tokens of an answer."""
LONG = 6000
"""Tokens of an answer that is cancelled: minutes of work."""
TAKEN = 3
"""Pieces of it that the client reads."""
TIMEOUT_S = 120


class Ship(BaseModel):
    """What a structured answer holds. With other properties, a small model would never end."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Ariel", "Thermopylae"]
    depth: int = Field(ge=0, le=9)
    laden: bool


class Asked(BaseModel):
    """The argument of :func:`tide`."""

    model_config = ConfigDict(extra="forbid")
    port: Literal["Hull", "Leith", "Bergen"]


def tide(port: Literal["Hull", "Leith", "Bergen"]) -> str:
    """Tell the depth of the water at a port, in metres."""
    return f"{4 + PORTS.index(port)} m"


TOOL: dict[str, Any] = {
    "name": "tide",
    "description": tide.__doc__,
    "parameters": {
        "type": "object",
        "properties": {"port": {"type": "string", "enum": list(PORTS)}},
        "required": ["port"],
        "additionalProperties": False,
    },
}


def same(whole: str | None, pieces: Iterable[str | None]) -> str:
    """Say how many pieces came; they must be the text that the same question got in one piece."""
    found = [piece for piece in pieces if piece]
    assert whole, "no text"
    assert "".join(found) == whole, (whole, found)
    assert len(found) > 1
    return f"{len(found)} pieces"


def called(count: int, last: Any) -> str:
    """Say how many calls there were. A text follows them, which a small model may leave empty."""
    assert count == TURNS, count
    assert last is None or isinstance(last, str), last
    return f"{count} calls"


class Client:
    """A library and the server that it asks. Each of its public methods is a case."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = f"{url}/v1", model
        self._loop = asyncio.new_event_loop()

    def wait(self, task: Coroutine[Any, Any, Any]) -> Any:
        """Return what the task does, in the one loop of all: connections are kept from the last."""
        return self._loop.run_until_complete(task)


class OpenAI(Client):
    """OpenAI's own library."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url, model)
        import openai

        self.client: Any = openai.OpenAI(
            base_url=self.url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S
        )

    def _ask(self, **more: Any) -> Any:
        fields = {"model": self.model, "temperature": 0, "max_completion_tokens": SHORT}
        messages = [{"role": "user", "content": QUESTION}]
        return self.client.chat.completions.create(**{"messages": messages, **fields, **more})

    def chat(self) -> str:
        answer = self._ask(store=False, user="one", metadata={"a": "b"}, seed=1)
        assert answer.choices[0].message.content
        assert answer.usage.total_tokens == (
            answer.usage.prompt_tokens + answer.usage.completion_tokens
        )
        return f"{answer.usage.completion_tokens} tokens"

    def stream(self) -> str:
        whole = self._ask()
        chunks = list(self._ask(stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].usage == whole.usage
        ends = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert [end for end in ends if end] == [whole.choices[0].finish_reason]
        pieces = [c.choices[0].delta.content for c in chunks if c.choices]
        with self.client.chat.completions.stream(
            model=self.model, messages=[{"role": "user", "content": QUESTION}],
            temperature=0, max_completion_tokens=SHORT,
        ) as stream:  # fmt: skip
            for _ in stream:
                pass
            # Of a cut text, the library's last word would be an exception.
            snapshot = stream.current_completion_snapshot.choices[0].message.content
            assert snapshot == "".join(piece for piece in pieces if piece)
        return same(whole.choices[0].message.content, pieces)

    def tools(self) -> str:
        for streams in (False, True):
            messages: list[Any] = [{"role": "user", "content": "Which port is deepest?"}]
            tools = [{"type": "function", "function": TOOL | {"strict": True}}]
            count = 0
            for _ in range(TURNS):
                asked = {"model": self.model, "messages": messages, "tools": tools,
                         "tool_choice": "required", "parallel_tool_calls": False}  # fmt: skip
                if streams:
                    with self.client.chat.completions.stream(**asked) as stream:
                        for _event in stream:
                            pass
                        answer = stream.get_final_completion()
                else:
                    answer = self.client.chat.completions.create(**asked)
                choice = answer.choices[0]
                assert choice.finish_reason in ("tool_calls", "stop"), choice
                (call,) = choice.message.tool_calls
                messages.append(choice.message)
                result = tide(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                count += 1
            answer = self._ask(messages=messages, tools=tools, tool_choice="none")
            told = called(count, answer.choices[0].message.content)
        return f"{told}, streamed and whole"

    def parse(self) -> str:
        answer = self.client.chat.completions.parse(
            model=self.model, messages=[{"role": "user", "content": "Describe a ship."}],
            response_format=Ship,
        )  # fmt: skip
        assert isinstance(answer.choices[0].message.parsed, Ship)
        return str(answer.choices[0].message.parsed)

    def responses(self) -> str:
        asked = {
            "model": self.model,
            "input": QUESTION,
            "temperature": 0,
            "max_output_tokens": SHORT,
        }
        whole = self.client.responses.create(**asked, store=False)
        events = list(self.client.responses.create(**asked, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].response.output_text == whole.output_text
        same(whole.output_text, [e.delta for e in events if e.type == "response.output_text.delta"])
        items: list[Any] = [{"role": "user", "content": "Which port is deepest?"}]
        tools = [{"type": "function", "strict": True, **TOOL}]
        for _ in range(TURNS):
            answer = self.client.responses.create(
                model=self.model, input=items, tools=tools, tool_choice="required",
                parallel_tool_calls=False, include=["reasoning.encrypted_content"],
            )  # fmt: skip
            (call,) = [item for item in answer.output if item.type == "function_call"]
            items += answer.output
            result = tide(**json.loads(call.arguments))
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
        parsed = self.client.responses.parse(
            model=self.model, input="Describe a ship.", text_format=Ship
        )
        assert isinstance(parsed.output_parsed, Ship)
        return f"{len(events)} events, {TURNS} calls, {parsed.output_parsed}"

    def cancel(self) -> str:
        stream = self._ask(stream=True, max_completion_tokens=LONG, extra_body={"ignore_eos": True})
        for _, _chunk in zip(range(TAKEN), stream, strict=False):
            pass
        stream.close()
        import openai

        try:
            self.client.with_options(timeout=2).completions.create(
                model=self.model, prompt="a", max_tokens=LONG, extra_body={"ignore_eos": True}
            )
        except openai.APITimeoutError:
            return "a stream and a timeout"
        raise AssertionError("answered within 2 s")


class Agents(Client):
    """OpenAI's agents SDK, over chats and over responses."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url, model)
        import agents
        import openai

        agents.set_tracing_disabled(True)
        self.sdk = agents
        self.client = openai.AsyncOpenAI(
            base_url=self.url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S
        )

    def _agent(self, responses: bool = False, tokens: int = SHORT, **more: Any) -> Any:
        kinds = (self.sdk.OpenAIChatCompletionsModel, self.sdk.OpenAIResponsesModel)
        more.setdefault("settings", {})
        settings = self.sdk.ModelSettings(
            **{"temperature": 0, "max_tokens": tokens, "include_usage": True} | more.pop("settings")
        )
        model = kinds[responses](model=self.model, openai_client=self.client)
        return self.sdk.Agent(
            name="pilot", instructions="You are a pilot.", model=model, model_settings=settings,
            **more,
        )  # fmt: skip

    def _run(self, agent: Any, turns: int = TURNS + 2) -> Any:
        return self.wait(self.sdk.Runner.run(agent, QUESTION, max_turns=turns))

    async def _pieces(self, agent: Any) -> list[str]:
        found = self.sdk.Runner.run_streamed(agent, QUESTION)
        return [
            event.data.delta
            async for event in found.stream_events()
            if getattr(getattr(event, "data", None), "type", "") == "response.output_text.delta"
        ]

    def chat(self) -> str:
        found = self._run(self._agent())
        assert found.final_output
        usage = found.context_wrapper.usage
        assert usage.input_tokens > 0
        return f"{usage.output_tokens} tokens"

    def stream(self) -> str:
        pieces = self.wait(self._pieces(self._agent()))
        return same(self._run(self._agent()).final_output, pieces)

    def _tools(self, responses: bool) -> str:
        count = 0

        def used(_context: Any, results: list[Any]) -> Any:
            nonlocal count
            count += len(results)
            return self.sdk.agent.ToolsToFinalOutputResult(count >= TURNS, "deep enough")

        agent = self._agent(
            responses, tokens=200, tools=[self.sdk.function_tool(tide)], tool_use_behavior=used,
            reset_tool_choice=False,
            settings={"tool_choice": "required", "parallel_tool_calls": False},
        )  # fmt: skip
        found = self._run(agent)
        calls = [item for item in found.new_items if item.type == "tool_call_item"]
        return called(len(calls), str(found.final_output))

    def tools(self) -> str:
        return self._tools(False)

    def parse(self) -> str:
        found = self._run(self._agent(tokens=200, output_type=Ship)).final_output
        assert isinstance(found, Ship)
        return str(found)

    def responses(self) -> str:
        # The library takes a text that ended at its bound for a failure.
        short = {"extra_body": {"stop": ["."]}}
        pieces = self.wait(self._pieces(self._agent(True, tokens=200, settings=short)))
        told = same(self._run(self._agent(True, tokens=200, settings=short)).final_output, pieces)
        parsed = self._run(self._agent(True, tokens=200, output_type=Ship)).final_output
        assert isinstance(parsed, Ship)
        return f"{told}, {self._tools(True)}, {parsed}"

    def cancel(self) -> str:
        async def read() -> None:
            found = self.sdk.Runner.run_streamed(
                self._agent(tokens=LONG, settings={"extra_body": {"ignore_eos": True}}), QUESTION
            )
            seen = 0
            async for _ in found.stream_events():
                seen += 1
                if seen == TAKEN:
                    found.cancel()
                    break

        self.wait(read())
        return "a stream"


class LangChain(Client):
    """``langchain-openai``."""

    def _model(self, tokens: int = SHORT, **more: Any) -> Any:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(
            base_url=self.url, api_key=KEY, model=self.model, temperature=0, max_retries=0,
            max_completion_tokens=tokens, timeout=TIMEOUT_S, stream_usage=True, **more,
        )  # fmt: skip

    def chat(self) -> str:
        answer = self._model().invoke([("system", "You are a pilot."), ("user", QUESTION)])
        assert answer.content
        return f"{answer.usage_metadata['output_tokens']} tokens"

    def stream(self) -> str:
        chunks = list(self._model().stream(QUESTION))
        assert any(chunk.usage_metadata for chunk in chunks)
        return same(self._model().invoke(QUESTION).content, [chunk.content for chunk in chunks])

    def _tools(self, model: Any) -> str:
        from langchain_core.messages import HumanMessage, ToolMessage

        messages: list[Any] = [HumanMessage("Which port is deepest?")]
        forced = model.bind_tools([tide], tool_choice="required", strict=True,
                                  parallel_tool_calls=False)  # fmt: skip
        count = 0
        for _ in range(TURNS):
            answer = forced.invoke(messages)
            (call,) = answer.tool_calls
            messages += [answer, ToolMessage(tide(**call["args"]), tool_call_id=call["id"])]
            count += 1
        return called(count, model.bind_tools([tide], tool_choice="none").invoke(messages).text)

    def tools(self) -> str:
        return self._tools(self._model(200))

    def parse(self) -> str:
        found = {}
        for method in ("json_schema", "function_calling"):
            ask = self._model(200).with_structured_output(Ship, method=method)
            found[method] = ask.invoke("Describe a ship.")
            assert isinstance(found[method], Ship)
        return f"{found['json_schema']}, also as a call"

    def responses(self) -> str:
        model = self._model(200, use_responses_api=True, output_version="responses/v1")
        chunks = list(model.stream(QUESTION))
        told = same(model.invoke(QUESTION).text, [chunk.text for chunk in chunks])
        parsed = model.with_structured_output(Ship).invoke("Describe a ship.")
        assert isinstance(parsed, Ship)
        return f"{told}, {self._tools(model)}, {parsed}"

    def cancel(self) -> str:
        stream = self._model(LONG, extra_body={"ignore_eos": True}).stream(QUESTION)
        for _, _chunk in zip(range(TAKEN), stream, strict=False):
            pass
        stream.close()
        return "a stream"


class LlamaIndex(Client):
    """``llama-index-llms-openai-like``, which stands on LlamaIndex's client of OpenAI."""

    def _model(self, tokens: int = SHORT, **more: Any) -> Any:
        from llama_index.llms.openai_like import OpenAILike

        return OpenAILike(
            api_base=self.url, api_key=KEY, model=self.model, temperature=0, max_tokens=tokens,
            max_retries=0, timeout=TIMEOUT_S, is_chat_model=True, is_function_calling_model=True,
            should_use_structured_outputs=True, context_window=8192, additional_kwargs=more,
        )  # fmt: skip

    def _responses(self) -> Any:
        from llama_index.llms.openai_like import OpenAILikeResponses

        return OpenAILikeResponses(
            api_base=self.url, api_key=KEY, model=self.model, temperature=0,
            max_output_tokens=SHORT, max_retries=0, timeout=TIMEOUT_S,
            is_function_calling_model=True, context_window=8192,
        )  # fmt: skip

    def _messages(self) -> list[Any]:
        from llama_index.core.llms import ChatMessage

        return [ChatMessage(role="user", content=QUESTION)]

    def chat(self) -> str:
        answer = self._model().chat(self._messages())
        assert answer.message.content
        assert self._model().complete(QUESTION).text == answer.message.content
        return f"{answer.raw.usage.completion_tokens} tokens"

    def stream(self) -> str:
        pieces = [chunk.delta for chunk in self._model().stream_chat(self._messages())]
        return same(self._model().chat(self._messages()).message.content, pieces)

    def tools(self) -> str:
        from llama_index.core.llms import ChatMessage
        from llama_index.core.tools import FunctionTool

        tool, model, messages = (
            FunctionTool.from_defaults(tide, fn_schema=Asked),
            self._model(200),
            self._messages(),
        )
        count = 0
        for _ in range(TURNS):
            answer = model.chat_with_tools([tool], chat_history=messages, tool_required=True)
            (call,) = model.get_tool_calls_from_response(answer)
            messages.append(answer.message)
            result = tide(**call.tool_kwargs)
            more = {"tool_call_id": call.tool_id}
            messages.append(ChatMessage(role="tool", content=result, additional_kwargs=more))
            count += 1
        answer = model.chat_with_tools([tool], chat_history=messages, tool_choice="none")
        return called(count, answer.message.content)

    def parse(self) -> str:
        found = self._model(200).as_structured_llm(Ship).complete("Describe a ship.").raw
        assert isinstance(found, Ship)
        return str(found)

    def responses(self) -> str:
        pieces = [chunk.delta for chunk in self._responses().stream_chat(self._messages())]
        return same(self._responses().chat(self._messages()).message.content, pieces)

    def cancel(self) -> str:
        more = {"extra_body": {"ignore_eos": True}}
        stream = self._model(LONG, **more).stream_chat(self._messages())
        for _, _chunk in zip(range(TAKEN), stream, strict=False):
            pass
        stream.close()
        return "a stream"


class LiteLLM(Client):
    """``litellm``, which takes our address as OpenAI's: its ``hosted_vllm`` drops a part of each
    schema (``additionalProperties``), without which a small model would never end."""

    def _ask(self, content: str = QUESTION, tokens: int = SHORT, **more: Any) -> Any:
        import litellm

        litellm.suppress_debug_info = True
        asked = {"messages": [{"role": "user", "content": content}]} | more
        return litellm.completion(
            model=f"openai/{self.model}", api_base=self.url, api_key=KEY, temperature=0,
            max_tokens=tokens, num_retries=0, timeout=TIMEOUT_S, **asked,
        )  # fmt: skip

    def chat(self) -> str:
        answer = self._ask(user="one")
        assert answer.choices[0].message.content
        return f"{answer.usage.completion_tokens} tokens"

    def stream(self) -> str:
        chunks = list(self._ask(stream=True, stream_options={"include_usage": True}))
        pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        return same(self._ask().choices[0].message.content, pieces)

    def tools(self) -> str:
        messages: list[Any] = [{"role": "user", "content": "Which port is deepest?"}]
        tools = [{"type": "function", "function": TOOL}]
        count = 0
        for _ in range(TURNS):
            answer = self._ask(messages=messages, tokens=200, tools=tools, tool_choice="required",
                               parallel_tool_calls=False)  # fmt: skip
            message = answer.choices[0].message
            (call,) = message.tool_calls
            result = tide(**json.loads(call.function.arguments))
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
            count += 1
        answer = self._ask(messages=messages, tools=tools, tool_choice="none")
        return called(count, answer.choices[0].message.content)

    def parse(self) -> str:
        answer = self._ask("Describe a ship.", 200, response_format=Ship)
        return str(Ship.model_validate_json(answer.choices[0].message.content))

    def responses(self) -> str:
        import litellm

        asked = {"model": f"openai/{self.model}", "input": QUESTION, "api_base": self.url,
                 "api_key": KEY, "temperature": 0, "max_output_tokens": SHORT}  # fmt: skip
        whole = litellm.responses(**asked).output[0].content[0].text
        events = list(litellm.responses(**asked, stream=True))
        pieces = [e.delta for e in events if e.type == "response.output_text.delta"]
        return same(whole, pieces)

    def cancel(self) -> str:
        stream = self._ask(tokens=LONG, stream=True, extra_body={"ignore_eos": True})
        for _, _chunk in zip(range(TAKEN), stream, strict=False):
            pass
        stream.completion_stream.close()
        return "a stream"


class PydanticAI(Client):
    """``pydantic-ai``, over chats and over responses."""

    def _agent(self, responses: bool = False, **more: Any) -> Any:
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        kind = OpenAIResponsesModel if responses else OpenAIChatModel
        provider = OpenAIProvider(base_url=self.url, api_key=KEY)
        return Agent(kind(self.model, provider=provider), retries=0, **more)

    def _settings(self, tokens: int = SHORT, **more: Any) -> Any:
        return {"temperature": 0, "max_tokens": tokens, "timeout": TIMEOUT_S, **more}

    async def _pieces(self, agent: Any) -> list[str]:
        async with agent.run_stream(QUESTION, model_settings=self._settings()) as found:
            return [piece async for piece in found.stream_text(delta=True, debounce_by=None)]

    def _whole(self, agent: Any) -> str:
        return str(self.wait(agent.run(QUESTION, model_settings=self._settings())).output)

    def chat(self) -> str:
        agent = self._agent(instructions="You are a pilot.")
        found = self.wait(agent.run(QUESTION, model_settings=self._settings()))
        assert found.output
        usage = found.usage() if callable(found.usage) else found.usage
        return f"{usage.output_tokens} tokens"

    def stream(self) -> str:
        pieces = self.wait(self._pieces(self._agent()))
        return same(self._whole(self._agent()), pieces)

    def _tools(self, responses: bool) -> str:
        from pydantic_ai import ToolOutput

        def settings(context: Any) -> Any:
            name = "tide" if context.run_step <= TURNS else "final_result"
            return self._settings(200, tool_choice=[name])

        agent = self._agent(responses, tools=[tide], output_type=ToolOutput(Ship))
        found = self.wait(agent.run("Which port is deepest?", model_settings=settings))
        parts = [part for message in found.all_messages() for part in message.parts]
        calls = [p for p in parts if p.part_kind == "tool-call" and p.tool_name == "tide"]
        return called(len(calls), str(found.output))

    def tools(self) -> str:
        return self._tools(False)

    def _parse(self, responses: bool) -> str:
        from pydantic_ai import NativeOutput, ToolOutput

        for kind in (NativeOutput, ToolOutput):
            agent = self._agent(responses, output_type=kind(Ship))
            asked = agent.run("Describe a ship.", model_settings=self._settings(200))
            found = self.wait(asked).output
            assert isinstance(found, Ship)
        return f"{found}, by schema and as a call"

    def parse(self) -> str:
        return self._parse(False)

    def responses(self) -> str:
        pieces = self.wait(self._pieces(self._agent(True)))
        told = same(self._whole(self._agent(True)), pieces)
        return f"{told}, {self._tools(True)}, {self._parse(True)}"

    def cancel(self) -> str:
        async def read() -> None:
            settings = self._settings(LONG, extra_body={"ignore_eos": True})
            async with self._agent().run_stream(QUESTION, model_settings=settings) as found:
                seen = 0
                async for _ in found.stream_text(delta=True, debounce_by=None):
                    seen += 1
                    if seen == TAKEN:
                        await found.cancel()
                        break

        self.wait(read())
        return "a stream"


class Instructor(Client):
    """``instructor``, which asks for objects alone."""

    def _client(self, mode: str) -> Any:
        import instructor
        import openai

        client = openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S)
        return instructor.from_openai(client, mode=instructor.Mode[mode])

    def _ask(self, create: Callable[..., Any], **more: Any) -> Any:
        return create(
            model=self.model, temperature=0, max_retries=0, response_model=Ship, max_tokens=200,
            messages=[{"role": "user", "content": "Describe a ship."}], **more,
        )  # fmt: skip

    def parse(self) -> str:
        modes = ("TOOLS", "JSON_SCHEMA")
        for mode in modes:
            assert isinstance(self._ask(self._client(mode).create), Ship)
        return ", ".join(modes)

    def stream(self) -> str:
        found = list(self._ask(self._client("TOOLS").create_partial))
        Ship.model_validate(found[-1].model_dump())  # of a schema in which no field is required
        return f"{len(found)} partial objects"

    def responses(self) -> str:
        found = self._ask(self._client("RESPONSES_TOOLS").create)
        assert isinstance(found, Ship)
        return str(found)


LIBRARIES: dict[str, type[Client]] = {
    "openai": OpenAI, "openai-agents": Agents, "langchain-openai": LangChain,
    "llama-index": LlamaIndex, "litellm": LiteLLM, "pydantic-ai": PydanticAI,
    "instructor": Instructor,
}  # fmt: skip


if __name__ == "__main__":
    name, address, named_model, case = sys.argv[1:]
    one = LIBRARIES[name](address, named_model)
    print(getattr(one, case)())
