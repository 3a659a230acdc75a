// The snippets of docs/clients.md whose fences say `js node`, against the server at RAYLLM_TEST_URL.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { test } from "node:test";
import { promisify } from "node:util";

const page = readFileSync(new URL("../../../docs/clients.md", import.meta.url), "utf8");
const snippets = [...page.matchAll(/^```js node\n(.*?)^```$/gms)].map((match) => match[1]);
const folder = new URL("node_modules/.snippets/", import.meta.url); // beside the packages that they import

assert.ok(snippets.length > 0);
mkdirSync(folder, { recursive: true });
snippets.forEach((text, index) =>
  test(`snippet ${index}`, async () => {
    const file = new URL(`${index}.mjs`, folder);
    writeFileSync(file, text.replaceAll("http://127.0.0.1:8000", process.env.RAYLLM_TEST_URL));
    const { stdout } = await promisify(execFile)(process.execPath, [file.pathname]);
    assert.ok(stdout.trim());
  }),
);
