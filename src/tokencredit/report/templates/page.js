const { headline, changes, since, curves, credit, opened, audited, alternatives, audit } = data;
const scored = credit.filter(({ iteration }) => iteration > since); // as the last ones
const views = [...credit, ...audited]; // an audit is listed like an iteration
const TRUTH = { advantage: "true advantage", value: "true value" };

const ENDS = {{ shades|tojson }};

function colour(share) { // from −1 to 1, ever thinner towards 0
  const [below, above] = dark.matches ? ENDS.dark : ENDS.light;
  return `rgb(${share < 0 ? below : above} / ${(0.7 * Math.min(Math.abs(share), 1)).toFixed(3)})`;
}

const MEANINGS = {
  advantage: "how much better the text became with the token than expected, less the price of its KL if the reward has one, in units of reward; training makes tokens with a positive one likelier",
  value: "reward that the critic expects before the token, in units of reward",
  reward: "paid for the token, less the price of the KL if it is a part of the reward, in units of reward",
  "true advantage": "the advantage as measured from continuations, in units of reward", "true value": "the value as measured from continuations, in units of reward",
  "log-probability": "of the token when it was sampled, in nats", "log-ratio": "log π − log reference, in nats: above 0 the policy writes the token more often than the reference",
  "ratio after the update": "the token's new probability over that when it was sampled, around 1, which is no change",
  clipped: "1 where the update's gradient is clipped",
  age: "in updates since the token was drawn",
};
const CENTRES = { "ratio after the update": 1 };

function reach(samples, quantity, share = 1) { // the largest distance from the centre, of the truth beside it too, or that of a share of them
  const centre = CENTRES[quantity] ?? 0;
  const sizes = samples.flatMap(({ numbers }) => [...(numbers[quantity] ?? []), ...(numbers[TRUTH[quantity]] ?? [])])
    .filter((x) => x !== null).map((x) => Math.abs(x - centre)).sort((a, b) => a - b);
  return sizes[Math.ceil(share * (sizes.length - 1))] || sizes.at(-1) || 1;
}

function tokens(sample, values, scale, centre, describe, { truth, truthScale = scale, credit = values, error = 0 } = {}) {
  const spans = sample.tokens.map((text, i) => {
    const span = make("span", { textContent: text || "∅" });
    const faint = values[i] !== null && Math.abs(values[i]) < error;
    if (values[i] !== null) span.style.backgroundColor = colour(((faint ? 0.3 : 1) * (values[i] - centre)) / scale);
    if (faint) span.classList.add("faint");
    if (truth && truth[i] !== null) {
      span.classList.add("known");
      span.style.borderBottomColor = colour(truth[i] / truthScale);
    }
    return span;
  });
  walk([spans], (_, i) => describe(i));
  const line = (...parts) => make("div", { className: truth ? "tokens audited" : "tokens" }, ...parts);
  if (sample.turns) return episode(sample, spans, line, credit);
  if (sample.chat) return chat(sample, line(...spans));
  return line(make("span", { className: "prompt", textContent: sample.prompt }), ...spans);
}

const SVG = "http://www.w3.org/2000/svg";
function lineOf(kind, numbers) {
  const line = document.createElementNS(SVG, kind);
  for (const [key, value] of Object.entries(numbers)) line.setAttribute(key, value);
  return line;
}

function valueLine(sample) {
  const { value: values, "true value": truth = [] } = sample.numbers, errors = sample.errors["true value"] ?? [];
  const starts = (sample.turns ?? []).map(({ start }) => start).filter((start) => start > 0);
  const bars = truth.flatMap((x, i) => (x === null ? [] : [[i, x - 2 * errors[i], x + 2 * errors[i]]]));
  const points = values.flatMap((x, i) => (x === null ? [] : [[i, x]])), learned = points.map(([, x]) => x);
  const all = [0, ...learned, ...bars.flatMap(([, low, high]) => [low, high])];
  const low = Math.min(...all), high = Math.max(...all), span = high - low || 1;
  const y = (x) => 38 - (36 * (x - low)) / span;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${Math.max(values.length - 1, 1)} 40`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `value before each token, ${format(learned[0])} at first, ${format(learned.at(-1))} at last`
    + (bars.length ? ", with the true values that were measured" : ""));
  svg.append(
    lineOf("line", { x1: 0, x2: Math.max(values.length - 1, 1), y1: y(0), y2: y(0) }),
    ...starts.map((x) => lineOf("line", { class: "start", x1: x, x2: x, y1: 0, y2: 40 })),
    ...bars.map(([i, low, high]) => lineOf("line", { class: "true", x1: i, x2: i, y1: y(low) + 0.5, y2: y(high) - 0.5 })),
    lineOf("polyline", { points: points.map(([i, x]) => `${i},${y(x)}`).join(" ") }),
  );
  return make("div", { className: "line" }, make("span", { textContent: "value" }), svg,
    make("span", { className: "ends" }, make("span", { textContent: format(high) }), make("span", { textContent: format(low) })));
}

function withError(value, error) {
  return value === null ? "not measured" : format(value) + (error ? ` (standard error ${format(error)})` : "");
}

function describe(sample, i) {
  const shown = Object.entries(sample.numbers).filter(([name, values]) => values[i] !== null || sample.errors[name]);
  const numbers = shown.map(([name, values]) => `${name} ${withError(values[i], name === "advantage" ? sample.error : sample.errors[name]?.[i])}`);
  by("numbers").textContent = `${placeOf(sample, i)}token ${i + 1} of ${sample.tokens.length}, “${sample.tokens[i]}”: ${numbers.join(", ")}`;
}

const entries = () => [...new Set(views.map((sample) => sample.iteration))];
const samplesOf = (select) => views.filter((sample) => String(sample.iteration) === select.value);

// Samples with the same prompts as in another list come first, in its order.
function alike(samples, others) {
  const prompts = others.map((s) => s.prompt);
  const rank = ({ prompt }) => { const i = prompts.indexOf(prompt); return i < 0 ? prompts.length : i; };
  return [...samples].sort((a, b) => rank(a) - rank(b));
}

function creditView() {
  const iterations = entries();
  const quantities = [...new Set(views.flatMap((sample) => Object.keys(sample.numbers)))];
  choices(by("quantity"), quantities.map((name) => [name, name]));
  const narrow = matchMedia("(max-width: 51rem)").matches; // panes would stand below each other: the last is enough
  const auditOpens = audited.some(({ iteration }) => iteration === opened[0]);
  const first = narrow && !auditOpens ? opened.at(-1) : opened[0];
  const panes = [by("pane0"), by("pane1")].map((pane, number) => {
    const select = make("select"), ramp = make("canvas", { width: 256, height: 1 });
    choices(select, iterations.map((i) => [i, i]));
    select.value = number === 0 ? first : opened.at(-1) ?? first;
    const [low, high, list] = [make("span"), make("span"), make("div")];
    pane.append(make("div", { className: "controls" }, make("label", {}, "Iteration ", select),
      make("div", { className: "legend", ariaHidden: "true" }, low, ramp, high)), list);
    select.addEventListener("change", draw);
    return { pane, select, low, high, ramp, list };
  });
  if (panes[0].select.value === panes[1].select.value) by("both").checked = false;

  function draw() {
    const quantity = by("quantity").value, centre = CENTRES[quantity] ?? 0, scale = by("scale").value;
    by("unit").textContent = `${quantity}, ${MEANINGS[quantity]}`;
    panes[1].pane.hidden = !by("both").checked;
    const order = by("order").value, shared = reach(views, quantity, 0.99); // a few tokens far off do not make all others pale
    for (const { select, low, high, ramp, list } of panes) {
      const samples = alike(samplesOf(select), samplesOf(panes[0].select));
      if (order !== "written") samples.sort((a, b) => (order === "best" ? b.reward - a.reward : a.reward - b.reward));
      const largest = scale === "all" ? shared : reach(samples, quantity), own = scale === "sample";
      const beyond = (sign) => (scale === "all" ? `${sign} ` : "");
      low.textContent = own ? "− its largest" : beyond("≤") + format(centre - largest);
      high.textContent = own ? "+ its largest" : beyond("≥") + format(centre + largest);
      const pixels = ramp.getContext("2d");
      pixels.clearRect(0, 0, 256, 1);
      for (let x = 0; x < 256; x++) { pixels.fillStyle = colour(x / 127.5 - 1); pixels.fillRect(x, 0, 1, 1); }
      list.replaceChildren(...samples.map((sample) => {
        const values = sample.numbers[quantity] ?? sample.tokens.map(() => centre);
        return make("div", { className: "sample" },
          make("div", { className: "about" }, make("span", { textContent: `reward ${format(sample.reward)}` }),
            make("span", { textContent: sample.turns ? lengthOf(sample) : sample.truncated ? "truncated at the length limit" : `${sample.tokens.length} tokens` })),
          tokens(sample, values, own ? reach([sample], quantity) : largest, centre, (i) => describe(sample, i),
            { truth: sample.numbers[TRUTH[quantity]], credit: sample.numbers.advantage, error: (quantity === "advantage" && sample.error) || 0 }),
          // none without a critic
          ...(sample.numbers.value ? [valueLine(sample)] : []));
      }));
    }
  }
  for (const id of ["quantity", "order", "scale", "both"]) by(id).addEventListener("change", draw);
  dark.addEventListener("change", draw);
  draw();
}

function whatIf() {
  const iterations = entries();
  choices(by("if-iteration"), iterations.map((i) => [i, i]));
  by("if-iteration").value = audited.length && !audit.noisy ? iterations.at(-1) : opened.at(-1); // beside the truth
  let samples = [];
  function list() {
    samples = samplesOf(by("if-iteration"));
    choices(by("if-sample"), samples.map((s, i) => [i, `reward ${format(s.reward)}: ${s.turns ? "" : s.prompt}${s.tokens.join("")}`.slice(0, 80)]));
    draw();
  }
  function draw() {
    const sample = samples[Number(by("if-sample").value)], truth = sample.numbers["true advantage"];
    const largest = (values) => Math.max(...values.map(Math.abs)) || 1, truthScale = truth && largest(truth);
    const lines = alternatives.map((label, k) => [label, sample.what_if[k]]);
    if (truth) lines.unshift(["true advantage", truth]);
    by("alternatives").replaceChildren(...lines.flatMap(([label, values]) => {
      if (!values) return []; // it needs a critic's values
      const known = values.filter((x) => x !== null), mean = known.reduce((a, b) => a + b, 0) / known.length;
      const deviation = Math.sqrt(known.reduce((a, b) => a + (b - mean) ** 2, 0) / known.length);
      const error = (i) => (values === truth ? sample.errors["true advantage"][i] : undefined);
      const beside = (i) => (truth && values !== truth ? `, true ${withError(truth[i], sample.errors["true advantage"][i])}` : "");
      const say = (i) => {
        by("numbers").textContent = `${placeOf(sample, i)}token ${i + 1}, “${sample.tokens[i]}”: advantage ${withError(values[i], error(i))} with ${label}${beside(i)}`;
      };
      const correlation = truth && audit.correlations[label] ? `, correlation with true advantages ${withInterval(audit.correlations[label])}${audit.noisy ? ", too noisy," : ""} over the audit` : "";
      return make("div", { className: "sample" },
        make("div", { className: "about" }, make("b", { textContent: label }),
          make("span", { textContent: (known.length ? `mean ${format(mean)}, deviation ${format(Number(deviation.toFixed(4)))}` : "not measured") + correlation })),
        tokens(sample, values, largest(values), 0, say, { truth: values === truth ? undefined : truth, truthScale }));
    }));
  }
  by("if-iteration").addEventListener("change", list);
  by("if-sample").addEventListener("change", draw);
  dark.addEventListener("change", draw);
  list();
}

function withInterval({ value, low, high }) {
  const digits = (x) => (Math.round(100 * x) / 100 + 0).toFixed(2); // no minus sign at 0
  return value === null ? "not known" : digits(value) + (low === null || high === null ? "" : ` (${digits(low)} to ${digits(high)})`);
}

function auditCharts() {
  const style = getComputedStyle(document.documentElement);
  const accent = style.getPropertyValue("--accent").trim(), soft = style.getPropertyValue("--soft").trim();
  const found = Object.entries(audit.correlations).filter(([, figure]) => figure.value !== null).reverse(); // the first on top
  const reaches = (middle, points, low, high) => ({ type: "data", symmetric: false, color: accent, thickness: 1.5,
    array: points.map((p) => (p[high] === null ? 0 : p[high] - p[middle])), arrayminus: points.map((p) => (p[low] === null ? 0 : p[middle] - p[low])) });
  const figures = found.map(([, figure]) => figure);
  const chart = { showlegend: false, hovermode: "closest", margin: { l: 60, r: 15, t: 10, b: 50 } };
  plot(by("estimators"), [{
    type: "scatter", mode: "markers", x: figures.map((f) => f.value), y: found.map(([label]) => plain(label)), error_x: reaches("value", figures, "low", "high"),
    marker: { color: accent, size: 9, symbol: found.map(([label]) => (label === audit.shown ? "diamond" : "circle")) }, hovertemplate: "%{y}: %{x:.2f}<extra></extra>",
  }], {
    ...chart, yaxis: { automargin: true }, xaxis: { title: { text: `correlation, ${audit.noisy ? "too noisy" : "95 % interval"}` } },
  });
  if (!by("reliability")) return;
  const bins = audit.reliability, ends = bins.flatMap((b) => [b.predicted, b.true]), range = [Math.min(...ends), Math.max(...ends)];
  plot(by("reliability"), [
    { type: "scatter", mode: "lines", x: range, y: range, line: { dash: "dash", color: soft, width: 1 }, hoverinfo: "skip" },
    { type: "scatter", mode: "markers", x: bins.map((b) => b.predicted), y: bins.map((b) => b.true), error_y: reaches("true", bins, "low", "high"),
      text: bins.map((b) => `${b.states} states`), marker: { color: accent, size: 9 }, hovertemplate: "value %{x:.3f}, true %{y:.3f}, %{text}<extra></extra>" },
  ], {
    ...chart, xaxis: { title: { text: "critic's value (units of reward)" } }, yaxis: { title: { text: "true value, 95 % interval (units of reward)" } },
  });
}

// A card starts with the end of the prompt, in a line of its own, so that texts start at their first differing word.
function said(sample, label) {
  const shown = sample.closed ? sample.tokens.slice(0, -1) : sample.tokens; // without the token that ended it
  const prompt = (textContent) => make("span", { className: "prompt", textContent });
  const text = sample.turns ? inline(sample, prompt) : [shown.join("").trimStart() || "∅"];
  return make("div", {}, make("div", { className: "about" }, `${label}, reward `, make("b", { textContent: format(sample.reward) })), make("p", {}, ...text));
}

function asked(sample) {
  const end = (text) => (text.length > SHORTEST ? `…${text.slice(-SHORTEST)}` : text);
  const [role, text] = messages(sample).at(-1) ?? ["", ""]; // none where an empty answer is all
  return make("div", { className: "asked" }, ...(role ? [speaker(`${role} `)] : []), `${end(text.trimEnd())}${sample.chat || sample.turns ? "" : " …"}`);
}

const card = (...pairs) => make("div", { className: "card" }, // a prompt that both share is shown once
  ...pairs.flatMap(([sample, label], i) => [...(i && sample.prompt === pairs[0][0].prompt ? [] : [asked(sample)]), said(sample, label)]));

function compared() { // completions of the first and the last iteration, the same prompts beside each other
  const first = scored[0].iteration, last = scored.at(-1).iteration;
  const of = (number) => scored.filter((s) => s.iteration === number);
  const before = alike(of(first), of(last)), after = alike(of(last), before);
  const rows = Array.from({ length: Math.min(3, before.length, after.length) }, (_, i) => (first === last
    ? card([after[i], `iteration ${last}`]) : card([before[i], `before (iteration ${first})`], [after[i], `after (iteration ${last})`])));
  by("compared").append(...rows);
}

function examples() {
  const ranked = [...scored].sort((a, b) => b.reward - a.reward);
  by("examples").replaceChildren(...[["best", ranked.slice(0, 3)], ["worst", ranked.slice(-3).reverse()]].map(([title, samples]) =>
    make("div", {}, make("h3", { textContent: title }), ...samples.map((s) => card([s, `iteration ${s.iteration}`])))));
}

function smooth(values, width) {
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - width + 1), i + 1).filter((x) => x !== null);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}

function about({ title, lines }) { // the title of a chart; each metric in a sentence on hover, or below it when opened
  const sentences = Map.groupBy(lines.filter(({ meaning }) => meaning), ({ meaning }) => meaning);
  const texts = [...sentences].map(([meaning, those]) => (lines.length > 1 ? `${those.map(({ name }) => name).join(", ")}: ${meaning}` : meaning));
  if (!texts.length) return make("div", { className: "title", textContent: title });
  return make("details", { className: "title" }, make("summary", { title: texts.join("\n"), textContent: title }),
    ...texts.map((textContent) => make("p", { className: "note", textContent })));
}

function plots() { // curves are drawn as they come near the window: all of them at once take seconds
  const charts = new Map(headline ? [[by("headline"), headline]] : []), near = new Set(charts.keys());
  if (headline) by("headline").before(about(headline));
  for (const { title, charts: found } of curves) {
    const grid = make("div", { className: "plots" });
    by("plots").append(make("h3", { textContent: title }), grid);
    for (const chart of found) {
      const box = make("div", { className: "chart", role: "img", ariaLabel: `${chart.title} over iterations` });
      grid.append(make("div", {}, about(chart), box));
      charts.set(box, chart);
    }
  }
  function draw(box) {
    const width = Number(by("smooth").value), state = `${width} ${dark.matches}`, chart = charts.get(box);
    if (box.state === state) return;
    box.state = state;
    const traces = chart.lines.map(({ name, x, y }) => {
      const rare = y.some((value, i) => known(value) && !known(y[i - 1]) && !known(y[i + 1])); // evaluations, audits
      const means = smooth(y, width);
      return { name: plain(name), x, y: means, mode: rare ? "lines+markers" : "lines", connectgaps: rare, type: "scatter",
        text: means.map(format), hovertemplate: "%{text}" };
    });
    plot(box, traces, {
      margin: { l: 60, r: 10, t: 12, b: box.id ? 50 : 30 }, showlegend: traces.length > 1,
      shapes: changes.map(({ x }) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { dash: "dot", width: 1 } })),
      annotations: changes.map(({ x, text }) => ({ x, y: 1, yref: "paper", text: "changed", hovertext: plain(text), showarrow: false, font: { size: 10 } })),
      legend: { orientation: "h", y: -0.2, font: { size: 11 } }, xaxis: box.id ? { title: { text: "iteration" } } : {}, yaxis: { exponentformat: "none" },
    });
  }
  function change() {
    by("smoothed").textContent = by("smooth").value;
    near.forEach(draw);
  }
  const watch = new IntersectionObserver((seen) => seen.forEach(({ target, isIntersecting }) => {
    if (isIntersecting) { near.add(target); draw(target); } else near.delete(target);
  }), { rootMargin: "50%" });
  for (const box of charts.keys()) if (!near.has(box)) watch.observe(box);
  by("smooth").addEventListener("input", change);
  dark.addEventListener("change", change);
  addEventListener("beforeprint", () => charts.forEach((_, box) => { near.add(box); draw(box); }));
  change();
}

if (views.length) { creditView(); whatIf(); }
if (scored.length) { compared(); examples(); }
if (audit) { auditCharts(); dark.addEventListener("change", auditCharts); }
plots();
