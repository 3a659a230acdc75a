// openai-node against the server at RAYLLM_TEST_URL.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = "tiny-pydoc";
const messages = [{ role: "user", content: "What does len do?" }];
const client = new OpenAI({ baseURL: `${process.env.RAYLLM_TEST_URL}/v1`, apiKey: "none", maxRetries: 0 });
const Visit = z.object({ city: z.enum(["Rome", "Oslo"]), guide: z.boolean() });

test("models and completions", async () => {
  const listed = [];
  for await (const each of client.models.list()) listed.push(each.id);
  assert.deepEqual(listed, [model]);
  const fields = { model, prompt: "The for statement", max_tokens: 8, temperature: 0 };
  const whole = (await client.completions.create(fields)).choices[0].text;
  let streamed = "";
  for await (const chunk of await client.completions.create({ ...fields, stream: true })) {
    streamed += chunk.choices[0].text;
  }
  assert.ok(whole);
  assert.equal(streamed, whole);
});

test("chat, whole and streamed", async () => {
  const fields = { model, messages, max_completion_tokens: 16, temperature: 0 };
  const whole = await client.chat.completions.create(fields);
  assert.ok(whole.choices[0].message.content);
  const stream = client.chat.completions.stream({ ...fields, stream_options: { include_usage: true } });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(final.usage.completion_tokens, whole.usage.completion_tokens);
});

test("an enforced tool, whole, streamed and run by the client", async () => {
  const tools = [zodFunction({ name: "visit", parameters: Visit })];
  const fields = { model, messages, tools, max_tokens: 200, temperature: 0, tool_choice: "required" };
  const calls = (await client.chat.completions.parse(fields)).choices[0].message.tool_calls;
  assert.ok(calls.length >= 1);
  calls.forEach((each) => Visit.parse(each.function.parsed_arguments));
  const streamed = await client.chat.completions.stream(fields).finalChatCompletion();
  assert.deepEqual(
    streamed.choices[0].message.tool_calls.map((each) => each.function.arguments),
    calls.map((each) => each.function.arguments),
  );
  const visited = [];
  const runner = client.chat.completions.runTools({
    ...fields,
    tool_choice: { type: "function", function: { name: "visit" } },
    tools: [zodFunction({ name: "visit", parameters: Visit, function: (given) => (visited.push(given), "done") })],
  });
  await runner.done();
  assert.ok(visited.length >= 1);
  visited.forEach((given) => Visit.parse(given));
});

test("structured output", async () => {
  const response_format = zodResponseFormat(Visit, "visit");
  const fields = { model, messages, max_tokens: 200, temperature: 0, response_format };
  const parsed = (await client.chat.completions.parse(fields)).choices[0].message.parsed;
  Visit.parse(parsed);
  const streamed = await client.chat.completions.stream(fields).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, parsed);
});

test("embeddings", async () => {
  const { data } = await client.embeddings.create({ model, input: ["One", "Two"] });
  assert.equal(data.length, 2);
  const length = Math.hypot(...data[0].embedding);
  assert.ok(Math.abs(length - 1) < 1e-3, `${length}`);
});

test("errors are of their own kinds", async () => {
  await assert.rejects(client.chat.completions.create({ model: "other", messages }), OpenAI.NotFoundError);
  await assert.rejects(
    client.chat.completions.create({ model, messages, temperature: -1 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
  );
});

test("an early end of a stream leaves the client usable", async () => {
  const stream = await client.chat.completions.create({ model, messages, max_tokens: 1500, stream: true });
  for await (const _ of stream) break;
  assert.ok((await client.chat.completions.create({ model, messages, max_tokens: 1 })).choices.length);
});
