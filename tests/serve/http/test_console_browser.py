"""The console in headless Chromium, as its users meet it: what it shows, keeps, sends, and does not let through."""

import json
import threading
import time

import pytest
import uvicorn
from support.app import Api, render_metrics
from support.browser import DESKTOP, PHONE, Browser, chromium
from support.sse_server import FakeServer

from rayllm.api.types import EngineStats
from rayllm.serve.http.metrics import FrontMetrics

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium or Chrome")

USAGE = {"prompt_tokens": 1234, "completion_tokens": 56, "total_tokens": 1290}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
MEMBER = {"type": "EngineMember", "model": "one", "index": 0, "node_id": "n1", "draining": False}
REPORT = {"version": "9.9", "pid": 77, "load": {"completions": 3, "queued_tokens": 4096}, "stop_in": None, "ranks": []}
CLUSTER = {
    "hosts": [
        {"node_id": "n1", "address": "10.0.0.1", "cpus": 8, "gpus": 2, "alive": True, "draining": False},
        {"node_id": "n2", "address": "10.0.0.2", "cpus": 8, "gpus": 2, "alive": False, "draining": False},
    ],
    "applications": [
        {
            "name": "rayllm",
            "answers": True,
            "engines": [REPORT | {"member": MEMBER, "num_recoveries": 0}],
            "servers": [],
            "incidents": [{"at": 1e9, "member": MEMBER, "seconds": 1.5}],
        }
    ],
}
MARKDOWN = """# Title

Some **bold** text with `code`, a [link](https://example.com/a), https://example.org and $x^2$, for $5 or $6.

| a | b |
|---|--:|
| 1 | **2** |

```python
def f(x):
    return "<b>" + x  # a comment
```

\\[
\\frac{1}{2}

+ \\left(\\begin{matrix}1\\\\2\\end{matrix}\\right) \\overbrace{abc}
\\]

- one
  - two

$\\notmath{$ end"""
ATTACKS = """<script>window.hit = 1</script><img src=x onerror="window.hit = 2"> <svg onload="window.hit = 3">

[a](javascript:window.hit=4) [b](data:text/html,<script>window.hit=5</script>) [c](/v1/models)
![d](https://example.com/d.png) ![e](data:image/png;base64,AAAA) <https://example.com/"onmouseover="window.hit=6>
<iframe srcdoc="<script>parent.hit=7</script>"></iframe><style>body { display: none }</style>

```<img src=x onerror=window.hit=8>
</code></pre><img src=x onerror="window.hit=9">
```

```html
<script>window.hit = 10</script><b onclick="window.hit = 11">&amp;</b>
```

$\\href{javascript:window.hit=12}{x}$ $\\htmlClass{a}{x}$ $\\includegraphics{https://example.com/p.png}$
$<img src=x onerror=window.hit=13>$

| <img src=x onerror=window.hit=14> |
|---|
| `<img src=x onerror=window.hit=15>` |
"""


class Model:
    """Answers by the last message: "attack", "markdown", "think", "fail", "break", "slow"; else it repeats it."""

    def __init__(self):
        self.go_on = threading.Event()

    def __call__(self, handler, body):
        said = body["messages"][-1]["content"]
        if said == "fail":
            error = {"message": "the queue is full", "type": "overloaded", "param": None, "code": "queue_full"}
            handler.whole(429, {"error": error})
            return
        handler.begin()
        if body.get("tools") and body["messages"][-1]["role"] == "user":
            self.call_tools(handler)
        elif said == "think":
            self.delta(handler, reasoning_content="Let me *see*.")
            self.delta(handler, content="Seen.")
        elif said == "break":
            self.delta(handler, content="It beg")
            handler.end("")
            return
        elif said == "slow":
            self.delta(handler, content="It begins")
            self.go_on.wait(20)
            self.delta(handler, content=" and ends")
        else:
            text = {"markdown": MARKDOWN, "attack": ATTACKS}.get(said, f"Answer {len(body['messages'])} to {said}")
            for start in range(0, len(text), 7):  # the blocks come in parts
                self.delta(handler, content=text[start : start + 7])
        handler.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": USAGE})
        handler.end()

    def call_tools(self, handler):
        for index, name in enumerate(("lookup", "lookup")):
            call = {"index": index, "id": f"call_{index}", "type": "function"}
            self.delta(handler, tool_calls=[call | {"function": {"name": name, "arguments": '{"word": '}}])
            self.delta(handler, tool_calls=[{"index": index, "function": {"arguments": f'"w{index}"}}'}}])

    def delta(self, handler, **delta):
        handler.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


API = Api()
STATES = {
    "/cluster?format=json": json.dumps(CLUSTER).encode(),
    "/metrics": render_metrics("m", EngineStats(num_running=2), FrontMetrics()),
}


def pages(path):
    """What a server has beside models and chats; the console's files are the app's own answers."""
    if path == "/" or path.startswith("/console/"):
        answer = API.get(path)
        return answer.headers, answer.content
    if path in STATES:
        return {"content-length": str(len(STATES[path]))}, STATES[path]
    return None


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def server():
    with FakeServer(Model(), pages=pages).running() as server:
        server.models = ["one", "two"]
        yield server


@pytest.fixture
def page(browser, server):
    """A new conversation. At its end the browser must have nothing to complain of, and have asked nobody else."""
    page = browser.page(server.url + "/")
    page.until("document.querySelector('#model').value")
    yield page
    assert page.expected_problems == page.problems
    others = [url for url in page.requested if not url.startswith((server.url, "blob:", "data:", "about:"))]
    assert others == []
    page.close()


def ask(page, text):
    """Send a message and wait for the end of the answer."""
    page.type(text, "#input")
    page.press("Enter")
    settled(page, text)


def settled(page, question):
    page.until(f"""!document.querySelector("#chat.running")
      && [...document.querySelectorAll(".bubble")].at(-1)?.textContent === {json.dumps(question)}
      && document.querySelector("#log > .answer:last-child > .foot, #log > .error")""")


def shown(page, selector):
    """The texts of the visible elements of a selector."""
    return page.run(f"""[...document.querySelectorAll({json.dumps(selector)})].filter((node) => node.checkVisibility())
      .map((node) => node.textContent)""")


def said(server):
    return [(message["role"], message["content"]) for message in server.bodies[-1]["messages"]]


def downloaded(browser, ending):
    """The text of the file that was saved last."""
    deadline = time.monotonic() + 20
    while not (found := list(browser.downloads.glob(f"*{ending}"))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    text = found[0].read_text()
    found[0].unlink()
    return text


def test_chat_is_streamed_counted_and_kept(page, server):
    ask(page, "hello there")
    assert shown(page, ".bubble") == ["hello there"]
    assert shown(page, ".answer > .text") == ["Answer 1 to hello there\n"]
    (meta,) = shown(page, ".meta")
    assert "1,234 tokens in" in meta and "56 out" in meta and "tokens/s" in meta and meta.startswith("one")
    page.type("two\nlines", "#input")
    page.press("Enter", shift=True)
    assert len(server.bodies[-1]["messages"]) == 1, "Shift+Enter does not send"
    page.click("#send")
    page.until("document.querySelectorAll('.answer > .foot').length === 2")
    assert said(server) == [("user", "hello there"), ("assistant", "Answer 1 to hello there"), ("user", "two\nlines")]
    assert "meta" not in server.bodies[-1]["messages"][1]
    page.reload()
    page.until("document.querySelectorAll('.answer > .foot').length === 2")
    assert shown(page, ".bubble") == ["hello there", "two\nlines"]
    assert shown(page, ".meta")[0] == meta
    assert "hello there" in shown(page, "#conversations a[aria-current]")


def test_edit_regenerate_and_branch(page, server):
    for text in ("first", "second"):
        ask(page, text)
    page.run("document.querySelector('.question .actions').scrollIntoView()")
    page.click(".question .actions button", "Edit")
    page.type("other", ".edit textarea")
    page.press("Enter")
    settled(page, "other")
    assert said(server) == [("user", "other")]
    assert shown(page, ".answer > .text") == ["Answer 1 to other\n"]
    ask(page, "third")
    asked = len(server.bodies)
    page.click(".answer:last-child button", "Regenerate")
    page.until("document.querySelectorAll('.answer > .foot').length === 2 && !document.querySelector('#chat.running')")
    assert len(server.bodies) == asked + 1
    assert said(server) == [("user", "other"), ("assistant", "Answer 1 to other"), ("user", "third")]
    page.run("document.querySelector('.answer .actions').lastChild.click()")
    page.until("document.querySelector('#title').value === 'other (branch)'")
    assert shown(page, ".bubble") == ["other"]
    assert shown(page, "#conversations a").count("other (branch)") == 1


def test_tools_are_called_and_answered_by_hand(page, server):
    page.click("summary", "Tools")
    page.type("[{", "#tools")
    page.type("go", "#input")
    page.press("Enter")
    assert page.run("document.querySelector('#tools').validationMessage").startswith("Not valid")
    assert page.run("document.querySelectorAll('.bubble').length") == 0
    page.type(json.dumps([TOOL]), "#tools")
    page.type("go", "#input")
    page.press("Enter")
    page.until("document.querySelectorAll('.call textarea').length === 2")
    assert server.bodies[-1]["tools"] == [TOOL] and server.bodies[-1]["tool_choice"] == "auto"
    assert shown(page, ".call-head code") == ["lookup", "lookup"]
    assert [json.loads(text) for text in shown(page, ".call pre")] == [{"word": "w0"}, {"word": "w1"}]
    assert page.run("document.querySelector('#input').disabled")
    page.reload()
    page.until("document.querySelectorAll('.call textarea').length === 2")
    page.type('{"means": 1}', ".call textarea")
    page.click(".calls button", "Send results")
    page.until(
        "document.querySelectorAll('.answer').length === 2 && document.querySelector('.answer:last-child > .foot')"
    )
    calls = server.bodies[-1]["messages"][1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ['{"word": "w0"}', '{"word": "w1"}']
    results = server.bodies[-1]["messages"][2:]
    assert [(each["role"], each["tool_call_id"], each["content"]) for each in results] == [
        ("tool", "call_0", '{"means": 1}'),
        ("tool", "call_1", ""),
    ]
    assert [json.loads(text or "null") for text in shown(page, ".call pre")][1] == {"means": 1}


def test_settings_belong_to_the_conversation(page, server):
    for field, value in (
        ("#system", "Be brief."),
        ("#temperature", "0.5"),
        ("#seed", "7"),
        ("#extra", '{"stop": ["x"]}'),
    ):
        page.run(f"document.querySelector('{field}').closest('details')?.setAttribute('open', '')")
        page.type(value, field)
    page.run("(() => { const m = document.querySelector('#model'); m.value = 'two'; m.onchange(); })()")
    ask(page, "with settings")
    body = server.bodies[-1]
    assert body["model"] == "two"
    assert (body["temperature"], body["seed"], body["stop"]) == (0.5, 7, ["x"])
    assert "top_p" not in body and "tools" not in body
    assert said(server) == [("system", "Be brief."), ("user", "with settings")]
    page.reload()
    page.until(
        "document.querySelector('#system').value === 'Be brief.' && document.querySelector('#model').value === 'two'"
    )
    assert page.run("document.querySelector('#temperature').value") == "0.5"


def test_reasoning_is_apart_and_folded(page):
    ask(page, "think")
    assert shown(page, ".answer > .text") == ["Seen.\n"]
    assert shown(page, ".reasoning summary")[0].startswith("Reasoning, ")
    assert not page.run("document.querySelector('.reasoning').open")
    page.click(".reasoning summary")
    assert (
        page.until("document.querySelector('.reasoning').open && document.querySelector('.reasoning em').textContent")
        == "see"
    )


def test_markdown_code_and_mathematics(page):
    ask(page, "markdown")
    text = ".answer > .text "
    assert shown(page, text + "h1") == ["Title"]
    assert shown(page, text + "td") == ["1", "2"]
    assert page.run(f"getComputedStyle(document.querySelectorAll('{text}td')[1]).textAlign") == "right"
    links = page.run(f"[...document.querySelectorAll('{text}a')].map((a) => [a.href, a.target, a.rel])")
    assert [link[0] for link in links] == ["https://example.com/a", "https://example.org/"]
    assert {tuple(link[1:]) for link in links} == {("_blank", "noopener noreferrer nofollow")}
    assert shown(page, text + ".hljs-keyword") == ["def", "return"]
    assert shown(page, text + ".code pre") == ['def f(x):\n    return "<b>" + x  # a comment']
    page.until(f"document.querySelectorAll('{text}.katex').length === 2")
    assert page.run(f"document.querySelectorAll('{text}.katex-display').length") == 1
    assert "for $5 or $6" in shown(page, text + "p")[0]
    page.until("document.fonts.check('16px KaTeX_Main')")
    assert shown(page, text + ".bad-math") == ["\\notmath{"]
    assert page.run(f"document.querySelectorAll('{text}ul ul li').length") == 1
    page.expected_problems = []


def test_markdown_of_a_growing_text_is_that_of_the_whole(page):
    """Blocks that have not changed stay in the page; what is around them must not differ for that."""
    grown, whole, kept = page.run(f"""(async () => {{
      const {{ Markdown }} = await import("/console/markdown.js"), text = {json.dumps(MARKDOWN)};
      const [one, other] = [0, 1].map(() => document.body.appendChild(document.createElement("div")));
      const growing = new Markdown(one);
      for (let end = 1; end <= text.length; end++) {{
        growing.write(text.slice(0, end));
        if (end === 100) one.firstChild.id = "kept";
      }}
      new Markdown(other).write(text);
      while (one.querySelectorAll(".katex").length + other.querySelectorAll(".katex").length < 4)
        await new Promise((resolve) => setTimeout(resolve, 10));
      const kept = one.firstChild.id;
      one.firstChild.removeAttribute("id");
      return [one.innerHTML, other.innerHTML, kept];
    }})()""")
    assert grown == whole
    assert kept == "kept"


def test_readings_sum_labels_and_see_restarts(page):
    first = render_metrics('m}"x', EngineStats(num_running=2, generation_tokens=50), FrontMetrics()).decode()
    found = page.run(f"""(async () => {{
      const {{ Reading, rate }} = await import("/console/figures.js");
      const one = new Reading({json.dumps(first)}), two = new Reading(
        'rayllm:generation_tokens_total{{engine="0"}} 70.0\\nrayllm:generation_tokens_total{{engine="1"}} 80.0\\n'
        + 'rayllm:kv_cache_usage_perc{{engine="0"}} 0.2\\nrayllm:kv_cache_usage_perc{{engine="1"}} 0.4\\n');
      two.at = one.at + 2000;
      return [one.get("num_requests_running"), rate(two, one, "generation_tokens_total"),
        two.mean("kv_cache_usage_perc"), Number.isNaN(rate(one, two, "generation_tokens_total")),
        Number.isNaN(rate(one, null, "generation_tokens_total")), Number.isNaN(two.get("num_requests_running"))];
    }})()""")
    assert found == [2, pytest.approx(50), pytest.approx(0.3), True, True, True]


def test_what_a_model_writes_can_do_nothing(page, server):
    ask(page, "attack")
    page.until("document.querySelector('.answer .katex, .answer .bad-math')")
    time.sleep(0.1)  # for images that fail to load
    assert page.run("window.hit ?? null") is None
    text = ".answer > .text "
    assert (
        page.run(
            f"document.querySelectorAll('{text}:is(script, img, svg:not(.katex svg), iframe, style, [onerror])').length"
        )
        == 0
    )
    links = page.run(f"[...document.querySelectorAll('{text}a[href]')].map((a) => a.getAttribute('href'))")
    assert links and all(link.startswith("https://example.com/") for link in links)
    assert "<script>window.hit = 1</script>" in shown(page, text)[0]
    page.type("<img src=x onerror=window.hit=16>", "#input")
    page.press("Enter")
    page.until("document.querySelectorAll('.answer > .foot').length === 2")
    assert page.run("window.hit ?? null") is None
    assert not [url for url in page.requested if "example.com" in url or url.endswith("/x")]


def test_errors_are_said_in_words_and_can_be_tried_again(page, server):
    ask(page, "fail")
    assert shown(page, ".error b") == ["Error 429"] and shown(page, ".error p") == ["the queue is full"]
    assert shown(page, ".bubble") == ["fail"]
    asked = len(server.bodies)
    page.click(".error button", "Try again")
    page.until("document.querySelector('.error') && !document.querySelector('#chat.running')")
    assert len(server.bodies) == asked + 1
    page.click("#new-chat")
    page.until("!document.querySelector('.bubble')")
    ask(page, "break")
    assert shown(page, ".answer > .text") == ["It beg\n"]
    assert "broke off" in shown(page, ".error p")[0]
    page.expected_problems = [problem for problem in page.problems if " 429 " in problem]
    assert len(page.expected_problems) == 2


def test_escape_stops_and_other_conversations_go_on(page, server):
    server.answer.go_on.clear()
    page.type("slow", "#input")
    page.press("Enter")
    page.until("document.querySelector('.answer.busy')?.textContent.includes('It begins')")
    page.press("Escape")
    settled(page, "slow")
    assert shown(page, ".answer > .text") == ["It begins\n"] and "stopped" in shown(page, ".meta")[0]
    page.click("#new-chat")
    page.until("!document.querySelector('.bubble')")
    page.type("slow", "#input")
    page.press("Enter")
    page.until("document.querySelector('.answer.busy')?.textContent.includes('It begins')")
    page.click("#new-chat")
    page.until("!document.querySelector('.bubble')")
    ask(page, "meanwhile")
    server.answer.go_on.set()
    page.run("[...document.querySelectorAll('#conversations a')].filter((a) => a.textContent === 'slow')[0].click()")
    settled(page, "slow")
    assert shown(page, ".answer > .text") == ["It begins and ends\n"]


def test_list_search_rename_delete(page):
    for text in ("apples", "pears"):
        page.click("#new-chat")
        page.until("!document.querySelector('.bubble')")
        ask(page, text)
    page.type("Fruit", "#title")
    page.press("Enter")
    page.until("document.querySelector('#conversations a[aria-current]').textContent === 'Fruit'")
    page.type("answer PEARS", "#search")
    page.until("document.querySelectorAll('#conversations a').length === 1")
    assert shown(page, "#conversations a") == ["Fruit"]
    page.click("#bar-actions button", "Delete")
    page.click("#bar-actions button", "Really delete?")
    page.until("document.querySelectorAll('#conversations a').length === 0 && !document.querySelector('.bubble')")
    page.type(" ", "#search")
    page.until("document.querySelectorAll('#conversations a').length > 0")
    assert "apples" in shown(page, "#conversations a") and "Fruit" not in shown(page, "#conversations a")


def test_export_and_import(page, browser, server, tmp_path):
    page.type("Be brief.", "#system")
    ask(page, "think")
    ask(page, "to keep")
    page.click("#bar-actions button", "↓ JSON")
    kept = json.loads(downloaded(browser, "think.json"))
    assert [message["role"] for message in kept["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert kept["messages"][2] == {"role": "assistant", "content": "Seen.", "reasoning_content": "Let me *see*."}
    page.click("#bar-actions button", "↓ Markdown")
    assert downloaded(browser, "think.md") == (
        "# think\n\n## System\n\nBe brief.\n\n## User\n\nthink\n\n## Assistant (one)\n\n> Let me *see*.\n\nSeen.\n\n"
        "## User\n\nto keep\n\n## Assistant (one)\n\nAnswer 4 to to keep\n"
    )
    page.click("#export-all")
    everything = downloaded(browser, ".json")
    assert kept["id"] in [each["id"] for each in json.loads(everything)["conversations"]]
    page.click("#bar-actions button", "Delete")
    page.click("#bar-actions button", "Really delete?")
    page.until("!document.querySelector('.bubble')")
    file = tmp_path / "all.json"
    file.write_text(everything)
    page.choose_file("#import-file", file)
    page.until("document.querySelector('#notice').textContent.includes('1 conversation imported')")
    page.run(f"location.hash = '#/c/{kept['id']}'")
    page.until("document.querySelectorAll('.answer > .foot').length === 2")
    assert shown(page, ".bubble") == ["think", "to keep"]
    assert page.run("document.querySelector('#system').value") == "Be brief."
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]}))
    page.choose_file("#import-file", file)
    page.until("document.querySelector('#notice').textContent.includes('messages[1] has no role that is known')")


def test_tabs_share_what_is_kept(page, browser, server):
    other = browser.page(server.url + "/")
    other.until("document.querySelector('#model').value")
    ask(other, "from another tab")
    page.until("document.querySelector('#conversations a')?.textContent === 'from another tab'")
    page.click("#conversations a", "from another tab")
    page.until("document.querySelectorAll('.answer > .foot').length === 1")
    ask(other, "and on")
    page.until("document.querySelectorAll('.answer > .foot').length === 2")
    other.close()


def test_what_is_kept_is_bounded(page):
    count, oldest = page.run("""(async () => {
      const { MAX_CONVERSATIONS, Store } = await import("/console/store.js"), store = await Store.open();
      store.channel = { postMessage() {} }; // the page need not know
      const before = (await store.all()).length;
      for (let n = 0; n < MAX_CONVERSATIONS + 5; n++) await store.put({ id: `old${n}`, updated: n, messages: [] });
      const kept = await store.all(), old = kept.filter(({ id }) => id.startsWith("old"));
      for (const { id } of old) await store.delete(id);
      return [kept.length - MAX_CONVERSATIONS, old.at(-1).updated - before];
    })()""")
    assert (count, oldest) == (0, 5), "those used longest ago made room"


def test_the_cluster(page):
    page.click("#to-cluster")
    page.until("document.querySelectorAll('#cluster table').length === 3")
    assert shown(page, "#cluster .badge") == ["alive", "lost", "serves"]
    assert shown(page, "#cluster td")[8:13] == ["one 0", "serves", "10.0.0.1", "3", "4,096"]
    assert "workers replaced in 1.50 s" in shown(page, "#cluster td")
    page.click("#to-chat")
    page.until("document.querySelector('#composer').checkVisibility()")


def test_a_key_is_asked_for_and_kept_in_the_tab(page, server):
    server.key = "sk-1"
    try:
        ask(page, "locked")
        page.until("!document.querySelector('#key-form').hidden")
        page.type("sk-1", "#key")
        page.press("Enter")
        page.until("document.querySelector('#key-form').hidden")
        page.click(".error button", "Try again")
        page.until("document.querySelector('.answer > .foot')")
        assert server.keys[-1] == "Bearer sk-1"
        assert page.run("sessionStorage.getItem('rayllm-api-key')") == "sk-1"
        assert page.run("JSON.stringify(localStorage)") == "{}"
    finally:
        server.key = None
    page.expected_problems = [problem for problem in page.problems if " 401 " in problem]
    assert page.expected_problems


def test_a_phone(page):
    page.resize(PHONE)
    ask(page, "markdown")
    page.until("document.querySelector('.answer .katex')")

    def fits(selector):
        assert page.until(f"document.querySelector('{selector}').checkVisibility()")
        assert page.run("document.documentElement.scrollWidth") == PHONE["width"]
        wide = page.run(f"""[...document.querySelectorAll("body *")].filter((node) => {{
          const box = node.getBoundingClientRect();
          return node.checkVisibility() && box.width && (box.right > {PHONE["width"]} + 1 || box.left < -1)
            && !node.closest(".table, pre, [data-math], svg");
        }}).map((node) => node.outerHTML.slice(0, 100))""")
        assert wide == []

    fits("#composer")
    bottom = page.run("document.querySelector('#composer').getBoundingClientRect().bottom")
    assert PHONE["height"] - 40 < bottom <= PHONE["height"]
    page.click("#show-list")
    fits("#list")
    page.click("#conversations a", "markdown")
    page.until("document.querySelector('#shade').hidden")
    page.click("#show-side")
    fits("#settings")
    assert not page.run("document.querySelector('#figures').closest('aside').hidden")
    page.click("#show-side")
    page.click("#to-cluster")
    fits("#cluster")
    page.until("document.querySelector('#cluster table')")
    fits("#cluster table")


def test_dark_and_light(page):
    def colours():
        code = "getComputedStyle(document.querySelector('{}')).backgroundColor"
        return {page.run(code.format(name)) for name in ("body", "#list", "#composer")}

    page.prefer(prefers_color_scheme="light")
    light = colours()
    page.prefer(prefers_color_scheme="dark")
    assert not light & colours()


def test_the_real_app_with_its_figures(browser):
    """The app with a fake engine, over HTTP, as it is served."""
    server = uvicorn.Server(uvicorn.Config(Api().app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server could not be started"
        time.sleep(0.01)
    page = browser.page(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/", DESKTOP)
    page.until("document.querySelector('#model').value === 'org/fake'")
    page.until("document.querySelector('.figure dd').textContent.trim() === '2'")
    assert len(shown(page, "#figures .figure")) == 8
    assert "25 %" in [text.strip() for text in shown(page, "#figures dd")]
    ask(page, "hi")
    assert shown(page, ".answer > .text") == ["abc\n"]
    assert page.problems == []
    page.close()
    server.should_exit = True
    thread.join(timeout=10)
