// What uses /v1/messages of the server at RAYLLM_TEST_URL: Anthropic's client and the AI SDK's Anthropic provider.
import assert from "node:assert/strict";
import { test } from "node:test";

import { createAnthropic } from "@ai-sdk/anthropic";
import Anthropic from "@anthropic-ai/sdk";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const model = "tiny-pydoc";
const url = process.env.RAYLLM_TEST_URL;
const messages = [{ role: "user", content: "What does len do?" }];
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const Visit = z.object({ city: z.enum(["Rome", "Oslo"]), guide: z.boolean() });

test("anthropic: text, whole and streamed", async () => {
  const fields = { model, messages, max_tokens: 24, temperature: 0 };
  const whole = await client.messages.create(fields);
  assert.ok(whole.content[0].text);
  const stream = client.messages.stream(fields);
  let text = "";
  stream.on("text", (piece) => (text += piece));
  const final = await stream.finalMessage();
  assert.equal(text, whole.content[0].text);
  assert.equal(final.stop_reason, whole.stop_reason);
});

test("anthropic: an enforced tool", async () => {
  const input_schema = {
    type: "object",
    properties: { city: { enum: ["Rome", "Oslo"] } },
    required: ["city"],
    additionalProperties: false,
  };
  const tools = [{ name: "visit", input_schema }];
  const fields = { model, messages, max_tokens: 200, tools, tool_choice: { type: "tool", name: "visit" } };
  const [call] = (await client.messages.create(fields)).content;
  assert.equal(call.type, "tool_use");
  assert.ok(["Rome", "Oslo"].includes(call.input.city));
});

test("anthropic: errors are of their own kinds", async () => {
  await assert.rejects(client.messages.create({ model: "other", messages, max_tokens: 1 }), Anthropic.NotFoundError);
});

test("AI SDK: text and an enforced tool", async () => {
  const provider = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
  const fields = { model: provider(model), prompt: "What does len do?", maxOutputTokens: 200, maxRetries: 0 };
  const whole = await generateText({ ...fields, temperature: 0 });
  assert.ok(whole.text);
  const streamed = streamText({ ...fields, temperature: 0 });
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.equal(text, whole.text);
  const visited = [];
  const tools = {
    visit: tool({ description: "Go there.", inputSchema: Visit, execute: (given) => (visited.push(given), "done") }),
  };
  await generateText({ ...fields, tools, toolChoice: { type: "tool", toolName: "visit" }, stopWhen: stepCountIs(2) });
  assert.ok(visited.length >= 2);
  visited.forEach((given) => Visit.parse(given));
});
