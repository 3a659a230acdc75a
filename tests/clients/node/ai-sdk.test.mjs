// The AI SDK against the server at RAYLLM_TEST_URL, by its provider for servers like OpenAI's.
import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const name = "tiny-pydoc";
const provider = createOpenAICompatible({
  name: "rayllm",
  baseURL: `${process.env.RAYLLM_TEST_URL}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const common = { temperature: 0, maxRetries: 0, prompt: "What does len do?" };
const Visit = z.object({ city: z.enum(["Rome", "Oslo"]), guide: z.boolean() });

for (const kind of ["chatModel", "completionModel"]) {
  test(`text by ${kind}, whole and streamed`, async () => {
    const fields = { ...common, model: provider[kind](name), maxOutputTokens: 12 };
    const whole = await generateText(fields);
    assert.ok(whole.text);
    const streamed = streamText(fields);
    let text = "";
    for await (const piece of streamed.textStream) text += piece;
    assert.equal(text, whole.text);
    assert.equal(await streamed.finishReason, whole.finishReason);
    assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
  });
}

test("an enforced tool is called by its schema, and run", async () => {
  const visited = [];
  const tools = {
    visit: tool({ description: "Go there.", inputSchema: Visit, execute: (given) => (visited.push(given), "done") }),
  };
  for (const toolChoice of ["required", { type: "tool", toolName: "visit" }]) {
    const fields = { ...common, model: provider.chatModel(name), maxOutputTokens: 200, tools, toolChoice };
    const whole = await generateText({ ...fields, stopWhen: stepCountIs(2) });
    assert.equal(whole.steps.length, 2);
    assert.ok(whole.steps.every((step) => step.toolCalls.length === step.toolResults.length));
    const streamed = streamText(fields);
    await streamed.consumeStream();
    const calls = await streamed.toolCalls;
    assert.deepEqual(
      calls.map((call) => call.input),
      whole.steps[0].toolCalls.map((call) => call.input),
    );
  }
  assert.ok(visited.length >= 4);
  visited.forEach((given) => Visit.parse(given));
});

test("structured output, whole and streamed", async () => {
  const output = Output.object({ schema: Visit });
  const fields = { ...common, model: provider.chatModel(name), maxOutputTokens: 200, output };
  const whole = await generateText(fields);
  Visit.parse(whole.output);
  const streamed = streamText(fields);
  let last;
  for await (const partial of streamed.partialOutputStream) last = partial;
  assert.deepEqual(last, whole.output);
});

test("embeddings", async () => {
  const model = provider.embeddingModel(name);
  const { embeddings } = await embedMany({ model, values: ["One", "Two"], maxRetries: 0 });
  assert.equal(embeddings.length, 2);
});

test("an error has the server's message", async () => {
  const fields = { ...common, model: provider.chatModel("other"), maxOutputTokens: 2 };
  await assert.rejects(generateText(fields), (error) => error.statusCode === 404 && /other/.test(error.message));
});
