"""The report in a real Chromium: drawn, quiet, offline, usable by keyboard."""

import base64
import os
import shutil
import struct

import pytest
from playwright.sync_api import sync_playwright
from synthetic import log_normal, make_record, steps_of, wide_meta, write_char_rnn, write_gan, write_sick

from gradguard.monitoring.show.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
EVIL = "</script><img src=x onerror=alert(1)>&'\""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser, google-chrome or chrome on the PATH"),
]


def evil_run(folder):
    meta = wide_meta(3) | {"argv": [EVIL], "optimizers": [EVIL]}
    meta["params"][1]["name"] = EVIL
    event = {"t": "event", "i": 3, "kind": "nonfinite", "severity": "error", "message": EVIL, "advice": EVIL}
    tensors = [{"t": "tensors", "i": i, "norm": [0.0, 1.0, None]} for i in range(250)]
    steps = steps_of([1.0] * 250, loss=1.0, rule=EVIL, threshold=0.5, coefficient=0.5)
    return [make_record(path=folder / "evil.jsonl", meta=meta, steps=steps, tensors=tensors, events=[event] * 60)]


def run_with_long_names(folder):
    """Long names of layers."""
    lines = [{"t": "tensors", "i": i, "norm": [1.0, 2.0, 4.0, 8.0]} for i in range(0, 200, 10)]
    steps = steps_of(log_normal(200), loss=1.0)
    return [make_record(path=folder / "run.jsonl", meta=wide_meta(4), steps=steps, tensors=lines)]


def long_run(folder):
    return [write_char_rnn(folder / "run.jsonl", steps=5000, threshold=1.0)]


def two_runs(folder):
    plain = write_char_rnn(folder / "plain" / "run.jsonl", steps=250)
    return [plain, write_char_rnn(folder / "clipped" / "run.jsonl", steps=250, threshold=1.0)]


PAGES = {
    "a long run": (long_run, 5),
    "a sick run": (lambda folder: [write_sick(folder / "run.jsonl")], 5),
    "two optimizers": (lambda folder: [write_gan(folder / "run.jsonl")], 7),
    "two runs": (two_runs, 10),
    "evil names": (evil_run, 3),
    "long names": (run_with_long_names, 4),
    "nothing": (lambda folder: [make_record(path=folder / "run.jsonl")], 0),
}


WIDTHS = [*((name, 360 if name == "two runs" else 1200) for name in PAGES), ("a sick run", 360), ("long names", 390)]


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        # In the C locale it cannot save below a temporary folder whose name is not ASCII.
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=200_000, env=os.environ | {"LC_ALL": "C.UTF-8"}
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    made = {}

    def file_of(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("page")
            made[name] = write_report(PAGES[name][0](folder), folder / "report.html")
        return made[name]

    return file_of


@pytest.fixture
def open_page(browser, files):
    contexts = []

    def open_page(name, *, scheme="light", width=1200):
        view = {"width": width, "height": 900}
        context = browser.new_context(color_scheme=scheme, viewport=view, offline=True, accept_downloads=True)
        context.set_default_timeout(200_000)
        contexts.append(context)
        page = context.new_page()
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("dialog", lambda dialog: (page.said.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(files(name).as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        return page

    yield open_page
    for context in contexts:
        context.close()


def ranges(page):
    return page.evaluate("[...document.querySelectorAll('.plot[data-steps]')].map(p => [...p.layout.xaxis.range])")


def cells(page):
    return page.evaluate(
        "document.querySelector('.plot[data-mode]:has(.hm)').data[0].z.slice(0, 2).map(r => r.slice(0, 3))"
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "width"), WIDTHS)
def test_all_charts_are_drawn_in_silence_and_offline(open_page, name, width):
    page = open_page(name, width=width)
    drawn = page.evaluate("[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('.xy').length)")
    assert len(drawn) == PAGES[name][1]
    assert all(drawn)
    assert page.said == []
    assert [url for url in page.asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_every_chart_says_what_it_shows_and_has_its_numbers(open_page):
    page = open_page("a sick run")
    for plot in page.query_selector_all(".plot"):
        assert plot.get_attribute("role") == "img"
        assert len(plot.get_attribute("aria-label")) > 40
        section = plot.evaluate_handle("p => p.closest('section')").as_element()
        assert section.query_selector_all("details tbody tr")
    operable = "[...document.querySelectorAll('button, input, [tabindex]')]"
    unnamed = f"{operable}.filter(e => !e.ariaLabel && !e.textContent && !e.labels?.length)"
    assert page.evaluate(f"{unnamed}.length") == 0


@pytest.mark.exhaustive
def test_the_heat_map_toggles_by_click(open_page):
    page = open_page("a sick run")
    seen = [cells(page)]
    page.get_by_label("norm", exact=True).click()
    assert cells(page) != seen[0]
    page.get_by_label("against its own median", exact=True).click()
    assert cells(page) == seen[0]
    assert page.said == []


@pytest.mark.exhaustive
def test_the_heat_map_toggles_by_key(open_page):
    page = open_page("a sick run")
    before = cells(page)
    page.get_by_label("against its own median", exact=True).focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.value") == "absolute"
    assert cells(page) != before
    page.keyboard.press("ArrowLeft")
    assert cells(page) == before


@pytest.mark.exhaustive
def test_zero_and_non_finite_cells_are_marked(open_page):
    page = open_page("a sick run")
    names = page.evaluate("document.querySelector('.plot:has(.hm)').data.map(t => t.name).filter(Boolean)")
    assert names == ["zero", "non-finite"]
    marks = page.evaluate(
        "document.querySelector('.plot:has(.hm)').data.filter(t => t.type == 'heatmap').map(t => t.z)"
    )
    assert all(marks[1][7])  # the last row is dead
    assert [place for place, mark in enumerate(marks[2][6]) if mark] == [133, 398, 399]
    labels = page.evaluate("document.querySelector('.plot:has(.hm)').layout.yaxis.ticktext")
    assert labels[7] == "head.bias"


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_system_and_the_switch(open_page, scheme):
    page, other = open_page("a sick run", scheme=scheme), {"light": "dark", "dark": "light"}[scheme]
    look = "[document.documentElement.dataset.theme, document.querySelector('.plot').layout.font.color]"
    theme, ink = page.evaluate(look)
    assert theme == scheme
    page.keyboard.press("Tab")  # past the link to the verdict
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "theme"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    changed = page.evaluate(look)
    assert changed[0] == other
    assert changed[1] != ink
    assert page.get_attribute("#theme", "aria-label").lower() == f"{scheme} theme"
    assert page.said == []


@pytest.mark.exhaustive
def test_a_focused_chart_zooms_by_key_and_the_others_follow(open_page):
    page = open_page("a long run")
    home = ranges(page)
    page.focus(".plot")
    page.keyboard.press("+")
    page.wait_for_function("document.querySelectorAll('.plot[data-steps]')[2].layout.xaxis.range[0] > 1000")
    assert len({tuple(map(round, one)) for one in ranges(page)}) == 1
    page.click("#theme")  # what is zoomed stays zoomed
    assert ranges(page)[0][0] > 1000
    page.focus(".plot")
    page.keyboard.press("0")
    page.wait_for_function("document.querySelectorAll('.plot[data-steps]')[2].layout.xaxis.range[0] < 0")
    assert ranges(page) == [pytest.approx(one) for one in home]
    assert page.said == []


@pytest.mark.exhaustive
def test_a_page_prints_in_light_without_its_controls(open_page):
    page = open_page("a sick run", scheme="dark")
    page.emulate_media(media="print")
    assert not page.is_visible("#theme")
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(f"dispatchEvent(new Event('beforeprint')), {theme}") == "light"
    assert page.evaluate(f"dispatchEvent(new Event('afterprint')), {theme}") == "dark"
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    assert page.said == []


def saved(page, name, folder):
    """What the button of a chart saves."""
    with page.expect_download() as download:
        page.click(f"[data-save={name}-plot]")
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_chart_is_saved_as_a_picture_on_its_ground(open_page, tmp_path, scheme):
    page = open_page("a sick run", scheme=scheme)
    content = saved(page, "layers", tmp_path).read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width == 2 * round(page.evaluate("document.querySelector('#layers-plot').clientWidth"))
    assert height > 400
    corner = page.evaluate(
        """async (data) => {
            const picture = new Image();
            picture.src = `data:image/png;base64,${data}`;
            await picture.decode();
            const canvas = document.createElement("canvas"), brush = canvas.getContext("2d");
            [canvas.width, canvas.height] = [picture.width, picture.height];
            brush.drawImage(picture, 0, 0);
            return [...brush.getImageData(1, picture.height - 2, 1, 1).data];
        }""",
        base64.b64encode(content).decode(),
    )
    assert corner == ([255, 255, 255, 255] if scheme == "light" else [18, 23, 28, 255])
    assert page.said == []


def test_a_word_is_explained_on_hover_and_on_focus(open_page):
    page = open_page("a sick run")
    term = page.locator(".term", has_text="gradient").first
    meaning = page.inner_text("#term-gradient dd")
    assert page.is_hidden("#tip")
    term.hover()
    assert page.inner_text("#tip") == meaning
    page.mouse.move(0, 0)
    assert page.is_hidden("#tip")
    term.focus()
    assert page.inner_text("#tip") == meaning
    assert term.get_attribute("aria-describedby") == "tip"
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")
    page.keyboard.press("Enter")  # where there is nothing to hover with
    assert page.url.endswith("#term-gradient")
    assert page.said == []


@pytest.mark.exhaustive
def test_a_link_to_a_part_goes_there(open_page):
    page = open_page("a sick run")
    page.click(".contents a[href='#dominance']")
    page.wait_for_function("Math.abs(document.getElementById('dominance').getBoundingClientRect().top) < 80")
    page.focus("#layers .permalink")
    page.keyboard.press("Enter")
    assert page.url.endswith("#layers")


@pytest.mark.exhaustive
def test_names_are_told_apart_on_a_telephone(open_page):
    page = open_page("long names", width=390)
    for name in ("layers", "dominance"):
        labels = page.evaluate(f"document.querySelector('#{name}-plot').layout.yaxis.ticktext")
        assert len(set(labels)) == 4
        assert max(map(len, labels)) <= 16
