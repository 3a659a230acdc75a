/** What comes of one request, put together from the events of its stream. */
export class Answer {
  /** message: the one of the conversation that grows. */
  constructor(message) {
    this.message = message;
    this.startedAt = performance.now();
    this.firstAt = this.lastAt = this.thoughtFrom = this.thoughtTo = this.usage = null;
  }

  get isThinking() { return this.thoughtFrom !== null && this.thoughtTo === null; }

  take({ usage, choices }) {
    if (usage) this.usage = usage;
    for (const { delta, finish_reason } of choices) {
      if (finish_reason) this.message.meta.finish = finish_reason;
      const { content, reasoning_content: thought, tool_calls: calls } = delta;
      if (!content && !thought && !calls?.length) continue;
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
      if (thought) this.#think(thought);
      if (content || calls?.length) this.thoughtTo ??= this.lastAt;
      if (content) this.message.content += content;
      for (const call of calls ?? []) this.#call(call);
    }
  }

  #think(text) {
    this.thoughtFrom ??= this.lastAt;
    this.message.reasoning_content = (this.message.reasoning_content ?? "") + text;
  }

  #call({ index, id, function: part }) {
    this.message.tool_calls ??= [];
    const call = this.message.tool_calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    if (id) call.id = id;
    call.function.name += part?.name ?? "";
    call.function.arguments += part?.arguments ?? "";
  }

  /** Note in the message how it came about. ending: "" or "stopped" or "failed". */
  end(ending) {
    const { meta } = this.message, now = performance.now();
    if (ending) meta.ending = ending;
    meta.seconds = (now - this.startedAt) / 1000;
    if (this.thoughtFrom !== null) meta.thought_seconds = ((this.thoughtTo ?? now) - this.thoughtFrom) / 1000;
    if (this.firstAt !== null) meta.first_seconds = (this.firstAt - this.startedAt) / 1000;
    if (!this.usage) return;
    const { prompt_tokens, completion_tokens, prompt_tokens_details: details } = this.usage;
    Object.assign(meta, { prompt_tokens, completion_tokens });
    if (details?.cached_tokens) meta.cached_tokens = details.cached_tokens;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    if (completion_tokens > 1 && seconds > 0) meta.tokens_per_second = (completion_tokens - 1) / seconds;
  }

  get isEmpty() {
    const { content, reasoning_content: thought, tool_calls: calls } = this.message;
    return !content && !thought && !calls;
  }
}
