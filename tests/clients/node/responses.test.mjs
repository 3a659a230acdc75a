// What uses /v1/responses of the server at RAYLLM_TEST_URL: openai-node, the AI SDK's OpenAI provider, openai-agents.
import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAI } from "@ai-sdk/openai";
import { Agent, OpenAIProvider, Runner, tool as agentTool } from "@openai/agents";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = "tiny-pydoc";
const baseURL = `${process.env.RAYLLM_TEST_URL}/v1`;
const input = "What does len do?";
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const provider = createOpenAI({ baseURL, apiKey: "none" });
const Visit = z.object({ city: z.enum(["Rome", "Oslo"]), guide: z.boolean() });

test("openai: text, whole, streamed and continued", async () => {
  const fields = { model, input, temperature: 0, max_output_tokens: 40 };
  const whole = await client.responses.create(fields);
  assert.ok(whole.output_text);
  let text = "";
  for await (const event of await client.responses.create({ ...fields, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, whole.output_text);
  const more = await client.responses.create({ ...fields, input: "And max?", previous_response_id: whole.id });
  assert.equal(more.previous_response_id, whole.id);
});

test("openai: structured output", async () => {
  const text = { format: zodTextFormat(Visit, "visit") };
  const fields = { model, input, text, temperature: 0, max_output_tokens: 200 };
  Visit.parse((await client.responses.parse(fields)).output_parsed);
});

test("AI SDK: text, whole and streamed", async () => {
  const fields = { model: provider(model), prompt: input, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
  const whole = await generateText(fields);
  assert.ok(whole.text);
  const streamed = streamText(fields);
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.equal(text, whole.text);
});

test("AI SDK: an enforced tool and structured output", async () => {
  const visited = [];
  const tools = {
    visit: tool({ description: "Go there.", inputSchema: Visit, execute: (given) => (visited.push(given), "done") }),
  };
  const fields = { model: provider(model), prompt: input, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
  await generateText({ ...fields, tools, toolChoice: "required", stopWhen: stepCountIs(2) });
  assert.ok(visited.length >= 2);
  visited.forEach((given) => Visit.parse(given));
  Visit.parse((await generateText({ ...fields, output: Output.object({ schema: Visit }) })).output);
});

test("openai-agents: a tool, a handoff, an output type", async () => {
  const runner = new Runner({ modelProvider: new OpenAIProvider({ openAIClient: client }), tracingDisabled: true });
  const modelSettings = { temperature: 0, maxTokens: 200 };
  const visited = [];
  const visit = agentTool({
    name: "visit",
    description: "Go there.",
    parameters: Visit,
    execute: (given) => (visited.push(given), "done"),
  });
  const caller = new Agent({
    name: "Caller",
    model,
    tools: [visit],
    toolUseBehavior: "stop_on_first_tool",
    modelSettings: { ...modelSettings, toolChoice: "required" },
  });
  assert.equal((await runner.run(caller, input)).finalOutput, "done");
  Visit.parse(visited[0]);
  const expert = new Agent({ name: "Expert", model, outputType: Visit, modelSettings });
  const guide = new Agent({
    name: "Guide",
    model,
    handoffs: [expert],
    modelSettings: { ...modelSettings, toolChoice: "transfer_to_Expert" },
  });
  const result = await runner.run(guide, input);
  assert.equal(result.lastAgent.name, "Expert");
  Visit.parse(result.finalOutput);
});
