/**
 * Markdown to parts of the page: markdown-it makes HTML, DOMPurify lets only harmless elements through, highlight.js
 * colours code and KaTeX sets mathematics.
 *
 * The text is a model's, so it is not trusted: HTML in it is shown as text, links need a click and open a tab of their
 * own that knows nothing of this one, and images are shown as links, because loading one would tell its host of it.
 */

import { copyButton, make } from "./dom.js";
import { math, setFormula } from "./math.js";
import hljs from "./vendor/highlightjs/highlight.min.js";
import markdownIt from "./vendor/markdown-it/markdown-it.esm.min.mjs";
import "./vendor/dompurify/purify.min.js";

const MAX_COLOURED = 50_000; // characters of a block of code; colouring longer ones would hold up the page
const OURS = ["data-align", "data-language", "data-math", "start"];
const CLEAN = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "title", ...OURS],
  ADD_URI_SAFE_ATTR: OURS,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const COLOURS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], ALLOW_ARIA_ATTR: false, ALLOW_DATA_ATTR: false, RETURN_DOM_FRAGMENT: true };

const md = markdownIt({ html: false, linkify: true, breaks: true }).use(math);
const escaped = md.utils.escapeHtml;
md.renderer.rules.fence = (tokens, index) => codeHtml(tokens[index].info.trim().split(/\s+/)[0], tokens[index].content);
md.renderer.rules.code_block = (tokens, index) => codeHtml("", tokens[index].content);
md.renderer.rules.image = (tokens, index, options, env) => {
  const token = tokens[index], text = md.renderer.renderInlineAsText(token.children, options, env);
  return `<a href="${escaped(token.attrGet("src"))}" title="Image, not loaded">${escaped(text || "image")}</a>`;
};
for (const kind of ["th_open", "td_open"]) {
  md.renderer.rules[kind] = (tokens, index) => {
    const align = /text-align:(\w+)/.exec(tokens[index].attrGet("style") ?? "")?.[1];
    return `<${tokens[index].tag}${align ? ` data-align="${align}"` : ""}>`;
  };
}

function codeHtml(language, code) {
  return `<pre data-language="${escaped(language)}"><code>${escaped(code)}</code></pre>`;
}

/** Shows a growing text in `root`. Blocks that have not changed stay in the page as they are. */
export class Markdown {
  constructor(root) {
    this.root = root;
    this.blocks = []; // {html, nodes}
  }

  write(text) {
    const env = {}, blocks = splitBlocks(md.parse(text, env)).map((tokens) => md.renderer.render(tokens, md.options, env));
    let same = 0;
    while (same < blocks.length && blocks[same] === this.blocks[same]?.html) same += 1;
    for (const { nodes } of this.blocks.splice(same)) for (const node of nodes) node.remove();
    for (const html of blocks.slice(same)) {
      const nodes = nodesOf(html);
      this.root.append(...nodes);
      this.blocks.push({ html, nodes });
    }
  }
}

/** Tokens of the outermost blocks, one list each. */
function splitBlocks(tokens) {
  const blocks = [];
  let depth = 0, block = [];
  for (const token of tokens) {
    block.push(token);
    depth += token.nesting;
    if (depth === 0) {
      blocks.push(block);
      block = [];
    }
  }
  return blocks;
}

function nodesOf(html) {
  const fragment = DOMPurify.sanitize(html, CLEAN);
  for (const link of fragment.querySelectorAll("a")) {
    link.rel = "noopener noreferrer nofollow";
    link.target = "_blank";
    if (link.href && !link.title) link.title = link.href;
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = make("div", "table");
    box.tabIndex = 0; // it scrolls
    table.replaceWith(box);
    box.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) pre.replaceWith(codeNode(pre.dataset.language, pre.textContent.replace(/\n$/, "")));
  for (const node of fragment.querySelectorAll("[data-math]")) setFormula(node);
  return [...fragment.childNodes];
}

/** A block of code with its language and a button to copy it. */
export function codeNode(language, code) {
  const node = make("div", "code"), bar = make("div"), pre = make("pre");
  pre.tabIndex = 0; // it scrolls
  bar.append(make("span", "", language || "code"), ...copyButton(() => code));
  pre.append(coloured(language, code));
  node.append(bar, pre);
  return node;
}

function coloured(language, code) {
  const node = make("code");
  if (!language || code.length > MAX_COLOURED || !hljs.getLanguage(language)) {
    node.textContent = code;
  } else {
    const html = hljs.highlight(code, { language, ignoreIllegals: true }).value;
    node.append(DOMPurify.sanitize(html, COLOURS));
  }
  return node;
}
