/** Small helpers for parts of the page. Text enters the page by `textContent` only, but for markdown.js. */

export const $ = (id) => document.getElementById(id);

export function make(tag, className = "", text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

export function button(text, onclick, className = "") {
  const node = make("button", className, text);
  node.type = "button";
  node.onclick = onclick;
  return node;
}

/** A button that does it when pressed a second time within three seconds, so that one slip does no harm. */
export function armedButton(text, question, onclick, className = "") {
  let timer = 0;
  const node = button(text, () => {
    clearTimeout(timer);
    if (node.textContent === question) {
      node.textContent = text;
      onclick();
      return;
    }
    node.textContent = question;
    timer = setTimeout(() => { node.textContent = text; }, 3000);
  }, className);
  return node;
}

/** [a button that copies what `text` returns], or [] where the browser does not let pages copy: without TLS. */
export function copyButton(text) {
  if (!navigator.clipboard) return [];
  const node = button("Copy", async () => {
    await navigator.clipboard.writeText(text());
    node.textContent = "Copied";
    setTimeout(() => { node.textContent = "Copy"; }, 1500);
  }, "plain");
  return [node];
}

/** Have the browser save a text as a file. */
export function download(name, type, text) {
  const link = make("a"), url = URL.createObjectURL(new Blob([text], { type }));
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export function number(value) {
  const digits = value >= 100 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
