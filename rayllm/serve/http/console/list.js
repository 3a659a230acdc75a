/** The list of conversations: the one used last first, by day; searched by their whole text. */

import { matches, titleOf } from "./conversation.js";
import { $, make } from "./dom.js";
import { MAX_CONVERSATIONS } from "./store.js";

const DAY_MS = 24 * 60 * 60 * 1000;

export class ConversationList {
  #known = new Map(); // id -> {id, title, updated}
  #found = null; // ids that the search found; null without a search
  #current = "";
  #timer = 0;

  constructor(store) {
    this.store = store;
    $("search").oninput = () => {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#search(), 150);
    };
  }

  async load() {
    this.#known = new Map((await this.store.all()).map((each) => [each.id, summary(each)]));
    await this.#search();
  }

  changed(conversation) {
    this.#known.set(conversation.id, summary(conversation));
    this.#found?.add(conversation.id);
    this.#draw();
  }

  removed(id) {
    this.#known.delete(id);
    this.#draw();
  }

  select(id) {
    this.#current = id;
    this.#draw();
  }

  async #search() {
    const query = $("search").value.trim();
    this.#found = query ? new Set((await this.store.all()).filter((each) => matches(each, query)).map((each) => each.id)) : null;
    this.#draw();
  }

  #draw() {
    const shown = [...this.#known.values()].filter(({ id }) => this.#found?.has(id) ?? true).sort((one, other) => other.updated - one.updated);
    const nodes = [];
    let day = "", list = null;
    for (const { id, title, updated } of shown) {
      if (dayOf(updated) !== day) {
        day = dayOf(updated);
        list = make("ul");
        nodes.push(make("h2", "", day), list);
      }
      const item = make("li"), link = make("a", "", title);
      link.href = `#/c/${id}`;
      link.title = title;
      if (id === this.#current) link.setAttribute("aria-current", "page");
      item.append(link);
      list.append(item);
    }
    $("conversations").replaceChildren(...nodes);
    const full = this.#known.size >= MAX_CONVERSATIONS;
    $("list-note").textContent = this.#found && !shown.length ? "Nothing found."
      : full ? `Full: beyond ${MAX_CONVERSATIONS} conversations, the one used longest ago goes.`
      : this.#known.size ? "Kept in this browser only." : "Conversations will be kept in this browser only.";
  }
}

function summary(conversation) { return { id: conversation.id, title: titleOf(conversation), updated: conversation.updated }; }

function dayOf(time) {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - time) / DAY_MS);
  return days < 1 ? "Today" : days < 2 ? "Yesterday" : days < 8 ? "Last 7 days" : "Older";
}
