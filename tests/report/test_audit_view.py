"""The audit on the page: trust score, audited completions, tables and charts."""

import copy
import html
import json
import re
import shutil
from dataclasses import replace

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from helpers.browser import draw_all
from helpers.files import data_of
from tokencredit.audit.verdict import CRITIC
from tokencredit.report import audit_view, notebook, page
from tokencredit.report.reading import read_run
from tokencredit.report.story import next_step
from tokencredit.report.templating import two_digits

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">\u202e\x1b[31m"

UNTRUE = 'docs page "The audit: is the credit true?", under "untrue credit"'


@pytest.fixture
def run(audited_folder):
    found = read_run(audited_folder)
    return replace(found, audit=copy.deepcopy(found.audit))


def correlated(run, value, low=None, high=None, **credit):
    """The run with this correlation of the shown advantages."""
    found = run.audit["credit"]
    found["estimators"][found["shown"]]["correlation"] = {"value": value, "low": low, "high": high}
    found |= {"noise": {"value": 0.2, "low": 0.1, "high": 0.3}} | credit
    return audit_view.trust(run)


def test_the_trust_score_by_hand(run):
    shown = run.audit["credit"]["shown"]
    assert shown == "gae, λ = 0.95"
    measured = "340 tokens of 6 completions at iteration 3, 8 continuations per state"
    for name, found in run.audit["credit"]["estimators"].items():
        found["gain"] = {"value": 0.2, "low": 0.1 if name == "td (gae, λ = 0)" else -0.1, "high": 0.3}
    real = (
        "About 9 % of this run's credit is real: advantages (gae, λ = 0.95) correlate 0.30 with the true "
        f"ones (0.21 to 0.38, {measured})."
    )
    ways = f"larger batches (rollout.batch_size): {UNTRUE}."
    scores = "scores of prefixes (critic.prefix_every: 1)"
    better = "To make more of it true, try td (gae, λ = 0), whose correlation is 0.20 higher"
    bare = replace(run, metrics=[{k: x for k, x in row.items() if k != "critic_share"} for row in run.metrics])
    assert correlated(bare, 0.3, 0.21, 0.38, tokens=340) == f"{real} {better}, {scores} or {ways}"
    without = replace(bare, audit=run.audit | {"critic": None})
    assert "scores of prefixes (critic.kind, critic.prefix_every: 1)" in correlated(without, 0.3, 0.21, 0.38)
    assert correlated(run, 0.3, 0.21, 0.38) == f"{real} {better} or {ways}", "its values have the scores of prefixes"
    run.audit["credit"]["estimators"]["td (gae, λ = 0)"]["gain"]["low"] = -0.1
    ways = f"larger batches (rollout.batch_size) or another λ (advantage.lam): {UNTRUE}."
    assert correlated(run, 0.3, 0.21, 0.38) == f"{real} To make more of it true, try {ways}"
    assert next_step(run, []) == f"to make more of the credit true, try {ways}".rstrip(".")
    assert correlated(run, 0.7).startswith("About 49 % of this run's credit")
    assert correlated(run, 0.7, 0.6, 0.8).endswith(f"correlate 0.70 with the true ones (0.60 to 0.80, {measured}).")
    assert correlated(run, 1.2).startswith("About 100 % of this run's credit")
    assert correlated(run, 0.03, 0.01, 0.08).startswith("At most 1 % of this run's credit")
    assert correlated(run, 0.03, -0.06, 0.12).startswith("At most 2 % of this run's credit"), "its interval allows 1.4"
    assert correlated(run, -0.4, -0.6, -0.1).startswith("None of this run's credit is real: ")
    assert correlated(run, -0.1, -0.4, 0.2).startswith("It is not shown that any of this run's credit is real: ")
    assert "correlate 0.00 with" in correlated(run, -0.001, -0.2, 0.2)
    assert correlated(run, None).startswith("The share of real credit in this run is unknown")
    final = replace(run, audit=run.audit | {"iteration": None})
    assert "completions of the final policy, 8 continuations" in audit_view.trust(final)


def test_an_audit_that_is_mostly_noise_gives_no_verdict(run):
    sentence = correlated(run, -0.33, -1.81, 0.13, noise={"value": 0.7055, "low": 0.45, "high": 1.23})
    assert sentence.startswith(
        "This audit is too noisy to say how much of this run's credit is real: 71 % of the variance of its true "
        "advantages is sampling noise; advantages (gae, λ = 0.95) correlate -0.33"
    )
    again = f"To measure it: tokencredit audit {run.path} --completions 6 --states 5 --continuations"
    assert sentence.endswith(f"8 continuations per state). {again} 45")
    assert "-1.81" not in sentence, "an interval of noise is not to be quoted"
    assert correlated(run, 0.3, noise={"value": 1.2}).endswith(f"{again} 168"), "above 1 by chance"
    assert next_step(run, []) == f"tokencredit audit {run.path} --completions 6 --states 5 --continuations 168"
    run.audit["limits"] = {"seconds": 90.0, "calls": 1234567}
    assert correlated(run, None, noise={"value": 1.2}).endswith(
        f"The limit of 90 seconds and 1234567 calls ended this audit. {again} 168"
    )
    run.audit["settings"]["states"] = None
    assert "--states all --continuations" in audit_view.trust(run)


def test_the_next_audit_is_at_a_checkpoint_where_advantages_vary_and_of_python_where_it_must(run, tmp_path):
    noise = {"value": 0.7055, "low": 0.45, "high": 1.23}
    for number in (1, 2, 3):
        (tmp_path / "checkpoints" / f"{number:06d}").mkdir(parents=True)
    metrics = [row | {"advantage_std": x} for row, x in zip(run.metrics, (0.2, 0.5, 0.1), strict=True)]
    moved = replace(run, path=tmp_path, metrics=metrics)
    more = " --completions 6 --states 5 --continuations 45 (advantages vary more at --checkpoint 2)"
    assert correlated(moved, 0.3, noise=noise).endswith(f"tokencredit audit {tmp_path}{more}")
    alike = replace(moved, metrics=[row | {"advantage_std": 0.1} for row in metrics])
    assert "--checkpoint" not in correlated(alike, 0.3, noise=noise)
    python = replace(moved, config=run.config | {"python": {"reward_funcs": ["f"]}})
    call = "trainer.audit(AuditConfig(completions=6, states=5, continuations=45))"
    assert correlated(python, 0.3, noise=noise).endswith(f"To measure it: {call}")
    unsaved = replace(moved, config=run.config | {"run": {"save_every": 0}})
    new = "audit.every with audit.continuations: 45 in a new run"
    assert correlated(unsaved, 0.3, noise=noise).endswith(new)


def test_figures_of_noise_are_marked_and_have_no_interval(run):
    credit = run.audit["credit"]
    other = credit["estimators"]["td (gae, λ = 0)"]
    other["correlation"] = other["gain"] = {"value": 0.47, "low": -0.2, "high": 3.88}
    for noise, cell, high in ((0.6, "0.47, too noisy", None), (0.4, "0.47 (-0.20 to 3.88)", 3.88)):
        credit["noise"]["value"] = noise
        found, text = audit_view.view(run.audit), page.render(run)
        assert [row[1::2] for row in found["estimators"] if row[0].startswith("td")] == [(cell, cell)]
        assert found["chart"]["correlations"]["td (gae, λ = 0)"]["high"] == high
        assert cell in text
        assert ("to 3.88" in text) == (high is not None)
        assert cell in notebook.AuditRecord(run.audit)._repr_html_()


def test_an_audit_of_few_completions_gives_no_verdict(run):
    run.audit["settings"]["completions"] = 5
    sentence = correlated(run, 0.3)
    assert sentence.startswith(
        "This audit is too small to say how much of this run's credit is real: intervals need at least 6 completions; "
        "advantages (gae, λ = 0.95) correlate 0.30"
    )
    assert "--completions 16 --states 5 --continuations" in sentence


def test_a_critic_measured_mostly_by_noise_has_a_caution(run):
    run.audit["critic"]["noise"]["value"] = 0.71
    assert "The critic&#39;s figures are too noisy to judge it: 71 % of" in page.render(run)
    run.audit["critic"]["noise"]["value"] = 0.5
    assert "too noisy to judge it" not in page.render(run)
    run.audit["critic"]["explained_variance"] = dict.fromkeys(("value", "low", "high"))
    run.audit["critic"]["rmse"] = {"value": 0.001804, "low": 0.001487, "high": 0.002101}
    text = page.render(run)
    assert "The true values hardly vary here, so the critic cannot be judged by them." in text
    assert "0.0015 to 0.0021" in text


def test_the_sentence_on_the_page_is_that_of_the_numbers(run, audited_folder):
    text = (audited_folder / "report.html").read_text()
    correlation = run.audit["credit"]["estimators"]["gae, λ = 0.95"]["correlation"]["value"]
    assert html.escape(audit_view.trust(run)) in text.replace("&#39;", "&#x27;")
    assert run.audit["metrics"]["audit/trust"] == pytest.approx(min(max(correlation, 0), 1) ** 2)
    assert text.index('class="trust"') < text.index("Shade by")


def test_without_an_audit_the_page_says_how_to_measure(run_folder):
    text = (run_folder / "report.html").read_text()
    assert "has not been measured against true values" in text
    assert "tokencredit audit &#39;" in text  # the folder's name has a space
    assert 'id="audit"' not in text
    assert data_of(text)["audit"] is None
    run = read_run(run_folder)
    unsaved = replace(run, config=run.config | {"run": run.config["run"] | {"save_every": 0}})
    assert "audit.every in a new run, since run.save_every: 0 saves no checkpoint" in audit_view.trust(unsaved)


def test_audited_completions_are_one_more_iteration(run):
    shown = data_of(page.render(run))["audited"]
    assert len(shown) == 6
    for ours, theirs in zip(shown, run.audit["samples"], strict=True):
        assert ours["iteration"] == "audit of iteration 3"
        for name, key in (("true advantage", "true_advantages"), ("true value", "true_values")):
            rounded = [None if x is None else float(f"{x:.5g}") for x in theirs[key]]
            assert ours["numbers"][name] == rounded
        assert [x is None for x in ours["errors"]["true advantage"]] == [x is None for x in theirs["true_advantages"]]
        assert ours["numbers"]["advantage"] == pytest.approx(theirs["advantages"], abs=1e-4)
    credit = [x for ours in shown for x in ours["numbers"]["true advantage"]]
    assert None in credit  # five of eight tokens are audited
    assert any(x is not None for x in credit)


def test_the_tables_are_those_of_the_numbers(run):
    found = audit_view.view(run.audit)
    credit, critic = run.audit["credit"], run.audit["critic"]
    assert len(found["estimators"]) == len(credit["estimators"])
    assert found["estimators"][0][0] == "gae, λ = 0.95 (this run's)"
    first = credit["estimators"]["gae, λ = 0.95"]["correlation"]
    assert found["estimators"][0][1].startswith(f"{round(first['value'], 2) + 0:.2f}")
    assert [row[1] for row in found["critic"]] == [
        f"{round(critic[key]['value'], 2) + 0:.2f}" if critic[key]["value"] is not None else "not known"
        for key in CRITIC
    ]
    assert found["chart"]["reliability"] == critic["reliability"]
    text = page.render(run)
    assert f"sign agreement (n = {credit['significant']})" in text
    assert "explained variance" in text


def test_a_run_without_a_critic_has_no_table_of_one(run):
    without = replace(run, audit=run.audit | {"critic": None})
    text = page.render(without)
    assert "<h3>The critic</h3>" not in text
    assert 'id="reliability"' not in text
    assert "Estimators on the audited data" in text


def test_agents_have_episodes_and_no_samples(run):
    config = {"env": {"id": "CartPole-v1"}}
    agent = replace(run, config=config, samples=[], audit=run.audit | {"samples": [], "settings": {"episodes": 6}})
    text = page.render(agent)
    assert "steps of 6 episodes" in text
    assert text.count('class="trust"') == 1
    assert "Where the credit went" not in text


@pytest.mark.parametrize(
    "changes", [{}, {"config": {"env": {"id": "CartPole-v1"}}}, {"metrics": [{"iteration": 1, "env/turns": 2.0}]}]
)
def test_without_an_audit_the_page_has_the_command_for_it(run, changes):
    unknown = replace(run, audit=None, **changes)
    assert f"to measure it: tokencredit audit {run.path}" in audit_view.trust(unknown)
    assert audit_view.trust_fact(unknown) == ("not measured", "by an audit")
    assert next_step(unknown, []) == f"tokencredit audit {run.path}"


def test_the_head_has_the_trust_in_a_word(run):
    credit = run.audit["credit"]

    def fact(value, low, high, noise=0.1):
        shown = {"correlation": {"value": value, "low": low, "high": high}}
        changed = credit | {"noise": {"value": noise}, "estimators": credit["estimators"] | {credit["shown"]: shown}}
        found = replace(run, audit=run.audit | {"credit": changed})
        return *audit_view.trust_fact(found), next_step(found, []).split()[1]

    assert fact(0.8, 0.7, 0.9) == (
        "about 64 %",
        "is real: correlation 0.80 (0.70 to 0.90)",
        "generate",
    )
    assert fact(-0.1, -0.3, 0.2)[0::2] == ("it is not shown that any", "make"), "more of it true"
    unclear = ("not known", "the audit is too noisy or too small", "audit")
    assert fact(0.8, 0.7, 0.9, noise=0.6) == fact(0.8, None, None) == fact(None, 0.7, 0.9) == unclear


def test_an_advantage_has_the_error_of_the_nearest_audit_and_significant_ones_are_counted(run):
    metrics = [row | {"audit/advantage_error": error} for row, error in zip(run.metrics, (0.3, None, 0.1), strict=True)]
    samples = [sample | {"advantages": [0.21, -0.21, 0.19, -0.05]} for sample in run.samples[-2:]]
    audited = replace(run, metrics=metrics, samples=samples)
    assert [audit_view.credit_error(audited, number) for number in (1, 2, 3)] == [(0.3, 1), (0.1, 3), (0.1, 3)]
    assert audit_view.faded(audited) == (
        "Advantages smaller than their standard error, by the nearest audit, are faded. 4 of 8 tokens in the last "
        "iteration's samples have a significant advantage: beyond 2 standard errors of 0.1, by the audit of "
        "iteration 3."
    )
    unknown = replace(run, metrics=[row | {"audit/advantage_error": None} for row in run.metrics])
    assert audit_view.faded(unknown) is None
    assert {view["error"] for view in page.credit(unknown)} == {None}


def test_more_completions_than_fit_are_left_out_and_counted(run, monkeypatch):
    monkeypatch.setattr(page, "AUDITED", sum(len(s["tokens"]) for s in run.audit["samples"][:2]))
    shown = data_of(page.render(run))["audited"]
    assert [s["iteration"] for s in shown] == ["audit of iteration 3 (first 2 of 6)"] * 2


def hostile_audit(run):
    for sample in run.audit["samples"]:
        sample["prompt"] = sample["completion"] = sample["tokens"][0] = HOSTILE
    credit = run.audit["credit"]
    credit["estimators"] = {HOSTILE: credit["estimators"].pop(credit["shown"]), **credit["estimators"]}
    credit["shown"] = HOSTILE


def opened(browser, folder, *, read=False):
    browser.set_window_size(1400, 1000)
    (browser.read if read else browser.get)((folder / "report.html").resolve().as_uri())
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def test_the_browser_shows_the_truth_below_the_shown_advantage(browser, audited_folder):
    opened(browser, audited_folder, read=True)
    sample = read_run(audited_folder).audit["samples"][0]
    select = Select(browser.find_element(By.CSS_SELECTOR, "#pane0 select"))
    assert select.first_selected_option.text == "audit of iteration 3"
    spans = browser.find_elements(By.CSS_SELECTOR, "#pane0 .sample:first-child .tokens span[tabindex]")
    known = [x is not None for x in sample["true_advantages"]]
    script = "return arguments[0].map((span) => [span.className, getComputedStyle(span).borderBottomColor])"
    names, strips = zip(*browser.execute_script(script, spans), strict=True)
    assert ["known" in name.split() for name in names] == known
    error = read_run(audited_folder).metrics[-1]["audit/advantage_error"]
    assert ["faint" in name.split() for name in names] == [abs(x) < round(error, 4) for x in sample["advantages"]]
    assert all((colour == "rgba(0, 0, 0, 0)") for colour, there in zip(strips, known, strict=True) if not there)
    largest = max(range(len(known)), key=lambda i: abs(sample["true_advantages"][i] or 0.0))
    assert strips[largest] != "rgba(0, 0, 0, 0)"
    spans[0].send_keys(*[Keys.ARROW_RIGHT] * largest)
    said = browser.find_element(By.ID, "numbers").text
    number, error = sample["true_advantages"][largest], sample["true_advantage_errors"][largest]
    told = re.search(r"true advantage (\S+) \(standard error (\S+)\)", said)
    assert told.groups() == (two_digits(round(number, 4)), two_digits(round(error, 4)))
    assert ("not measured" in said) == (sample["true_values"][largest] is None)
    assert browser.find_elements(By.CSS_SELECTOR, "#pane0 svg line.true")


@pytest.mark.proof  # test_browser.py: a single evaluation is visible
def test_a_metric_of_few_iterations_is_drawn_with_marks(browser, audited_folder):
    opened(browser, audited_folder, read=True)
    draw_all(browser)
    charts = browser.execute_script(
        "return [...document.querySelectorAll('#plots .js-plotly-plot')].map(({ ariaLabel, data }) => "
        "[ariaLabel.replace(' over iterations', ''), data.map(({ mode, connectgaps }) => [mode, connectgaps])])"
    )
    modes = dict(charts)
    rare = [mode for title, found in modes.items() if title.startswith("audit/") for mode in found]
    assert len(rare) > 10
    assert all(mode == ["lines+markers", True] for mode in rare)
    assert len(modes["audit/correlation"]) == 3, "with both ends of its interval"
    assert modes["kl (nats per sequence)"] == [["lines", False]]


@pytest.mark.proof
def test_the_browser_shows_charts_with_titles_and_the_what_if_table_with_the_truth(browser, audited_folder):
    opened(browser, audited_folder)
    for chart in ("estimators", "reliability"):
        titles = browser.find_elements(By.CSS_SELECTOR, f"#{chart} .xtitle, #{chart} .ytitle")
        assert all(title.get_attribute("textContent") for title in titles)
        assert len(titles) >= 1
    blocks = [block.text for block in browser.find_elements(By.CSS_SELECTOR, "#alternatives .about")]
    assert blocks[0].startswith("true advantage")
    assert len(blocks) == 7
    assert all("correlation with true advantages" in block for block in blocks[1:])
    Select(browser.find_element(By.ID, "if-iteration")).select_by_value("1")
    assert len(browser.find_elements(By.CSS_SELECTOR, "#alternatives .about")) == 6
    Select(browser.find_element(By.ID, "quantity")).select_by_value("true advantage")
    assert "from continuations" in browser.find_element(By.ID, "unit").text


def test_hostile_audits_do_nothing_in_the_browser(browser, audited_folder, run, place):
    folder = shutil.copytree(audited_folder, place / "copy")
    hostile_audit(run)
    (folder / "audit.json").write_text(json.dumps(run.audit))
    page.write_report(folder)
    opened(browser, folder)
    assert browser.title.startswith("copy")
    assert not browser.find_elements(By.CSS_SELECTOR, "img[src='x']")
    labels = "".join(t.get_attribute("textContent") for t in browser.find_elements(By.CSS_SELECTOR, "#estimators text"))
    assert "<img" in labels
