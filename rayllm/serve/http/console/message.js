/** How messages look: a question, an answer with its reasoning and tool calls, an error. */

import { button, copyButton, make, number } from "./dom.js";
import { codeNode, Markdown } from "./markdown.js";

/** Buttons below a message; hidden while an answer is being written. */
function actionRow(actions) {
  const row = make("div", "actions");
  row.append(...actions);
  return row;
}

/** A question of the user. actions: {edit(text), branch()}. */
export function questionNode(message, actions) {
  const node = make("div", "question"), bubble = make("div", "bubble", message.content);
  const row = actionRow([
    ...copyButton(() => message.content),
    button("Edit", () => node.replaceChildren(editForm(message.content, actions.edit, () => node.replaceChildren(bubble, row))), "plain"),
    button("Branch", actions.branch, "plain"),
  ]);
  node.append(bubble, row);
  return node;
}

function editForm(text, done, cancel) {
  const form = make("form", "edit"), input = make("textarea"), row = make("div", "row");
  const send = make("button", "main", "Send");
  input.value = text;
  input.rows = Math.min(12, text.split("\n").length + 1);
  input.setAttribute("aria-label", "Message, edited");
  row.append(make("span", "note", "What comes after it is replaced."), button("Cancel", cancel), send);
  form.append(input, row);
  form.onsubmit = (event) => {
    event.preventDefault();
    if (input.value.trim()) done(input.value.trim());
  };
  input.onkeydown = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  };
  setTimeout(() => input.focus());
  return form;
}

/** An answer, which may still grow. actions: {regenerate(), branch(), answerCalls({call id: result})}. */
export class AnswerView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.node = make("article", "answer");
    this.text = make("div", "text");
    this.calls = make("div", "calls");
    this.node.append(this.text, this.calls);
    this.markdown = new Markdown(this.text);
    this.reasoning = null;
  }

  /** Show what there is by now. isThinking: more reasoning may come. */
  grow(isThinking) {
    this.node.classList.add("busy");
    this.node.setAttribute("aria-busy", "true");
    if (this.message.reasoning_content) {
      this.#reason();
      if (!this.reasoning.isTouched) this.reasoning.details.open = isThinking;
    }
    this.markdown.write(this.message.content);
    const calls = this.message.tool_calls ?? [];
    this.calls.replaceChildren(...calls.map((call) => callCard(call, true)));
  }

  #reason() {
    if (!this.reasoning) {
      const details = make("details", "reasoning"), summary = make("summary", "", "Reasoning"), body = make("div", "text");
      details.append(summary, body);
      this.node.prepend(details);
      this.reasoning = { details, summary, markdown: new Markdown(body), isTouched: false };
      summary.onclick = () => { this.reasoning.isTouched = true; };
    }
    const seconds = this.message.meta?.thought_seconds;
    this.reasoning.summary.textContent = seconds === undefined ? "Reasoning" : `Reasoning, ${number(seconds)} s`;
    this.reasoning.markdown.write(this.message.reasoning_content);
  }

  /** Show it as it stays. results: {call id: text} of the tools, as far as they are given. */
  settle(results) {
    const { content, meta = {}, reasoning_content: thought, tool_calls: calls = [] } = this.message;
    this.node.classList.remove("busy");
    this.node.setAttribute("aria-busy", "false");
    if (thought) {
      this.#reason();
      if (!this.reasoning.isTouched) this.reasoning.details.open = false;
    }
    this.markdown.write(content);
    if (!content && !thought && !calls.length) this.text.replaceChildren(make("p", "note", "(an empty answer)"));
    this.#settleCalls(calls, results);
    this.node.querySelector(":scope > .error")?.remove();
    if (meta.error) this.node.append(errorNode({ title: "The answer broke off", message: meta.error }, this.actions.regenerate));
    this.node.querySelector(":scope > .foot")?.remove();
    const foot = make("div", "foot");
    foot.append(metaNode(meta), actionRow([
      ...(content ? copyButton(() => content) : []),
      button("Regenerate", this.actions.regenerate, "plain"),
      button("Branch", this.actions.branch, "plain"),
    ]));
    this.node.append(foot);
  }

  #settleCalls(calls, results) {
    const cards = calls.map((call) => callCard(call, false, results[call.id]));
    this.calls.replaceChildren(...cards);
    const open = calls.map((call, index) => [call, cards[index].querySelector("textarea")]).filter(([, field]) => field);
    if (!open.length) return;
    const row = make("div", "row");
    row.append(button(open.length > 1 ? "Send results" : "Send result", () => {
      this.actions.answerCalls(Object.fromEntries(open.map(([call, field]) => [call.id, field.value])));
    }, "main"));
    this.calls.append(row);
  }
}

/** A tool call: its name, its arguments and its result, or a field for that. */
function callCard(call, isGrowing, result) {
  const card = make("section", "call"), { name, arguments: given } = call.function;
  card.setAttribute("aria-label", `Tool call ${name}`);
  const head = make("div", "call-head");
  head.append(make("span", "badge", "tool call"), make("code", "", name), make("small", "", call.id));
  card.append(head, codeNode("json", pretty(given)));
  if (isGrowing) return card;
  if (result !== undefined) {
    card.append(make("div", "call-label", "Result"), codeNode(isObject(result) ? "json" : "text", pretty(result)));
    return card;
  }
  if (!isObject(given)) {
    const note = "The arguments are no JSON object, perhaps because the answer was cut off. The server refuses such a call in a conversation: regenerate the answer.";
    card.append(make("p", "note", note));
  }
  const label = make("label", "call-label", "Result"), field = make("textarea");
  field.rows = 2;
  field.placeholder = "What the tool returns, as text or JSON";
  label.append(field);
  card.append(label);
  return card;
}

function isObject(text) {
  try { return typeof JSON.parse(text) === "object"; } catch { return false; }
}

function pretty(text) { return isObject(text) ? JSON.stringify(JSON.parse(text), null, 2) : text; }

function metaNode(meta) {
  const node = make("div", "meta");
  const add = (text, title) => {
    const part = make("span", "", text);
    part.title = title;
    node.append(part);
  };
  if (meta.model) add(meta.model, "The model that answered");
  if (meta.prompt_tokens !== undefined) {
    const cached = meta.cached_tokens ? `, ${number(meta.cached_tokens)} cached` : "";
    add(`${number(meta.prompt_tokens)} tokens in${cached}`, "Tokens of the prompt, and how many came from the prefix cache");
    add(`${number(meta.completion_tokens)} out`, "Tokens generated");
  }
  if (meta.tokens_per_second) add(`${number(meta.tokens_per_second)} tokens/s`, "After the first token, as seen here");
  if (meta.first_seconds !== undefined) add(`first after ${number(meta.first_seconds * 1000)} ms`, "Time to the first token, as seen here");
  if (meta.seconds !== undefined) add(`${number(meta.seconds)} s in all`, "From sending to the end");
  if (meta.ending === "stopped") add("stopped", "You stopped it");
  else if (meta.finish && !["stop", "tool_calls"].includes(meta.finish)) add(`ended by ${meta.finish}`, "finish_reason");
  return node;
}

/** What went wrong, in words, and a button to try again. */
export function errorNode(error, retry) {
  const node = make("div", "error");
  node.setAttribute("role", "alert");
  node.append(make("b", "", error.title ?? "No answer"), make("p", "", error.message));
  if (error.details) node.append(make("small", "", error.details));
  const row = make("div");
  row.append(button("Try again", retry));
  node.append(row);
  return node;
}
