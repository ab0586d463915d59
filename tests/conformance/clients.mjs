// The AI SDK asks a server: the cases of clients.py, run by Node.
//   node clients.mjs PROVIDER URL MODEL CASE     in a folder with the packages

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import assert from "node:assert/strict";

const require = createRequire(`${process.cwd()}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, stepCountIs, tool, Output } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const [, , provider, url, name, chosen] = process.argv;
const TURNS = 5;
const PORTS = ["Hull", "Leith", "Bergen"];
const settings = { baseURL: `${url}/v1`, apiKey: "none" };
const chat =
  provider === "openai"
    ? createOpenAI(settings).chat(name)
    : createOpenAICompatible({
        ...settings,
        name: "plimsoll",
        includeUsage: true,
        supportsStructuredOutputs: true,
      })(name);
const prompt = "Name a harbour.";
const short = { prompt, temperature: 0, maxOutputTokens: 12, maxRetries: 0 };
const Ship = z.object({
  name: z.enum(["Ariel", "Thermopylae"]),
  depth: z.number().int().min(0).max(9),
  laden: z.boolean(),
});
const tide = tool({
  description: "Tell the depth of the water at a port, in metres.",
  inputSchema: z.object({ port: z.enum(PORTS) }),
  execute: async ({ port }) => `${4 + PORTS.indexOf(port)} m`,
});

async function streamed(model) {
  const pieces = [];
  const found = streamText({ ...short, model });
  for await (const piece of found.textStream) if (piece) pieces.push(piece);
  const whole = await generateText({ ...short, model });
  assert.ok(whole.text);
  assert.equal(pieces.join(""), whole.text);
  assert.ok(pieces.length > 1);
  assert.equal((await found.usage).outputTokens, whole.usage.outputTokens);
  return `${pieces.length} pieces`;
}

async function called(model) {
  const found = await generateText({
    ...short,
    model,
    maxOutputTokens: 200,
    tools: { tide },
    stopWhen: stepCountIs(TURNS + 1),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber < TURNS ? "required" : "none" }),
  });
  const calls = found.steps.flatMap((step) => step.toolCalls);
  assert.equal(calls.length, TURNS);
  return `${calls.length} calls`;
}

async function parsed(model) {
  const found = await generateText({
    ...short,
    model,
    maxOutputTokens: 200,
    output: Output.object({ schema: Ship }),
  });
  return JSON.stringify(Ship.parse(found.output));
}

const CASES = {
  async chat() {
    const found = await generateText({ ...short, model: chat });
    assert.ok(found.text);
    assert.ok(found.usage.inputTokens > 0);
    return `${found.usage.outputTokens} tokens`;
  },
  stream: () => streamed(chat),
  tools: () => called(chat),
  parse: () => parsed(chat),
  async responses() {
    const model = createOpenAI(settings).responses(name);
    return [await streamed(model), await called(model), await parsed(model)].join(", ");
  },
  async cancel() {
    const ending = new AbortController();
    const found = streamText({
      ...short,
      model: chat,
      maxOutputTokens: 6000,
      abortSignal: ending.signal,
    });
    let seen = 0;
    for await (const _ of found.textStream) if (++seen === 3) ending.abort();
    return "a stream";
  },
};

console.log(await CASES[chosen]());
