/**
 * Mathematics in Markdown: $...$ and \(...\) in a line, $$...$$ and \[...\] on their own. KaTeX sets it.
 *
 * A dollar opens a formula only before something that is no space, and closes it only after something that is no space
 * and not before a digit, so that "$5 and $6" are amounts of money.
 */

const PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];
const MAX_LINES = 200; // of a formula; its end is not looked for beyond
let katex = null; // a promise of it, once there was a formula

/** A plugin of markdown-it. A formula becomes an element with `data-math` whose text is its TeX. */
export function math(md) {
  md.inline.ruler.before("escape", "math", inlineRule);
  md.block.ruler.before("fence", "math", blockRule, { alt: ["paragraph", "reference", "blockquote", "list"] });
  for (const kind of ["math_inline", "math_block"]) {
    md.renderer.rules[kind] = (tokens, index) => {
      const { content, meta } = tokens[index], tag = kind === "math_block" ? "div" : "span";
      return `<${tag} data-math="${meta.display ? "display" : "inline"}">${md.utils.escapeHtml(content)}</${tag}>`;
    };
  }
}

function inlineRule(state, silent) {
  const { src, pos, posMax } = state;
  const pair = PAIRS.find(([open]) => src.startsWith(open, pos));
  if (!pair) return false;
  const [open, close, display] = pair, start = pos + open.length;
  let end = src.indexOf(close, start);
  if (open === "$") {
    if (/\s/.test(src[start] ?? " ")) return false;
    while (end >= 0 && (/[\s\\]/.test(src[end - 1]) || /\d/.test(src[end + 1] ?? ""))) end = src.indexOf(close, end + 1);
  }
  if (end < 0 || end + close.length > posMax || !src.slice(start, end).trim()) return false;
  if (!silent) {
    const token = state.push("math_inline", "", 0);
    token.content = src.slice(start, end);
    token.meta = { display };
  }
  state.pos = end + close.length;
  return true;
}

/** Lines from an opening mark at the start of a line to its closing mark at the end of one, blank lines included. */
function blockRule(state, startLine, endLine, silent) {
  const lineOf = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
  if (state.sCount[startLine] - state.blkIndent >= 4) return false; // code
  const first = lineOf(startLine);
  const pair = PAIRS.find(([open, , display]) => display && first.startsWith(open));
  if (!pair) return false;
  const [open, close] = pair, lines = [first.slice(open.length)];
  let line = startLine;
  while (!lines.at(-1).trimEnd().endsWith(close)) {
    line += 1;
    if (line >= endLine || lines.length >= MAX_LINES || lines.at(-1).includes(close)) return false; // it goes on after the formula, or never ends
    if (lineOf(line) && state.sCount[line] < state.blkIndent) return false; // the end of a list's item
    lines.push(lineOf(line));
  }
  const text = lines.join("\n").trimEnd().slice(0, -close.length);
  if (!text.trim() || text.includes(close)) return false;
  if (silent) return true;
  const token = state.push("math_block", "", 0);
  token.block = true;
  token.content = text.trim();
  token.meta = { display: true };
  token.map = [startLine, line + 1];
  state.line = line + 1;
  return true;
}

/** Replace the TeX in an element by its formula. TeX that KaTeX does not understand stays, with the reason as title. */
export function setFormula(node) {
  const source = node.textContent;
  katex ??= import("./vendor/katex/katex.min.js").then(() => globalThis.katex); // 270 kB that few conversations need
  katex.then((library) => {
    try {
      library.render(source, node, { displayMode: node.dataset.math === "display", maxExpand: 200, maxSize: 40, strict: "ignore" });
    } catch (error) {
      node.classList.add("bad-math");
      node.textContent = source;
      node.title = error.message;
    }
  }, () => { katex = null; }); // not loaded: its TeX stays, and the next formula tries again
}
