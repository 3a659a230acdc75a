/**
 * A conversation and what can be done with one. It is a plain object, as it is kept and exported:
 *
 * {id, title, created, updated (ms), model, settings: {system, params, tools, tool_choice, extra}, messages}
 *
 * Messages are the API's, {role, content, ...}, without the system prompt. `meta` of an answer says how it came about;
 * the API does not get it. `tools` and `extra` are JSON as the user wrote it.
 */

export const PARAMS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
export const TOOL_CHOICES = ["auto", "required", "none"];
const MAX_TITLE = 80; // characters
const MAX_IMPORTED = 64 * 2 ** 20; // bytes of a file

export const NO_SETTINGS = { system: "", params: {}, tools: "", tool_choice: "auto", extra: "" };

export function newConversation(model, settings = NO_SETTINGS, messages = []) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, model, settings: structuredClone(settings), messages };
}

/** A random id. `crypto.randomUUID` would do, but browsers have it only with TLS or on localhost. */
function newId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** What lists show: the title that the user gave, or how the conversation begins. */
export function titleOf({ title, messages }) {
  const text = title || messages.find((message) => message.role === "user")?.content || "";
  return text.replace(/\s+/g, " ").trim().slice(0, MAX_TITLE) || "New chat";
}

export function matches(conversation, query) {
  const text = [titleOf(conversation), ...conversation.messages.map((message) => message.content)].join("\n").toLowerCase();
  return query.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

/** Calls of the last answer that have no result yet. */
export function openCalls(messages) {
  const last = messages.findLastIndex((message) => message.role === "assistant");
  const answered = new Set(messages.slice(last + 1).map((message) => message.tool_call_id));
  const isLast = last >= 0 && messages.slice(last + 1).every((message) => message.role === "tool");
  return isLast ? (messages[last].tool_calls ?? []).filter((call) => !answered.has(call.id)) : [];
}

/** Whether it is the model's turn. */
export function isOwed(messages) {
  return messages.length > 0 && messages.at(-1).role !== "assistant" && !openCalls(messages).length;
}

/** `tools` as the API wants them, or null. Throws SyntaxError or Error with what is wrong. */
export function toolsOf(text) {
  if (!text.trim()) return null;
  const tools = JSON.parse(text), list = Array.isArray(tools) ? tools : [tools];
  for (const tool of list) {
    if (typeof tool?.function?.name !== "string") throw new Error('each tool must be {"type": "function", "function": {"name": ...}}');
  }
  return list;
}

/** Further fields of a request, or null. Throws SyntaxError or Error with what is wrong. */
export function extraOf(text) {
  if (!text.trim()) return null;
  const extra = JSON.parse(text);
  if (extra === null || typeof extra !== "object" || Array.isArray(extra)) throw new Error("it must be a JSON object");
  for (const name of ["messages", "model", "stream", "n"]) if (name in extra) throw new Error(`the console sets ${name} itself`);
  return extra;
}

/** The body of the request that continues a conversation. Throws Error for settings that are not valid. */
export function requestBody({ model, settings, messages }) {
  const tools = toolsOf(settings.tools);
  return {
    ...(model && { model }),
    messages: apiMessages(settings.system, messages),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true }, // also known of answers that are stopped
    ...settings.params,
    ...(tools && { tools, tool_choice: settings.tool_choice }),
    ...extraOf(settings.extra),
  };
}

function apiMessages(system, messages) {
  const own = messages.map(({ meta, ...message }) => message);
  return system.trim() ? [{ role: "system", content: system.trim() }, ...own] : own;
}

/** What a file of one conversation holds: its `messages` could be sent to the API as they are. */
export function exported(conversation) {
  const { settings: { system, ...settings }, messages, ...rest } = conversation;
  return { ...rest, settings, messages: apiMessages(system, messages), meta: messages.map((message) => message.meta ?? null) };
}

/** Conversations of a file that was exported here, or of any JSON with `messages`. Throws Error with what is wrong. */
export function imported(text) {
  if (text.length > MAX_IMPORTED) throw new Error("the file is longer than 64 MiB");
  const file = JSON.parse(text);
  const list = Array.isArray(file?.conversations) ? file.conversations : [file];
  return list.map((each, index) => checked(each, list.length > 1 ? `conversation ${index + 1}: ` : ""));
}

function checked(given, where) {
  const must = (holds, what) => { if (!holds) throw new Error(where + what); };
  const text = (value) => (typeof value === "string" ? value : "");
  const time = (value) => (Number.isFinite(value) ? value : Date.now());
  must(given !== null && typeof given === "object" && Array.isArray(given.messages), "there is no list `messages` in it");
  const messages = given.messages.map((message, index) => {
    const name = `messages[${index}]`;
    must(["system", "developer", "user", "assistant", "tool"].includes(message?.role), `${name} has no role that is known`);
    must([undefined, null].includes(message.content) || typeof message.content === "string", `the content of ${name} is not text`);
    const kept = { role: message.role, content: message.content ?? "" };
    if (typeof message.reasoning_content === "string") kept.reasoning_content = message.reasoning_content;
    if (message.role === "tool") {
      must(typeof message.tool_call_id === "string", `${name} has no tool_call_id`);
      kept.tool_call_id = message.tool_call_id;
    }
    if (message.tool_calls) {
      must(Array.isArray(message.tool_calls), `tool_calls of ${name} is no list`);
      kept.tool_calls = message.tool_calls.map((call) => {
        const { id, function: { name: called, arguments: given } = {} } = call ?? {};
        must([id, called, given].every((each) => typeof each === "string"), `a tool call of ${name} has no id, name or arguments`);
        return { id, type: "function", function: { name: called, arguments: given } };
      });
    }
    return kept;
  });
  const isSystem = (message) => ["system", "developer"].includes(message.role);
  const system = messages.length && isSystem(messages[0]) ? messages.shift().content : "";
  must(!messages.some(isSystem), "a system message must be the first one");
  const metas = Array.isArray(given.meta) ? given.meta : [];
  messages.forEach((message, index) => { if (message.role === "assistant") message.meta = metaOf(metas[index]); });
  const settings = { ...NO_SETTINGS, system, params: {} };
  for (const name of ["tools", "extra"]) settings[name] = text(given.settings?.[name]);
  if (TOOL_CHOICES.includes(given.settings?.tool_choice)) settings.tool_choice = given.settings.tool_choice;
  for (const name of PARAMS) {
    const value = given.settings?.params?.[name] ?? given.params?.[name]; // `params` is where `rayllm chat` saves them
    if (Number.isFinite(value)) settings.params[name] = value;
  }
  return {
    ...newConversation(text(given.model), settings, messages),
    ...(/^[0-9a-f]{32}$/.test(given.id) && { id: given.id }),
    title: text(given.title).slice(0, MAX_TITLE),
    created: time(given.created),
    updated: time(given.updated),
  };
}

/** What is known of how an answer came about; of an imported one only what can be shown. */
function metaOf(given) {
  const meta = {};
  for (const [name, value] of Object.entries(given ?? {})) {
    if (["string", "number", "boolean"].includes(typeof value)) meta[name] = value;
  }
  return meta;
}

/** A conversation for people to read. */
export function markdownOf(conversation) {
  const parts = [`# ${titleOf(conversation)}`];
  const { system } = conversation.settings;
  if (system.trim()) parts.push("## System", system.trim());
  for (const message of conversation.messages) {
    if (message.role === "user") parts.push("## User", message.content);
    if (message.role === "tool") parts.push(`## Result of ${message.tool_call_id}`, fenced("", message.content));
    if (message.role !== "assistant") continue;
    parts.push(`## Assistant${message.meta?.model ? ` (${message.meta.model})` : ""}`);
    if (message.reasoning_content) parts.push(message.reasoning_content.trim().replace(/^/gm, "> "));
    if (message.content.trim()) parts.push(message.content.trim());
    for (const { id, function: { name, arguments: given } } of message.tool_calls ?? []) {
      parts.push(`Tool call ${id}: \`${name}\``, fenced("json", given));
    }
  }
  return `${parts.join("\n\n")}\n`;
}

function fenced(language, text) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/** A name for the file of a conversation. */
export function fileName(conversation, ending) {
  const name = titleOf(conversation).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 50);
  return `${name || "conversation"}.${ending}`;
}
