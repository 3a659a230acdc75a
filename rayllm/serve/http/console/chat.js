/** The conversation that is shown, and the answers that are being written, also of conversations that are not shown. */

import { Answer } from "./answer.js";
import { call, streamEvents } from "./api.js";
import { isOwed, openCalls, requestBody } from "./conversation.js";
import { $, button, make } from "./dom.js";
import { AnswerView, errorNode, questionNode } from "./message.js";

const KEEP_MS = 2000; // how often an answer is kept that is being written

/** An answer that is being written. */
class Run {
  constructor(conversation, message, view) {
    this.conversation = conversation;
    this.control = new AbortController();
    this.answer = new Answer(message);
    this.view = view;
    this.timer = this.drawMs = 0;
    this.keptAt = performance.now();
  }

  /** Draw soon. Long answers take longer to draw, and are drawn less often, so that the page stays responsive. */
  draw() {
    this.timer ||= setTimeout(() => {
      this.timer = 0;
      const start = performance.now();
      following(() => this.view.grow(this.answer.isThinking));
      this.drawMs = performance.now() - start;
    }, Math.max(16, 4 * this.drawMs));
  }

  stopDrawing() { clearTimeout(this.timer); }
}

/** Make the log longer; if its end was in view, it is so afterwards. */
function following(change) {
  const log = $("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

export class Chat {
  #runs = new Map(); // conversation id -> Run
  #errors = new Map(); // conversation id -> why there is no answer

  /** app: {keep(conversation), branch(conversation, messages), askForKey(error), settingsAreValid()}. */
  constructor(app) {
    this.app = app;
    this.conversation = null;
    $("composer").onsubmit = (event) => {
      event.preventDefault();
      this.#submit();
    };
    $("input").oninput = window.onresize = fitInput;
    $("input").onkeydown = (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("composer").requestSubmit();
    };
    $("stop").onclick = () => this.stop();
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.stop(); });
  }

  /** The conversation with this id as it is, if an answer is being written in it: the one that is kept is older. */
  running(id) { return this.#runs.get(id)?.conversation; }

  show(conversation) {
    this.conversation = conversation;
    for (const node of [...$("log").children]) if (node.id !== "empty") node.remove();
    this.#render(0);
    $("log").scrollTop = $("log").scrollHeight;
  }

  stop() { this.#runs.get(this.conversation.id)?.control.abort(); }

  forget(id) {
    this.#runs.get(id)?.control.abort();
    this.#errors.delete(id);
  }

  #submit() {
    const text = $("input").value.trim(), { id, messages } = this.conversation;
    if (!text || this.#runs.has(id) || openCalls(messages).length || !this.app.settingsAreValid()) return;
    $("input").value = "";
    fitInput();
    this.#say(messages.length, [{ role: "user", content: text }]);
  }

  /** Replace what is said from message `index` on, and have it answered. */
  #say(index, messages) {
    if (this.#runs.has(this.conversation.id) || !this.app.settingsAreValid()) return;
    this.conversation.messages.splice(index, Infinity, ...messages);
    this.#render(Math.max(0, index - 1)); // results of tools are shown in the answer before them
    $("log").scrollTop = $("log").scrollHeight;
    this.#answer(this.conversation);
  }

  /** Draw messages from `index` on anew. */
  #render(index) {
    const { messages, id } = this.conversation, run = this.#runs.get(id);
    for (const node of [...$("log").children]) if (node.id !== "empty" && !(Number(node.dataset.index) < index)) node.remove();
    $("empty").hidden = messages.length > 0;
    for (let i = index; i < messages.length; i++) {
      const node = run?.answer.message === messages[i] ? run.view.node : this.#nodeOf(i);
      if (!node) continue;
      node.dataset.index = i;
      $("log").append(node);
    }
    const error = this.#errors.get(id);
    if (!run && error) $("log").append(errorNode(error, () => this.#say(messages.length, [])));
    else if (!run && isOwed(messages)) {
      const row = make("div", "owed");
      row.append(button("Generate an answer", () => this.#say(messages.length, [])));
      $("log").append(row);
    }
    this.#showState();
  }

  #nodeOf(index) {
    const message = this.conversation.messages[index];
    if (message.role === "user") {
      return questionNode(message, {
        edit: (text) => this.#say(index, [{ role: "user", content: text }]),
        branch: () => this.#branch(message),
      });
    }
    if (message.role !== "assistant") return null; // results of tools are shown in the calls
    const view = this.#viewOf(message);
    view.settle(this.#resultsAfter(index));
    return view.node;
  }

  #viewOf(message) {
    return new AnswerView(message, {
      regenerate: () => this.#say(this.conversation.messages.indexOf(message), []),
      branch: () => this.#branch(message),
      answerCalls: (results) => {
        const given = Object.entries(results).map(([id, content]) => ({ role: "tool", tool_call_id: id, content }));
        this.#say(this.conversation.messages.length, given);
      },
    });
  }

  #resultsAfter(index) {
    const { messages } = this.conversation, results = {};
    for (let i = index + 1; messages[i]?.role === "tool"; i++) results[messages[i].tool_call_id] = messages[i].content;
    return results;
  }

  #branch(message) {
    const { messages } = this.conversation;
    let end = messages.indexOf(message) + 1;
    while (messages[end]?.role === "tool") end += 1;
    this.app.branch(this.conversation, messages.slice(0, end));
  }

  async #answer(conversation) {
    const { id, messages, model } = conversation, body = requestBody(conversation);
    const message = { role: "assistant", content: "", meta: model ? { model } : {} };
    const run = new Run(conversation, message, this.#viewOf(message)), isShown = () => this.conversation.id === id;
    messages.push(message);
    this.#runs.set(id, run);
    this.#errors.delete(id);
    run.view.grow(false);
    this.#render(messages.length - 1);
    $("log").scrollTop = $("log").scrollHeight;
    this.app.keep(conversation);
    let failure = null;
    try {
      const options = { method: "POST", body: JSON.stringify(body), signal: run.control.signal };
      for await (const event of streamEvents(await call("v1/chat/completions", options))) {
        run.answer.take(event);
        run.draw();
        if (performance.now() - run.keptAt > KEEP_MS) {
          run.keptAt = performance.now();
          this.app.keep(conversation);
        }
      }
    } catch (error) {
      if (!run.control.signal.aborted) failure = error;
    }
    run.stopDrawing();
    this.#runs.delete(id);
    run.answer.end(run.control.signal.aborted ? "stopped" : failure ? "failed" : "");
    if (run.answer.isEmpty && message.meta.ending) {
      messages.pop(); // as if it had not been begun
      if (failure) this.#errors.set(id, failure);
    } else if (failure) {
      message.meta.error = failure.message;
    }
    if (failure?.isKey) this.app.askForKey(failure);
    this.app.keep(conversation);
    if (!isShown()) return;
    following(() => {
      if (messages.at(-1) === message) run.view.settle({});
      this.#render(messages.length);
    });
    if (message.tool_calls) run.view.node.querySelector(".calls textarea")?.focus();
  }

  #showState() {
    const { id, messages } = this.conversation, isRunning = this.#runs.has(id), waits = openCalls(messages).length > 0 && !isRunning;
    const hadFocus = [$("send"), $("stop"), $("input")].includes(document.activeElement);
    $("chat").classList.toggle("running", isRunning);
    $("send").hidden = isRunning;
    $("stop").hidden = !isRunning;
    $("input").disabled = $("send").disabled = waits;
    $("input").placeholder = waits ? "First the results of the tools" : "Message";
    if (hadFocus && !waits) $("input").focus();
  }
}

function fitInput() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight}px`;
}
