"""The page of several runs, in a real browser, and the command."""

import json
import shutil

import pytest
import yaml

from helpers.browser import complaints, requests
from helpers.proofs import proofs
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.report.comparison.compare import compare
from tokencredit.report.comparison.files import write_comparison
from tokencredit.report.reading import read_run
from tokencredit.report.templating import two_digits
from tokencredit.runs.summary import final_mean

pytest.importorskip("selenium")
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select

HOSTILE = '</script><img src=x onerror="window.owned=1">$\\frac$ {{ 7 * 7 }} \u202e\x1b[31m<b>bold</b>&lt;'
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def repeat(run_folder, tmp_path_factory):
    """A function that makes a run's folder out of the real one: other settings, and all rewards a little higher."""
    folder = tmp_path_factory.mktemp("compared")

    def build(name, *, seed=1, lr=1e-4, more=0.0, iterations=3, text=None, metric="reward"):
        path = shutil.copytree(run_folder, folder / name)
        config = yaml.safe_load((path / "config.yaml").read_text())
        config["seed"], config["optim"]["lr"], config["run"]["dir"] = seed, lr, str(path)
        if text is not None:
            config["model"]["name"] = text
        (path / "config.yaml").write_text(yaml.safe_dump(config))
        rows = [row | {metric: row["reward"] + more} for row in read_run(run_folder).metrics[:iterations]]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return build


@pytest.fixture(scope="module")
def runs(repeat):
    """One setting with three seeds, one with two, one with one."""
    several = [repeat(f"low-{seed}", seed=seed, more=0.1 * seed) for seed in (1, 2, 3)]
    two = [repeat(f"high-{seed}", seed=seed, lr=5e-4, more=0.5 + 0.1 * seed, iterations=4 - seed) for seed in (1, 2)]
    return [*several, *two, repeat("single", lr=1e-3, more=0.3)]


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    return write_comparison(compare(runs), tmp_path_factory.mktemp("out") / "new" / "comparison")


def opened(browser, page):
    complaints(browser)  # of pages before
    browser.get(page.resolve().as_uri())


def curves(browser):
    """What Plotly was handed for the thick lines, by name."""
    traces = browser.execute_script("return document.getElementById('plot').data.filter((trace) => trace.name)")
    return {trace["name"]: (trace["x"], trace["y"], trace["text"]) for trace in traces}


def test_a_picture_for_each_axis(page):
    assert sorted(file.name for file in page.parent.iterdir()) == [
        "comparison.html",
        "iteration.png",
        "seconds.png",
        "tokens.png",
    ]
    for file in page.parent.glob("*.png"):
        assert file.read_bytes().startswith(PNG)


def test_the_page_opens_without_console_messages_or_requests(browser, page):
    requests(browser)
    opened(browser, page)
    assert complaints(browser) == []
    asked = requests(browser)
    assert asked
    assert all(url.startswith(("file:", "data:", "blob:", "chrome:")) for url in asked), asked
    assert browser.find_elements(By.CSS_SELECTOR, "#plot .main-svg")


def test_curves_are_those_of_the_runs(browser, page, runs):
    browser.read(page.resolve().as_uri())
    found = curves(browser)
    assert list(found) == ["optim.lr 0.0001", "optim.lr 0.0005", "optim.lr 0.001"]
    rewards = [row["reward"] for row in read_run(runs[1]).metrics]  # the middle one of three equal steps
    x, y, interval = found["optim.lr 0.0001"]
    assert x == [1, 2, 3]
    assert y == pytest.approx(rewards, rel=1e-3)
    low, middle, high = (two_digits(float(f"{rewards[0] + more:.5g}")) for more in (-0.1, 0.0, 0.1))
    assert interval[0] == f"{middle} [{low}, {high}]"
    assert found["optim.lr 0.0005"][0] == [1, 2], "it ends with its shortest run"
    for setting in ("optim.lr 0.0005", "optim.lr 0.001"):
        assert not any("[" in text for text in found[setting][2]), "two runs, or one, have no interval"
    assert "The curve ends at iteration 2, where high-2 ends" in browser.find_element(By.TAG_NAME, "main").text


def test_the_tables_say_what_differs_and_what_came_out(browser, page, runs):
    browser.read(page.resolve().as_uri())
    came_out, differs = browser.find_elements(By.TAG_NAME, "table")
    rows = [row.text.split("\n") for row in differs.find_elements(By.CSS_SELECTOR, "tbody tr")]
    assert differs.find_element(By.TAG_NAME, "thead").text.split() == ["curve", "optim.lr"]
    assert [" ".join(row) for row in rows] == [f"optim.lr {lr} {lr}" for lr in ("0.0001", "0.0005", "0.001")]
    rewards = [row["reward"] for row in read_run(runs[-1]).metrics]
    first, last = came_out.find_elements(By.CSS_SELECTOR, "tbody tr:last-child td")[:2]
    assert (first.text, last.text) == (two_digits(rewards[0]), two_digits(rewards[-1]))


def test_the_axis_can_be_chosen(browser, page, runs):
    opened(browser, page)
    for axis in ("tokens", "seconds"):
        Select(browser.find_element(By.ID, "axis")).select_by_value(axis)
        counted = [row[axis] for row in read_run(runs[-1]).metrics]
        expected = [sum(counted[: i + 1]) for i in range(3)]
        assert curves(browser)["optim.lr 0.001"][0] == pytest.approx(expected, rel=1e-4)
    assert browser.find_element(By.CSS_SELECTOR, "#plot .xtitle").text == "seconds"
    assert complaints(browser) == []


@pytest.mark.proof
def test_curves_can_be_left_out(browser, page):
    opened(browser, page)
    browser.find_element(By.ID, "group1").click()
    assert list(curves(browser)) == ["optim.lr 0.0001", "optim.lr 0.001"]


@pytest.mark.parametrize(("width", "schemes"), [(400, ("dark", "light")), *proofs((1600, ("light", "dark")))])
def test_the_page_fits_narrow_and_wide_windows_in_light_and_dark(browser, page, view, width, schemes):
    view(width, schemes[0])
    opened(browser, page)
    for scheme in schemes:
        view(width, scheme)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        ink = browser.execute_script("return document.getElementById('plot').layout.font.color")
        assert ink == {"light": "#1b1b1f", "dark": "#e8e8ee"}[scheme]


def test_hostile_names_and_settings_are_text(browser, repeat, place):
    name = HOSTILE.replace("/", "-")
    one = repeat(name, text=HOSTILE, metric=HOSTILE)
    other = repeat("_hidden $x$", metric=HOSTILE)
    page = write_comparison(compare([one, other], metric=HOSTILE), place)
    opened(browser, page)
    assert complaints(browser) == []
    assert browser.execute_script("return window.owned") is None
    assert not browser.find_elements(By.CSS_SELECTOR, "img, main b")
    spelt = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b")
    text = browser.find_element(By.TAG_NAME, "body").text
    assert browser.find_element(By.TAG_NAME, "h1").text == f"{spelt} of 2 runs"
    assert spelt in browser.find_elements(By.TAG_NAME, "table")[1].text
    assert "\u202e" not in text
    assert browser.find_element(By.CSS_SELECTOR, "#plot .ytitle").get_attribute("textContent") == spelt
    # The signs of the reader's own name for the curve reach the legend as they are.
    labels = [label.text for label in browser.find_elements(By.CSS_SELECTOR, ".controls label")[1:]]
    assert [label.strip() for label in labels] == [
        name.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b"),
        other.name,
    ]
    assert (place / "iteration.png").read_bytes().startswith(PNG)


def test_a_run_that_still_writes_and_one_named_twice(repeat, tmp_path):
    growing = repeat("growing")
    (growing / "summary.json").unlink()
    with (growing / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "rew')
    text = write_comparison(compare([growing, growing, growing / ".." / "growing"]), tmp_path).read_text()
    assert "reward of 1 run<" in text
    assert "not finished" in text


@pytest.mark.proof
def test_runs_without_a_common_stretch_are_only_thin_lines(browser, repeat, place):
    one, other = (repeat(f"apart-{seed}", seed=seed) for seed in (1, 2))
    rows = read_run(other).metrics
    (other / "metrics.jsonl").write_text("".join(json.dumps(row | {"seconds": 1e3}) + "\n" for row in rows))
    opened(browser, write_comparison(compare([one, other]), place))
    assert "No curve over seconds" in browser.find_element(By.TAG_NAME, "main").text
    Select(browser.find_element(By.ID, "axis")).select_by_value("seconds")
    assert len(browser.find_elements(By.CSS_SELECTOR, "#plot .scatterlayer .js-line")) == 2
    assert complaints(browser) == []


@pytest.mark.proof
def test_many_curves_differ_in_their_strokes(repeat, tmp_path):
    many = [repeat(f"many-{number}", lr=number * 1e-5) for number in range(1, 9)]
    text = write_comparison(compare(many, smooth=2), tmp_path).read_text()
    groups = json.loads(text.split('id="data">')[1].split("</script>")[0])["groups"]
    assert len({(group["colour"], group["dash"]) for group in groups}) == 8
    assert "running mean over 2 numbers" in text


def test_the_command(repeat, tmp_path, capsys):
    one, other = (str(repeat(f"command-{seed}", seed=seed)) for seed in (1, 2))
    arguments = ["compare", one, other, "--group-by", "seed", "--metric", "kl", "--smooth", "2", "--out"]
    assert main([*arguments, str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"seed 1 and seed 2 end at the same kl, {two_digits(final_mean(read_run(one).metrics, 'kl'))}.",
        str(tmp_path / "out" / "comparison.html"),
    ]
    assert "seed 1" in (tmp_path / "out" / "comparison.html").read_text()


def test_a_run_without_an_iteration_is_left_out_by_name(repeat, tmp_path, capsys):
    run, empty = str(repeat("left-out", seed=1)), tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text("seed: 1\n")
    (log := tmp_path / "left-out.log").write_text("a sweep's\n")
    assert main(["compare", str(empty), run, str(log), "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"left out: '{empty}' has no finished iteration yet\n")
    assert err == "1 file left out, beside the runs' folders\n"
    assert main(["compare", str(empty), "--out", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"tokencredit: '{empty}' has no finished iteration yet\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{run}", "nowhere"], "'nowhere' is not a run's folder: there is no such folder"),
        (["{run}", "--metric", "rewrad"], "did you mean reward?"),
        (["{run}", "--group-by", "optim.ir"], "no run has the key optim.ir; optim has name, lr, "),
        (
            ["{run}", "--out", "{run}/policy/config.yaml"],
            "a file's ending must be of html, png, pdf, svg, csv, json, tex",
        ),
        (["{run}", "--smooth", "0"], "smooth"),
        ([], "compare needs RUN"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(run_folder, capsys, arguments, complaint):
    assert main(["compare", *(argument.format(run=run_folder) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert complaint in err
    assert err.count("\n") == 1


def test_python_callers_are_refused_alike(run_folder):
    with pytest.raises(ConfigError, match="no run to compare"):
        compare([])
    with pytest.raises(ConfigError, match="smooth is 0"):
        compare([run_folder], smooth=0)


@pytest.mark.proof  # test_browser.py: so do those of a report
def test_a_metric_of_one_iteration_has_its_points(browser, audited_folder, run_folder, place):
    runs = [shutil.copytree(audited_folder, place / name) for name in ("one", "two")]
    config = yaml.safe_load((runs[1] / "config.yaml").read_text()) | {"seed": 2}
    (runs[1] / "config.yaml").write_text(yaml.safe_dump(config))
    page = write_comparison(compare(runs, metric="audit/noise"), place / "out")
    opened(browser, page)
    traces = browser.execute_script("return document.getElementById('plot').data.map(({ mode, x }) => [mode, x])")
    assert traces.count(["lines+markers", [3]]) == 3  # both runs, and what they say together
    assert complaints(browser) == []
    with pytest.raises(ConfigError, match=r"no number for the metric audit/noise in .*reviews"):
        compare([runs[0], run_folder], metric="audit/noise")


@pytest.mark.proof
def test_links_lead_to_the_reports_of_the_runs(browser, repeat, place):
    one, other, without = repeat("javascript:a %41#?", more=1.0), repeat("plain", lr=2e-4), repeat("none", lr=3e-4)
    (without / "report.html").unlink()
    (one / "report.html").write_text("<h2 id=outcome>Outcome</h2>")  # a report has megabytes of Plotly
    opened(browser, write_comparison(compare([one, other, without]), place / "out"))
    links = browser.find_elements(By.CSS_SELECTOR, "main li a")
    assert [link.text for link in links] == [one.name, other.name]
    assert not any(link.get_attribute("href").startswith("javascript") for link in links)
    assert not any(link.get_dom_attribute("href").startswith(("/", "file")) for link in links), "relative"
    links[0].click()
    assert browser.find_element(By.ID, "outcome").text == "Outcome"
    assert browser.current_url == (one / "report.html").resolve().as_uri()
