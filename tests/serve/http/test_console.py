"""The console's files as the server gives them: headers, policy, keys, and that they need no other host."""

import base64
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath

import pytest
from support.app import Api, error_of, render_metrics

import rayllm.serve.http
from rayllm.api.types import EngineStats
from rayllm.config.options import ServerConfig
from rayllm.serve.http.auth import load_api_keys
from rayllm.serve.http.metrics import HISTOGRAMS, FrontMetrics

FOLDER = Path(rayllm.serve.http.__file__).with_name("console")
SERVED = (".css", ".html", ".js", ".mjs", ".svg", ".woff2")
FILES = [str(path.relative_to(FOLDER)) for path in sorted(FOLDER.rglob("*")) if path.suffix in SERVED]
OWN = {name: (FOLDER / name).read_text() for name in FILES if not name.startswith("vendor/")}
MODULES = {name: text for name, text in OWN.items() if name.endswith(".js")}
PAGE = OWN["index.html"]
API = Api()
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.all = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.all.append((tag, dict(attrs)))


ELEMENTS = Elements(PAGE).all


def test_the_policy_allows_this_server_and_nothing_else():
    policy = API.get("/").headers["content-security-policy"]
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    assert allowed["default-src"] == "'none'"
    for name in ("script-src", "style-src", "font-src", "connect-src"):
        assert allowed[name] == "'self'"
    assert allowed["img-src"] == "'self' data:"
    assert {allowed[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert allowed["require-trusted-types-for"] == "'script'"
    assert allowed["trusted-types"] == "dompurify"
    assert policy.count("unsafe") == 1 and allowed["style-src-attr"] == "'unsafe-inline'"


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served(name):
    answer = API.get(f"/console/{name}")
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == TYPES[PurePosixPath(name).suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_the_page():
    answer = API.get("/")
    assert (answer.status_code, answer.text) == (200, PAGE)
    assert answer.headers["content-type"] == TYPES[".html"]
    assert API.request("HEAD", "/").headers["etag"] == answer.headers["etag"]


def test_what_a_browser_has_is_not_sent_again():
    for path in ("/", "/console/app.js"):
        etag = API.get(path).headers["etag"]
        answer = API.request("GET", path, headers={"if-none-match": f'"other", {etag}'})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", etag)
        assert API.request("GET", path, headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["", "nothing.js", "vendor", "vendor/README.md", "../console.py", "..%2fconsole.py", "%2e%2e/app.py", "/app.js"],
)
def test_other_paths_are_not_found(path):
    error_of(API.get(f"/console/{path}"), 404)


def test_keys_are_required():
    guarded = Api(keys=load_api_keys(ServerConfig(api_key="sk-1"), {}))
    password = base64.b64encode(b"anyone:sk-1").decode()
    for path in ("/", "/console/app.js", "/console/nothing"):
        answer = guarded.get(path)
        error_of(answer, 401)
        assert answer.headers["www-authenticate"].startswith("Basic "), "so that a browser asks for the password"
    for scheme in (f"Basic {password}", "Bearer sk-1"):
        for path in ("/", "/console/app.js"):
            assert guarded.request("GET", path, headers={"authorization": scheme}).status_code == 200
    error_of(guarded.request("GET", "/consoles", headers={"authorization": f"Basic {password}"}), 401)
    error_of(guarded.request("GET", "/cluster", headers={"authorization": f"Basic {password}"}), 401)


def test_the_cluster_as_text_and_as_json():
    assert API.get("/cluster").headers["content-type"].startswith("text/plain")
    answer = API.get("/cluster?format=json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"hosts": [], "applications": []}
    assert "format" in error_of(API.get("/cluster?format=xml"), 400)["message"]


def test_it_is_small():
    assert sum((FOLDER / name).stat().st_size for name in FILES) < 1_100_000  # bytes


def test_no_other_host():
    for name, text in OWN.items():
        found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text))
        assert found <= {"http://www.w3.org"}, name  # the name of SVG
    assert re.findall(r"@import|url\(", OWN["style.css"]) == []
    for tag, attributes in ELEMENTS:
        for link in (attributes.get("src"), attributes.get("href")):
            assert link is None or link.startswith("#") or link.removeprefix("console/") in FILES, (tag, link)


def test_what_files_refer_to_is_there():
    for name, text in MODULES.items():
        for target in re.findall(r'(?:from |import |import\()"\./([^"]+)"', text):
            assert target in FILES, (name, target)
    for url in re.findall(r"url\((fonts/[^)]+\.woff2)\)", (FOLDER / "vendor/katex/katex.min.css").read_text()):
        assert f"vendor/katex/{url}" in FILES


def test_the_libraries_are_those_of_the_readme():
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) \|", (FOLDER / "vendor/README.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == ["markdown-it", "dompurify", "@highlightjs/cdn-assets", "katex"]
    for name, version in rows:
        folder = FOLDER / "vendor" / name.lstrip("@").split("/")[0]
        assert (folder / "LICENSE").stat().st_size > 500
        if name != "markdown-it":  # whose bundle does not say it
            assert any(version in file.read_text() for file in folder.glob("*.js")), name


def test_the_policy_does_not_break_the_page():
    """Scripts and styles in the page, and handlers in attributes, would be blocked, and so be dead."""
    for tag, attributes in ELEMENTS:
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag
        assert tag != "style" and (tag != "script" or attributes.keys() == {"type", "src"})


def test_text_never_becomes_markup_but_by_the_cleaner():
    sinks = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "setHTML",
        "document.write",
        "eval(",
        "Function(",
        "srcdoc",
    )
    for name, text in MODULES.items():
        assert not [sink for sink in sinks if sink in text], name
        assert ("DOMPurify.sanitize" in text) == (name == "markdown.js")


def test_every_control_has_a_name_for_screen_readers():
    labelled = re.findall(r"<label[^>]*>[^<]+<(?:input|textarea|select) id=\"(\w+)\"", PAGE)
    labelled += [attributes.get("for") for tag, attributes in ELEMENTS if tag == "label"]
    for tag, attributes in ELEMENTS:
        if tag in ("input", "textarea", "select"):
            assert attributes["id"] in labelled or attributes.get("aria-label"), attributes


def test_ids_of_the_modules_are_in_the_page():
    ids = {attributes["id"] for _, attributes in ELEMENTS if "id" in attributes}
    for name, text in MODULES.items():
        assert set(re.findall(r"\$\(\"([\w-]+)\"\)", text)) <= ids, name
    assert {"temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "system", "tools", "extra"} <= ids


def test_the_figures_are_ones_that_the_server_has():
    text = render_metrics("m", EngineStats(), FrontMetrics()).decode()
    names = set(re.findall(r"^rayllm:(\w+)", text, re.MULTILINE))
    used = set(re.findall(r"(?:get|mean)\(\"(\w+)\"\)|(?:last, )\"(\w+)\"(?:, \"(\w+)\")?", MODULES["figures.js"]))
    flat = {name for group in used for name in group if name}
    assert len(flat) == 9
    for name in flat:
        assert name in names or name in HISTOGRAMS, name


def test_modules_are_javascript():
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    for text in MODULES.values():
        done = subprocess.run([node, "--check", "--input-type=module"], input=text, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
