/** The console: brings its parts together. What is shown is in the address: #/c/ID, #/cluster, or a new conversation. */

import { apiKey, modelNames } from "./api.js";
import { Chat } from "./chat.js";
import { ClusterView } from "./cluster.js";
import { exported, fileName, imported, markdownOf, newConversation, titleOf } from "./conversation.js";
import { $, armedButton, button, download, make } from "./dom.js";
import { Figures } from "./figures.js";
import { ConversationList } from "./list.js";
import { SettingsForm } from "./settings.js";
import { Memory, Store } from "./store.js";

const POLL_MS = 1500;
const narrow = matchMedia("(max-width: 820px)"), roomy = matchMedia("(min-width: 1100px)");

let notKept = "";
const store = await Store.open().catch((error) => {
  notKept = `This browser keeps no conversations (${error.message}): they last as long as this page.`;
  return new Memory();
});
const list = new ConversationList(store), cluster = new ClusterView(), figures = new Figures();
const chat = new Chat({ keep, branch, askForKey, settingsAreValid });
const settings = new SettingsForm(() => keepSoon());
let models = [];

// ---- Conversations.

/** Keep a conversation if there is anything in it. */
async function keep(conversation, isUsed = true) {
  if (!conversation.messages.length) return;
  if (isUsed) conversation.updated = Date.now();
  list.changed(conversation);
  if (conversation === chat.conversation) {
    if (location.hash === "" || location.hash === "#") history.replaceState(null, "", `#/c/${conversation.id}`);
    showBar();
    list.select(conversation.id);
  }
  try {
    for (const id of await store.put(conversation)) list.removed(id);
  } catch (error) {
    notice(`The conversation is not kept: ${error.message}`);
  }
}

let keepTimer = 0;
function keepSoon() {
  const { conversation } = chat;
  clearTimeout(keepTimer);
  keepTimer = setTimeout(() => keep(conversation, false), 300);
}

function branch(conversation, messages) {
  const copy = newConversation(conversation.model, conversation.settings, structuredClone(messages));
  copy.title = `${titleOf(conversation)} (branch)`.slice(0, 80);
  store.put(copy).then(() => {
    list.changed(copy);
    location.hash = `#/c/${copy.id}`;
  }, (error) => notice(`The branch is not kept: ${error.message}`));
}

function open(conversation) {
  chat.show(conversation);
  settings.show(conversation.settings);
  list.select(conversation.id);
  showModels();
  showBar();
}

async function route() {
  const isCluster = location.hash === "#/cluster", id = /^#\/c\/(\w+)$/.exec(location.hash)?.[1];
  cluster.show(isCluster);
  $("chat").hidden = isCluster;
  for (const [link, isHere] of [[$("to-chat"), !isCluster], [$("to-cluster"), isCluster]]) {
    isHere ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
  uncover();
  if (isCluster || (id && id === chat.conversation?.id)) return;
  const found = id && (chat.running(id) ?? await store.get(id));
  if (id && !found) notice("There is no such conversation in this browser any more.");
  if (found) open(found);
  else openNew();
}

function openNew() {
  const { model = models[0] ?? "", settings: same } = chat.conversation ?? {};
  open(newConversation(model, same));
  if (!narrow.matches) $("input").focus();
}

function showBar() {
  const { conversation } = chat;
  $("bar").hidden = !conversation.messages.length;
  document.title = conversation.messages.length ? `${titleOf(conversation)} - rayllm` : "rayllm console";
  if (document.activeElement !== $("title")) $("title").value = titleOf(conversation);
  $("to-chat").href = conversation.messages.length ? `#/c/${conversation.id}` : "#";
}

$("title").onchange = () => {
  chat.conversation.title = $("title").value.trim();
  keep(chat.conversation, false);
};
$("title").onkeydown = (event) => { if (event.key === "Enter") $("title").blur(); };
$("bar-actions").append(
  button("↓ JSON", () => save("json", "application/json", `${JSON.stringify(exported(chat.conversation), null, 1)}\n`), "plain"),
  button("↓ Markdown", () => save("md", "text/markdown", markdownOf(chat.conversation)), "plain"),
  armedButton("Delete", "Really delete?", async () => {
    const { id } = chat.conversation;
    chat.conversation.messages = []; // so that an answer that ends now is not kept
    chat.forget(id);
    list.removed(id);
    await store.delete(id);
    location.hash = "";
    openNew();
  }, "plain"),
);
for (const [node, name] of [[$("bar-actions").children[0], "Export as JSON"], [$("bar-actions").children[1], "Export as Markdown"]]) {
  node.title = name;
  node.setAttribute("aria-label", name);
}

function save(ending, type, text) { download(fileName(chat.conversation, ending), type, text); }

$("export-all").onclick = async () => {
  const conversations = (await store.all()).map(exported), day = new Date().toISOString().slice(0, 10);
  download(`rayllm-conversations-${day}.json`, "application/json", `${JSON.stringify({ conversations }, null, 1)}\n`);
};
$("import").onclick = () => $("import-file").click();
$("import-file").onchange = async () => {
  const [file] = $("import-file").files;
  if (!file) return;
  try {
    let taken = 0;
    for (const conversation of imported(await file.text())) {
      const known = await store.get(conversation.id);
      if (known && known.updated >= conversation.updated) continue; // it is here already, perhaps further on
      await store.put(conversation);
      taken += 1;
    }
    await list.load();
    await reopen();
    notice(`${taken} ${taken === 1 ? "conversation" : "conversations"} imported${taken ? "" : "; what is in the file is here already"}.`);
  } catch (error) {
    notice(`${file.name} cannot be imported: ${error.message}`);
  }
  $("import-file").value = "";
};
store.onchange(async (id) => { // in another tab
  await list.load();
  if (id === chat.conversation.id) await reopen();
});

/** Show the conversation as it is kept, unless an answer is being written in it here. */
async function reopen() {
  const found = chat.running(chat.conversation.id) ? null : await store.get(chat.conversation.id);
  if (found) open(found);
}
// "New chat" is a link to the empty address; where that is the address already, nothing would happen.
$("new-chat").onclick = () => {
  if (location.hash === "") openNew();
  uncover();
};
window.onhashchange = route;

// ---- The panels at the sides. On a narrow screen the list lies over the page, and the side takes its place.

function showList(shown) {
  document.body.classList.toggle("no-list", !shown);
  $("show-list").setAttribute("aria-expanded", String(shown));
  $("shade").hidden = !shown || roomy.matches;
}
function showSide(shown) {
  document.body.classList.toggle("no-side", !shown);
  $("show-side").setAttribute("aria-expanded", String(shown));
}
const fitPanels = () => {
  showList(roomy.matches);
  showSide(!narrow.matches);
};
$("show-list").onclick = () => showList(document.body.classList.contains("no-list"));
$("show-side").onclick = () => showSide(document.body.classList.contains("no-side"));
$("shade").onclick = () => showList(false);
/** Where a panel covers the page, get it out of the way of what was chosen, also if that is shown already. */
function uncover() {
  if (narrow.matches) showSide(false);
  if (!roomy.matches) showList(false);
}
for (const link of [$("to-chat"), $("to-cluster"), $("conversations")]) link.addEventListener("click", uncover);
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !roomy.matches) showList(false); });
for (const media of [narrow, roomy]) media.onchange = fitPanels;

function settingsAreValid() {
  if (settings.isValid) return true;
  showSide(true);
  return settings.report();
}

let noticeTimer = 0;
function notice(text) {
  clearTimeout(noticeTimer);
  $("notice").textContent = text;
  $("notice").hidden = false;
  noticeTimer = setTimeout(() => { $("notice").hidden = true; }, 8000);
}

// ---- Models, key and figures.

function showModels() {
  const { model } = chat.conversation;
  const options = [...models, ...(model && !models.includes(model) ? [model] : [])].map((name) => {
    const option = make("option", "", models.includes(name) ? name : `${name} (not served)`);
    option.value = name;
    return option;
  });
  if (!options.length) options.push(Object.assign(make("option", "", "no model yet"), { value: "" }));
  $("model").replaceChildren(...options);
  $("model").value = model;
}
$("model").onchange = () => {
  chat.conversation.model = $("model").value;
  keep(chat.conversation, false);
};

async function loadModels() {
  models = await modelNames();
  if (!chat.conversation.messages.length && !models.includes(chat.conversation.model)) chat.conversation.model = models[0] ?? "";
  showModels();
}

function askForKey(error) {
  $("key-reason").textContent = apiKey.get() ? error.message : "This server asks for a key.";
  if (!$("key-form").hidden) return;
  $("key-form").hidden = false;
  if (!$("chat").hidden) $("key").focus();
}
$("key-form").onsubmit = (event) => {
  event.preventDefault();
  apiKey.set($("key").value.trim());
  $("key").value = "";
  $("key-form").hidden = true;
  $("key-known").hidden = false;
  $("input").focus();
  poll();
};
$("key-known").hidden = !apiKey.get();
$("forget-key").onclick = () => {
  apiKey.set("");
  $("key-known").hidden = true;
  poll();
};

function showState(kind, text, note = "") {
  if ($("state").dataset.kind !== kind) $("state").firstElementChild.textContent = text;
  $("state").dataset.kind = kind;
  $("state").title = text;
  if ($("figures-note").textContent !== note) $("figures-note").textContent = note;
}

let timer = 0;
async function poll() {
  clearTimeout(timer);
  try {
    if (!models.length) await loadModels();
    showState("up", "connected", (await figures.read()) ? "" : "The engine does not answer; it may be restarting.");
  } catch (error) {
    figures.forget();
    models = [];
    if (error.isKey) askForKey(error);
    showState("down", error.title ?? "no connection", `No figures: ${error.title ? `${error.title}: ` : ""}${error.message}`);
  }
  clearTimeout(timer);
  if (!document.hidden && $("key-form").hidden) timer = setTimeout(poll, POLL_MS);
}
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  figures.forget();
  poll();
});

fitPanels();
if (notKept) notice(notKept);
await list.load();
await route();
if (!chat.conversation) openNew();
poll();
