"""The pages in a real browser: drawn, interactive, readable in light, dark and print, offline."""

import json
import re
from itertools import pairwise

import made
import pytest
from playwright.sync_api import expect

from proxpo.batch_file import read_batch, save_step
from proxpo.inspection import inspect_batch
from proxpo.report.analysis import analyse
from proxpo.report.comparison_page import comparison_page
from proxpo.report.comparison_report import write_report
from proxpo.report.figure_list import all_figures
from proxpo.report.inspection_page import inspect_page
from proxpo.report.read_runs import read_comparison
from proxpo.settings import make_recipe
from proxpo.train.picture import panels, write_pictures
from proxpo.train.run_page import inspect_saved

NASTY = "</script><img src=x onerror=alert(1)>&"
ARMS = {"isopo": 0.33, "grpo": 0.30, "reinforce": 0.22}


def page_of(folder):
    """report.html without the printed figures, which no browser sees."""
    found = analyse(read_comparison(folder))
    target = folder / "report.html"
    target.write_text(comparison_page(found, all_figures(found)), encoding="utf-8")
    return target


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    return page_of(made.comparison(folder, arms=ARMS, steps=40, failed=[("reinforce", 2)]))


def data_of(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


def lightness(page, selector="body", of="backgroundColor"):
    colour = page.locator(selector).first.evaluate(f"e => getComputedStyle(e).{of}")
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 765


def test_every_figure_is_drawn(opened, path):
    page = opened(path)
    keys = [one["key"] for one in data_of(path)["figures"]]
    assert {"score", "differences", "drift", "entropy", "ess", "clipped", "cosine", "cost"} <= {
        *keys
    }
    for key in keys:
        box = page.locator(f"#fig-{key} svg")
        size = box.bounding_box()
        assert size["width"] > 300
        assert size["height"] > 80
        marks = box.locator("path, circle, polygon, rect, line:not(.gridline)")
        assert marks.count() >= 3, key
    assert page.locator("#fig-score path.mean").count() == 3
    assert page.locator("#fig-score path.band").count() == 3
    assert page.locator("#fig-drift path.hull").count() == 3


def test_lines_stand_where_the_numbers_say(opened, path):
    """Pixels of the drawn means against the data, through the ticks of the axis."""
    page = opened(path)
    ticks = page.locator("#fig-score svg > text").evaluate_all(
        "nodes => nodes.filter(n => n.textContent.endsWith('%'))"
        ".map(n => [parseFloat(n.textContent) / 100, +n.getAttribute('y') - 4])"
    )
    (v0, y0), (v1, y1) = ticks[0], ticks[-1]
    drawn = page.locator("#fig-score path.mean").evaluate_all(
        "nodes => nodes.map(n => n.getAttribute('d').split('L').at(-1).split(' ').map(Number))"
    )
    lines = data_of(path)["figures"][0]["data"]
    assert len(drawn) == len(lines)
    for (_, y), line in zip(drawn, lines):
        value = v0 + (y - y0) / (y1 - y0) * (v1 - v0)
        assert value == pytest.approx(line["mean"][-1], abs=0.002)


def test_pointing_shows_the_values_of_all_arms(opened, path):
    page = opened(path)
    plot = page.locator("#fig-score svg")
    plot.scroll_into_view_if_needed()
    size = plot.bounding_box()
    plot.hover(position={"x": size["width"] - 14, "y": size["height"] / 2})
    tip = page.locator("#tip")
    expect(tip).to_be_visible()
    text = tip.inner_text()
    assert text.startswith("step 40")
    for line in data_of(path)["figures"][0]["data"]:
        assert f"{100 * line['mean'][-1]:.1f} %" in text
        assert line["arm"] in text
    page.mouse.move(2, 2)
    expect(tip).to_be_hidden()


def test_the_keyboard_reads_values_too(opened, path):
    page = opened(path)
    for key in ("score", "drift", "differences", "cost"):
        page.locator(f"#fig-{key} svg").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#tip")).to_be_visible()
        assert any(arm in page.locator("#tip").inner_text() for arm in ARMS)
        page.keyboard.press("Escape")
        expect(page.locator("#tip")).to_be_hidden()


def test_filters(opened, path):
    page = opened(path)
    page.locator("#arms button", has_text="grpo").click()
    assert page.locator("#fig-score path.mean").count() == 2
    expect(page.locator('#ranking tr[data-arm="grpo"]')).to_be_hidden()
    expect(page.locator('#ranking tr[data-arm="isopo"]')).to_be_visible()
    assert page.locator('.run[data-arm="grpo"]').first.is_hidden()
    page.locator("#arms button", has_text="grpo").press("Enter")
    assert page.locator("#fig-score path.mean").count() == 3

    page.locator('[data-view="runs"]').click()
    assert page.locator("#fig-score path.one").count() == 9
    assert page.locator("#fig-score path.one.failed").count() == 1
    page.locator('[data-view="mean"]').click()
    page.locator("#seeds button", has_text="3").click()  # a mean has all seeds: every run instead
    assert page.locator("#fig-score path.mean").count() == 0
    assert page.locator("#fig-score path.one").count() == 6
    for arm in ARMS:
        page.locator("#arms button", has_text=arm).click()
    expect(page.locator("#fig-score .plot")).to_have_text("Nothing selected has this.")


def test_axes(opened, path):
    page = opened(path)
    last = (
        "nodes => nodes.filter(n => n.getAttribute('text-anchor') === 'middle').at(-1).textContent"
    )
    label = page.locator("#fig-score svg > text")
    assert label.evaluate_all(last) == "step"
    for axis in ("samples", "seconds"):
        page.locator(f'[data-axis="{axis}"]').click()
        assert label.evaluate_all(last) == axis
        assert page.locator("#fig-score path.mean").count() == 3


def test_the_table_sorts(opened, path):
    page = opened(path)
    page.locator("#ranking th button", has_text="KL drift").click()
    names = page.locator("#ranking tbody th").all_inner_texts()
    assert [name.strip() for name in names] == ["reinforce", "grpo", "isopo"]
    page.locator("#ranking th button", has_text="KL drift").click()
    assert page.locator("#ranking tbody th").first.inner_text().strip() == "isopo"


def test_config_and_command_are_one_click_away(opened, path):
    page = opened(path)
    failed = page.locator('.run[data-arm="reinforce"][data-seed="2"]')
    failed.locator("summary").click()
    text = failed.locator(".inside").inner_text()
    assert "the gradient was not finite in 3 updates in a row (step 20)" in text
    assert "proxpo train base.yaml --method reinforce --seed 2" in text
    assert "prompts_per_step: 64" in text
    assert "1 run failed" in page.locator(".findings").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(opened, path, scheme):
    page = opened(path, color_scheme=scheme)
    dark = scheme == "dark"
    assert (lightness(page) < 0.3) == dark
    assert (lightness(page, "h1", "color") > 0.5) == dark
    page.locator("#theme").click()
    assert (lightness(page) < 0.3) != dark
    page.emulate_media(media="print")
    assert lightness(page) > 0.95
    assert lightness(page, "h1", "color") < 0.2
    expect(page.locator(".controls")).to_be_hidden()


def test_a_phone_scrolls_one_way_only(opened, path):
    page = opened(path, viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("#fig-score svg").bounding_box()["width"] <= 390


def test_the_numbers_of_an_axis_stand_apart_on_a_phone(opened, tmp_path):
    folder = made.comparison(tmp_path, arms={"isopo": 0.3, "grpo-clip-low-0.1": 0.2}, steps=10)
    page = opened(page_of(folder), viewport={"width": 390, "height": 800})
    numbers = page.locator("#fig-differences svg > text[text-anchor=middle]").all()[:-1]
    boxes = [number.bounding_box() for number in numbers]
    assert boxes
    assert all(a["x"] + a["width"] < b["x"] for a, b in pairwise(boxes))


def test_settings_and_temperatures(opened, tmp_path):
    tuned = opened(page_of(made.swept(tmp_path / "b")))
    assert tuned.locator("#fig-tuning circle[r='10']").count() == 2
    varied = opened(page_of(made.varied(tmp_path / "c")))
    plot = varied.locator("#fig-robust-temperature svg")
    assert plot.locator("path.mean").count() == 2
    assert "reinforce" in plot.text_content()


def test_one_seed_one_arm(opened, tmp_path):
    page = opened(page_of(made.comparison(tmp_path, arms={"a": 0.3}, seeds=(1,), steps=10)))
    assert page.locator("#fig-score path.mean").count() == 1
    assert page.locator("#fig-score path.band").count() == 0
    assert "One run an arm: no band." in page.locator("#fig-score").inner_text()


def test_nothing_done_yet(opened, tmp_path):
    waiting = [(arm, seed) for arm in ARMS for seed in (1, 2, 3)]
    page = opened(page_of(made.comparison(tmp_path, arms=ARMS, waiting=waiting)))
    assert "nothing can be ranked" in page.locator(".findings").inner_text()
    assert page.locator(".run .state.waiting").count() == 9


def test_names_cannot_become_markup(opened, tmp_path):
    folder = made.comparison(tmp_path, arms={"a": 0.3, "b": 0.2}, steps=10)
    plan = (folder / "plan.yaml").read_text()
    for name in "ab":
        plan = plan.replace(f"name: {name}\n", f"name: '{name}{NASTY}'\n")
        plan = plan.replace(f"arm: {name}\n", f"arm: '{name}{NASTY}'\n")
    (folder / "plan.yaml").write_text(plan)
    page = opened(page_of(folder))
    assert page.locator("img").count() == 0
    page.locator("#fig-score svg").focus()
    page.keyboard.press("ArrowRight")
    assert f"a{NASTY}" in page.locator("#tip").inner_text()


def test_forty_runs(opened, tmp_path):
    """How long a page of a thousand steps takes is measured in benchmarks/report_time.py."""
    arms = {f"method-{i}": 0.2 + 0.015 * i for i in range(8)}
    made.comparison(tmp_path, arms=arms, seeds=range(5), steps=100)
    target = write_report(analyse(read_comparison(tmp_path)), tmp_path)
    page = opened(target)
    page.wait_for_function("document.documentElement.dataset.ready === 'yes'")
    assert page.locator("#fig-score path.mean").count() == 8
    page.locator("#arms button").first.click()
    assert page.locator("#fig-score path.mean").count() == 7
    exact = {one["arm"]: one["mean"][-1] for one in data_of(target)["figures"][0]["data"]}
    summary = json.loads((tmp_path / "summary.json").read_text())
    for one in summary["arms"]:
        assert exact[one["arm"]] == one["final"]["mean"]


def test_the_pages_of_inspect_and_train(opened, tmp_path):
    file = read_batch("sample")
    found = [inspect_batch(make_recipe(name), file.batch, name=name) for name in ("grpo", "p3o")]
    target = tmp_path / "inspect.html"
    target.write_text(inspect_page(found, file, source="sample"), encoding="utf-8")
    page = opened(target)
    canvas = page.locator(".wide canvas").first
    seen = canvas.evaluate(
        "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    )
    assert seen > 20
    rows = list(made.rows(0.3, 1, steps=6, every=2, sharp=0.0))
    answer = {"prompt": NASTY, "before": "1", "after": "2", "answer": "2"}
    lines = [{"step": s, "prompt": NASTY, "completion": f"c{s}", "reward": s} for s in range(1, 4)]
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, lines)))
    save_step(tmp_path, 4, dict(file.batch.items()))
    saved = inspect_saved(tmp_path, make_recipe("grpo"))
    summary = {"steps": 6, "accuracy_before": 0.5, "accuracy_after": 0.75, "out": "runs/x"}
    write_pictures(tmp_path, rows, title=NASTY, summary=summary, samples=[answer], saved=saved)
    page = opened(tmp_path / "report.html")
    assert page.locator("h1").count() == 1
    assert page.locator("figure .plot > svg").count() == len(panels(rows))
    expect(page.locator(".tile").first).to_contain_text("50.0 → 75.0 %")
    expect(page.locator("#sample-rows")).to_contain_text("c3")
    page.locator("#sample-back").click()
    expect(page.locator("#sample-rows")).to_contain_text("c2")
    drift = page.locator("figure", has_text="Drift from the start")
    expect(drift).to_contain_text("1.0")
    expect(drift).not_to_contain_text("−")  # no KL at all is drawn at the foot, not mid-way to -1
    page.locator('[data-axis="tokens"]').click()
    expect(page.locator("#fig-panel1 svg")).to_contain_text("tokens")
    light = lightness(page)
    page.locator("#theme").click()
    assert lightness(page) < light - 0.5
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    opened(tmp_path / saved[0].page)
