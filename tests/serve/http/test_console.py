"""The console page: what the browser is told to allow, that it needs no other host, and that text stays text."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import threading
import time
from html.parser import HTMLParser

import pytest
import uvicorn
from support.app import Api, render_metrics

from rayllm.api.types import EngineStats
from rayllm.serve.http.console import console_page
from rayllm.serve.http.metrics import HISTOGRAMS, FrontMetrics

PAGE = console_page().body.decode()
SCRIPT = re.search(r"<script>(.*?)</script>", PAGE, re.DOTALL)[1]
STYLE = re.search(r"<style>(.*?)</style>", PAGE, re.DOTALL)[1]


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.all = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.all.append((tag, dict(attrs)))


ELEMENTS = Elements(PAGE).all


def policy():
    parts = (part.split(" ", 1) for part in console_page().headers["content-security-policy"].split("; "))
    return dict(parts)


def source_of(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_policy_allows_this_page_and_nothing_else():
    allowed = policy()
    assert allowed["default-src"] == "'none'"
    assert allowed["script-src"] == source_of(SCRIPT)
    assert allowed["style-src"] == source_of(STYLE)
    assert allowed["connect-src"] == "'self'"
    assert {allowed[name] for name in ("base-uri", "form-action", "frame-ancestors", "trusted-types")} == {"'none'"}
    assert allowed["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in str(allowed)


def test_headers():
    headers = console_page().headers
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert int(headers["content-length"]) == len(PAGE.encode()) < 64 * 2**10


def test_the_app_has_it():
    answer = Api().get("/")
    assert (answer.status_code, answer.text) == (200, PAGE)
    assert answer.headers["content-security-policy"] == console_page().headers["content-security-policy"]


def test_no_other_host_and_no_other_file():
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+", PAGE) == []
    assert "@import" not in STYLE and "url(" not in STYLE
    for tag, attributes in ELEMENTS:
        assert "src" not in attributes, tag
        assert attributes.get("href") in (None, "data:,"), tag


def test_the_policy_does_not_break_the_page():
    """Handlers and styles in attributes would be blocked, and so be dead."""
    for tag, attributes in ELEMENTS:
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag


def test_text_never_becomes_markup():
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc"):
        assert sink not in SCRIPT


def test_every_control_has_a_name_for_screen_readers():
    labelled = re.findall(r"<label[^>]*>[^<]+<(?:input|textarea) id=\"(\w+)\"", PAGE)
    labelled += [attributes.get("for") for tag, attributes in ELEMENTS if tag == "label"]
    for tag, attributes in ELEMENTS:
        if tag in ("input", "textarea", "select"):
            assert attributes["id"] in labelled or attributes.get("aria-label"), attributes


def test_ids_of_the_script_are_in_the_page():
    ids = {attributes["id"] for _, attributes in ELEMENTS if "id" in attributes}
    assert set(re.findall(r"\$\(\"([\w-]+)\"\)", SCRIPT)) <= ids
    assert {"temperature", "top_p", "top_k", "max_tokens", "seed"} <= ids


def test_the_figures_are_ones_that_the_server_has():
    text = render_metrics("m", EngineStats(), FrontMetrics()).decode()
    names = set(re.findall(r"^rayllm:(\w+)", text, re.MULTILINE))
    used = set(re.findall(r"(?:get|mean)\(\"(\w+)\"\)|(?:last, )\"(\w+)\"(?:, \"(\w+)\")?", SCRIPT))
    flat = {name for group in used for name in group if name}
    assert len(flat) == 9
    for name in flat:
        assert name in names or name in HISTOGRAMS, name


# The script's own functions, run in node where there is one.

_STUBS = """
const nothing = () => stub;
const stub = new Proxy(function () {}, {
  get: (_, key) => key === Symbol.toPrimitive ? () => "" : key === Symbol.iterator ? [][Symbol.iterator] : stub,
  set: () => true, apply: nothing, construct: nothing,
});
const location = { origin: "", pathname: "" }, sessionStorage = { getItem: () => null };
const document = stub, window = {}, navigator = {};
const fetch = () => Promise.reject(new Error("no server"));
"""


def in_node(code):
    """What the expression `code` is worth in the page's script."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    script = _STUBS + SCRIPT.replace('"use strict";', "") + f"\nconsole.log(JSON.stringify({code})); process.exit(0);"
    done = subprocess.run([node, "-"], input=script, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_markdown_blocks():
    text = "# Title\ntext\nmore\n\n- a\n- b\n  goes on\n```py\n# no title\n\n- no item\n```\nend"
    blocks = in_node(f"splitBlocks({json.dumps(text)}).map(({{kind, lines}}) => [kind, lines.length])")
    assert blocks == [["heading", 1], ["text", 2], ["list", 3], ["code", 4], ["text", 1]]


def test_markdown_of_a_growing_text_is_that_of_the_whole():
    """Blocks are settled once what comes can't change them; cutting there must not change what follows."""
    text = "one\ntwo\n\n1. x\n2. y\n\n```\ncode\n\nmore\n```\n## h\n\n  - deep\n\nlast `code` line"
    code = f"""(() => {{
      const text = {json.dumps(text)}, kept = [];
      let settled = 0, open = [];
      for (let end = 1; end <= text.length; end++) {{
        const rest = text.slice(settled, end), blocks = splitBlocks(rest), first = firstOpen(blocks, rest);
        if (!blocks.length) continue;
        kept.push(...blocks.slice(0, first).map((b) => [b.kind, b.lines.join("\\n")]));
        open = blocks.slice(first).map((b) => [b.kind, b.lines.join("\\n")]);
        settled += blocks[first].start;
      }}
      return [[...kept, ...open], splitBlocks(text).map((b) => [b.kind, b.lines.join("\\n")])];
    }})()"""
    grown, whole = in_node(code)
    assert grown == whole
    assert [kind for kind, _ in whole] == ["text", "list", "code", "heading", "list", "text"]


def test_inline_markdown_leaves_code_like_text_alone():
    text = "a `b*c*` **bold** *it* *args, **kwargs 2*3*4 __init__ [x](javascript:y)"
    found = in_node(f"[...{json.dumps(text)}.matchAll(INLINE)].map((match) => match[0])")
    assert found == ["`b*c*`", "**bold**", "*it*"]


def test_readings_sum_labels_and_see_restarts():
    first = render_metrics('m}"x', EngineStats(num_running=2, generation_tokens=50), FrontMetrics()).decode()
    code = f"""(() => {{
      const one = new Reading({json.dumps(first)}), two = new Reading(
        'rayllm:generation_tokens_total{{engine="0"}} 70.0\\nrayllm:generation_tokens_total{{engine="1"}} 80.0\\n'
        + 'rayllm:kv_cache_usage_perc{{engine="0"}} 0.2\\nrayllm:kv_cache_usage_perc{{engine="1"}} 0.4\\n');
      two.at = one.at + 2000;
      return [one.get("num_requests_running"), rate(two, one, "generation_tokens_total"),
        two.mean("kv_cache_usage_perc"), Number.isNaN(rate(one, two, "generation_tokens_total")),
        Number.isNaN(rate(one, null, "generation_tokens_total")), Number.isNaN(two.get("num_requests_running"))];
    }})()"""
    assert in_node(code) == [2, pytest.approx(50), pytest.approx(0.3), True, True, True]


# In a browser, where there is one.


@pytest.fixture
def served():
    """The address of the app with a fake engine, on the loopback device."""
    server = uvicorn.Server(uvicorn.Config(Api().app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server could not be started"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join(timeout=10)


def test_the_page_runs_in_a_browser(served, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs Chromium or Chrome")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--virtual-time-budget=5000"]
    command = [browser, *flags, "--enable-logging=stderr", "--dump-dom", served]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert '<option value="org/fake">org/fake</option>' in done.stdout
    assert done.stdout.count('<div class="figure') == 8 + 1  # and the template
    assert "<dt>Running</dt><dd>2 <small></small></dd>" in done.stdout
    assert "<dt>KV cache in use</dt><dd>25 <small>%</small></dd>" in done.stdout
    assert "Content Security Policy" not in done.stderr
