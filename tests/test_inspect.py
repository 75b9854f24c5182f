"""fairseq-inf-inspect: its trace, its figures, its page in a real browser, and what it refuses."""

import csv
import json
import os
import random
import shutil
import tempfile

import commands
import numpy as np
import pytest
import torch
from conftest import BASELINES, MODEL, ROOT, fairseq, train

from fairseq_inf.analysis.figures import FIGURES, at_tokens, phrase
from fairseq_inf.analysis.trace import Trace, TraceWriter

LENGTH = 12
NASTY = [
    "<script>window.hacked=1</script>",
    "</script><img/src=x/onerror=window.hacked=1>",
    "&lt;b&gt;",
    "<!--",
    "naïve",
    "🧠",
    "$x_1$",
]
WORDS = [*(f"word{i}" for i in range(40)), *NASTY]
GIBBS = [*MODEL[: MODEL.index("--ltm-basis")], "--ltm-basis", "16"]
MEMORIES = {"sticky": MODEL, "gibbs": GIBBS, **BASELINES}


def lines(seed, count):
    draw = random.Random(seed)
    return "".join(" ".join(draw.choices(WORDS, k=40)) + "\n" for _ in range(count))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "train.txt").write_text(lines(0, 30))
    (folder / "text <b>.txt").write_text(lines(1, 6))
    prefixes = [x for s in ("train", "valid") for x in (f"--{s}pref", folder / "train.txt")]
    fairseq("preprocess", "--only-source", *prefixes, "--destdir", folder / "bin")
    return folder


@pytest.fixture(scope="module")
def inspected(data):
    """-> a function: the name of a memory -> the folder that an inspection with it has left"""

    def make(name):
        folder = data / name
        if not folder.exists():
            settings = ["--max-update", 8, "--disable-validation"]
            train(data / "bin", data / f"{name}-model", *settings, model=MEMORIES[name])
            printed = run(data, name, data / "text <b>.txt", "--output", folder)
            assert "open " in printed.splitlines()[-1]
        return folder

    return make


def asked(data, name, text, *args):
    path = data / f"{name}-model" / "checkpoint_last.pt"
    return [text, "--path", path, "--data", data / "bin", "--cpu", *args]


def run(*words):
    return commands.call("fairseq-inf-inspect", *asked(*words))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sticky", "gibbs", "compressive_transformer_lm"])
def test_a_folder_has_the_trace_the_figures_the_tables_and_the_page(inspected, name):
    folder = inspected(name)
    found = {path.name for path in folder.iterdir()}
    pictures = {f"{figure}.{kind}" for figure in FIGURES for kind in ("png", "svg")}
    assert found == pictures | {"trace", "index.html", "attended.csv", "phrases.csv"}
    assert not list(folder.parent.glob(".*"))
    trace = Trace(folder / "trace")
    tokens = len(lines(1, 6).split()) + 6  # and the ends of the lines
    assert trace.info["tokens"] == tokens == len(trace.column("tokens"))
    assert "".join(trace.words(0, tokens)) == lines(1, 6)
    for own in trace.info["layers"]:
        steps = list(trace.walk(f"own.{own['layer']}"))
        assert len(steps) == trace.info["segments"] == -(-tokens // LENGTH)
        places = trace.places(f"own.{own['layer']}")
        assert float(places.spaces().sum()) + places.begin == pytest.approx(1)
        density = trace.density(own["layer"], tokens - 1)
        masses = density.mass(places.edges())
        whole = density.mass(torch.tensor([places.begin, 1.0], dtype=torch.float64))
        assert torch.allclose(masses.sum(-1), whole[..., 0], atol=1e-6)
    with open(folder / "phrases.csv") as file:
        rows = list(csv.DictReader(file))
    kinds = {"linear"} if name.startswith("compressive") else {"linear", "sticky"}
    assert {row["memory"] for row in rows} == kinds


@pytest.mark.slow
def test_losses_with_and_without_the_memory_are_those_of_an_evaluation(inspected, data):
    trace = Trace(inspected("sticky") / "trace")
    from fairseq_inf.models.memory_lm import MemoryLM

    for kind, settings in (
        ("on", {}),
        ("off", {"ltm_enabled": False}),
        ("other", {"ltm_sticky": False}),
    ):
        hub = MemoryLM.from_pretrained(
            str(data / "sticky-model"), "checkpoint_last.pt", str(data / "bin"), **settings
        )
        expected = -hub.score(lines(1, 6))["positional_scores"]
        assert np.allclose(trace.column(f"loss.{kind}"), expected.numpy(), atol=1e-4)
    assert trace.info["sticky"] == [True, False]


@pytest.mark.slow
def test_figures_and_page_come_again_from_a_trace(inspected, data):
    again = data / "again"
    shutil.copytree(inspected("sticky") / "trace", again / "trace")
    (again / "letter").write_text("mine")
    words = ["--trace", inspected("gibbs") / "trace", "--output", again]
    code, printed = commands.run("fairseq-inf-inspect", words, ROOT)  # as a user does it
    assert code == 0 and "its files are replaced" in printed, printed
    assert (again / "letter").read_text() == "mine"
    for name in ("index.html", "phrases.csv", "attended.csv"):
        assert (again / name).read_bytes() == (inspected("gibbs") / name).read_bytes()


@pytest.mark.slow
def test_what_cannot_be_inspected_is_told_in_one_sentence(inspected, data, tmp_path):
    train(data / "bin", data / "transformer_xl_lm-model", "--max-update", 1, "--disable-validation",
          model=BASELINES["transformer_xl_lm"])  # fmt: skip
    inspected("sticky")
    text, empty, strange, latin = (
        data / "text <b>.txt",
        tmp_path / "e",
        tmp_path / "s",
        tmp_path / "l",
    )
    empty.write_text("")
    strange.write_text("nothing that anybody knows")
    latin.write_bytes(b"na\xefve")
    full = tmp_path / "full"
    full.mkdir()
    (full / "letter.txt").write_text("mine")
    old = tmp_path / "old"
    shutil.copytree(inspected("sticky") / "trace", old)
    info = json.loads((old / "trace.json").read_text())
    (old / "trace.json").write_text(json.dumps({**info, "format": "fairseq_inf trace 0"}))
    broken = tmp_path / "broken"
    shutil.copytree(inspected("sticky") / "trace", broken)
    whole = (broken / "trace.safetensors").read_bytes()
    (broken / "trace.safetensors").write_bytes(whole[: len(whole) // 2])
    out = tmp_path / "out"
    for words, sentence in (
        (asked(data, "transformer_xl_lm", text), "no long-term memory to look into"),
        (asked(data, "sticky", empty), "is empty: there must be something to read"),
        (asked(data, "sticky", strange), "is in the dictionary"),
        (asked(data, "sticky", latin), "is not UTF-8: convert it"),
        (asked(data, "sticky", text, "--output", full), "with other things in it: name a new one"),
        (asked(data, "sticky", text, "--output", empty), "is a file: name a folder"),
        (asked(data, "sticky", text, "--output", tmp_path / "a" / "b"), "does not exist"),
        (asked(data, "sticky", tmp_path / "gone"), "does not exist or is not a file"),
        (asked(data, "sticky", text, "--trace", old), "leave TEXT out"),
        (["--trace", old], "of another version ('fairseq_inf trace 0'"),
        (["--trace", broken], "cannot be read"),
        (["--trace", tmp_path], "it has no trace.json"),
    ):
        assert sentence in commands.refusal("fairseq-inf-inspect", "--output", out, *words)
    assert (full / "letter.txt").read_text() == "mine" and not out.exists()
    assert not list(tmp_path.glob(".*"))


def test_a_phrase_has_an_ellipsis_where_words_are_no_neighbours():
    assert phrase([" a", " b", " c", " d"], np.array([4, 5, 9, 10])) == " a b … c d"


def test_a_label_is_a_whole_word(tmp_path):
    writer = TraceWriter(tmp_path / "trace")
    pieces = [" un", "bel", "iev", "able", ",", " 12", "3", "\n"]
    ends = np.cumsum([len(piece) for piece in pieces])
    writer.add("text", np.frombuffer("".join(pieces).encode(), dtype="u1"))
    writer.add("ends", ends.astype("i8"))
    writer.close({"tokens": len(pieces), "layers": []})
    trace = Trace(tmp_path / "trace")
    found = [trace.whole_word(token) for token in range(len(pieces))]
    assert found == [" unbelievable"] * 4 + [",", " 123", " 123", "\n"]
    assert trace.begins == len(pieces)


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window; its console is asked after each test."""
    names = [os.environ.get("CHROME"), "chromium", "chromium-browser", "google-chrome", "chrome"]
    program = next((path for name in names if name and (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no browser: install chromium and chromium-driver, or name one by CHROME")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    with tempfile.TemporaryDirectory() as folder:
        for flag in (
            "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
            "disable-dev-shm-usage",
            "disable-background-networking", "disable-component-update", "disable-sync",
            "window-size=1300,900", f"user-data-dir={folder}",
        ):  # fmt: skip
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        found = webdriver.Chrome(options, webdriver.ChromeService(driver))
        yield found
        found.quit()


class Page:
    def __init__(self, browser, folder):
        self.browser = browser
        browser.get(f"file://{folder}/index.html")
        self.wait("return document.body.dataset.ready")

    def do(self, script, *args):
        return self.browser.execute_script(script, *args)

    def wait(self, script):
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.browser, 20).until(lambda _: self.do(script))

    def click(self, token):
        self.do("show(arguments[0])", token)
        span = self.do("const b = blockOf(arguments[0]); return b.spans[arguments[0] - b.a]", token)
        span.click()
        self.wait(f"return view.token === {token}")

    def press(self, key):
        from selenium.webdriver.common.by import By

        self.browser.find_element(By.TAG_NAME, "body").send_keys(key)

    def drawn(self):
        """After the next picture."""
        before = self.do("return Number(document.body.dataset.drawn)")
        self.do("draw()")
        self.wait(f"return Number(document.body.dataset.drawn) > {before}")

    def complaints(self):
        return self.browser.get_log("browser")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sticky", "gibbs", "compressive_transformer_lm"])
def test_the_page_shows_what_the_trace_says(inspected, browser, name):
    from selenium.webdriver.common.keys import Keys

    folder = inspected(name)
    trace, page = Trace(folder / "trace"), Page(browser, folder)
    tokens, segments = trace.info["tokens"], trace.info["segments"]
    whole = "\n".join(page.do("return blocks.map(b => b.made.textContent)"))
    assert whole.split() == lines(1, 6).split()
    assert page.do("return [info.begins, info.since.on]") == [
        trace.begins, pytest.approx(trace.perplexity("on", trace.begins))
    ]  # fmt: skip
    assert trace.begins % LENGTH == 0 and 0 < trace.begins < tokens
    assert f"{tokens - trace.begins} of {tokens}" in page.do("return $('facts').textContent")
    # text is text
    assert (
        page.do("return document.querySelectorAll('#text img, #text script, #text b').length") == 0
    )
    assert page.do("return window.hacked === undefined")
    assert page.do("return document.title").endswith("text <b>.txt")
    # words are where the tracker says, in both memories
    kinds = ["own"] if trace.info["sticky"][1] is None else ["own", "other"]
    for kind in kinds:
        for own in trace.info["layers"]:
            steps = trace.walk(f"{kind}.{own['layer']}")
            for segment, places in enumerate(steps):
                if segment in (0, 1, 2, 7, segments - 1):
                    found = page.do(
                        "const p = places(...arguments); return [p.first, [...p.t], [...p.edges]]",
                        kind, own["layer"], segment,
                    )  # fmt: skip
                    assert found[0] == places.first
                    assert np.allclose(found[1], places.t.numpy(), atol=1e-6)
                    if len(places.t):
                        assert np.allclose(found[2], places.edges().numpy(), atol=1e-6)
    # a click shades each remembered word by the mass on its cell
    token = tokens - 20
    for layer in range(len(trace.info["layers"])):
        page.do("setLayer(arguments[0])", layer)
        for head in (-1, 0, 1):
            page.do("setHead(arguments[0])", head)
            page.click(token)
            own = trace.info["layers"][layer]["layer"]
            [(_, places)] = at_tokens(trace, own, [token])
            masses = trace.density(own, token).mass(places.edges())
            masses = (masses.mean(dim=0) if head < 0 else masses[head]).numpy()
            found = page.do("return [...view.attended.mass]")
            assert np.allclose(found, masses, atol=2e-4)
            assert sum(found) == pytest.approx(float(masses.sum()), abs=2e-3)
    page.drawn()
    best = int(masses.argmax()) + places.first - 1
    shaded = page.do(
        "show(arguments[0]); const b = blockOf(arguments[0]); draw();"
        "return getComputedStyle(b.spans[arguments[0] - b.a]).backgroundColor", max(best, 0)
    )  # fmt: skip
    assert best < 0 or shaded.startswith("rgba(0, 158, 115")
    listed = page.do("return document.querySelectorAll('#attended li').length")
    somewhere = masses.max() >= max(0.01, 3 * masses.sum() / len(masses)) or len(masses) < 12
    assert bool(listed) == somewhere
    assert ("nowhere in particular" in page.do("return $('card').textContent")) != somewhere
    # keys, the slider, a phrase
    page.press(Keys.ARROW_RIGHT)
    assert page.do("return view.token") == token + 1
    page.press("l")
    page.press("h")
    page.press("[")
    assert page.do("return view.update") == (token + 1) // LENGTH - 1
    page.do("$('update').value = 5; $('update').dispatchEvent(new Event('input'))")
    assert page.do("return view.update") == 5
    page.press("p")
    page.wait("return view.update > 6")
    page.press("p")
    page.press(Keys.ESCAPE)
    assert page.do("return view.token") == -1
    page.drawn()
    if name == "sticky":
        assert page.do("return document.querySelectorAll('#phrases > div').length") == 2
    # a narrow screen: nothing wider than it
    browser.set_window_size(500, 800)
    page.click(3)
    page.drawn()
    assert page.do("return document.documentElement.scrollWidth <= innerWidth")
    browser.set_window_size(1300, 900)
    assert page.complaints() == []


@pytest.mark.slow
def test_a_memory_without_places_says_so_and_still_shows_its_gain(inspected, browser):
    folder = inspected("infini_attention_lm")
    assert {path.name for path in folder.iterdir()} == {
        "trace",
        "index.html",
        "gain.png",
        "gain.svg",
    }
    page = Page(browser, folder)
    assert "keeps no places" in page.do("return $('note').textContent")
    page.click(30)
    assert "without" in page.do("return $('card').textContent")
    assert page.complaints() == []
