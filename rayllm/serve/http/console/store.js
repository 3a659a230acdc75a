/**
 * Where conversations are kept: an IndexedDB database of this browser, at most MAX_CONVERSATIONS in it. When it is full,
 * the ones that were not used for longest make room. Tabs of one server share it.
 */

export const MAX_CONVERSATIONS = 500;

const request = (ask) => new Promise((resolve, reject) => {
  ask.onsuccess = () => resolve(ask.result);
  ask.onerror = () => reject(ask.error);
});

export class Store {
  constructor(database) {
    this.database = database;
    this.channel = new BroadcastChannel("rayllm-conversations");
    database.onversionchange = () => database.close();
  }

  /** Throws what the browser says if it keeps nothing, as in some private windows. */
  static async open() {
    const ask = indexedDB.open("rayllm", 1);
    ask.onupgradeneeded = () => ask.result.createObjectStore("conversations", { keyPath: "id" }).createIndex("updated", "updated");
    return new Store(await request(ask));
  }

  /** `listener(id)` is called when another tab has changed a conversation. */
  onchange(listener) { this.channel.onmessage = ({ data }) => listener(data); }

  get(id) { return request(this.#objects("readonly").get(id)); }

  /** All conversations, the one used last first. */
  async all() { return (await request(this.#objects("readonly").index("updated").getAll())).reverse(); }

  /** Returns the ids of those that made room. Throws QuotaExceededError if the browser gives no more. */
  async put(conversation) {
    const objects = this.#objects("readwrite");
    await request(objects.put(conversation));
    const keys = await request(objects.index("updated").getAllKeys()); // the one used longest ago first
    const gone = keys.slice(0, Math.max(0, keys.length - MAX_CONVERSATIONS));
    for (const key of gone) objects.delete(key);
    this.channel.postMessage(conversation.id);
    return gone;
  }

  async delete(id) {
    await request(this.#objects("readwrite").delete(id));
    this.channel.postMessage(id);
  }

  #objects(mode) { return this.database.transaction("conversations", mode).objectStore("conversations"); }
}

/** In place of a Store where the browser keeps nothing: for as long as the page is open. */
export class Memory {
  #kept = new Map();

  onchange() {}
  async get(id) { return structuredClone(this.#kept.get(id)); }
  async all() { return [...this.#kept.values()].map((each) => structuredClone(each)).sort((one, other) => other.updated - one.updated); }
  async put(conversation) {
    this.#kept.set(conversation.id, structuredClone(conversation));
    return [];
  }
  async delete(id) { this.#kept.delete(id); }
}
