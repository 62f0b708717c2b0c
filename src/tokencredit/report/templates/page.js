const { curves, credit, alternatives } = data;

// Purple to orange, which people with any colour vision tell apart, ever thinner towards the middle.
const ENDS = { light: ["94 60 153", "230 97 1"], dark: ["140 110 220", "230 120 20"] };

function colour(share) { // from −1 to 1
  const [below, above] = dark.matches ? ENDS.dark : ENDS.light;
  return `rgb(${share < 0 ? below : above} / ${(0.7 * Math.min(Math.abs(share), 1)).toFixed(3)})`;
}

const UNITS = {
  advantage: "in units of reward", value: "in units of reward", reward: "in units of reward",
  "log-probability": "nats", "log-ratio": "nats, log π − log reference",
  "ratio after the update": "around 1, where nothing changed",
  clipped: "1 where the update's gradient is cut off",
};
const CENTRES = { "ratio after the update": 1 };

function reach(samples, quantity) { // the largest distance from the centre
  const centre = CENTRES[quantity] ?? 0;
  let most = 0;
  for (const sample of samples) for (const x of sample.numbers[quantity] ?? []) most = Math.max(most, Math.abs(x - centre));
  return most || 1;
}

function tokens(sample, values, scale, centre, describe) {
  const line = make("div", { className: "tokens" }, make("span", { className: "prompt", textContent: sample.prompt }));
  const spans = sample.tokens.map((text, i) => {
    const span = make("span", { textContent: text || "∅", tabIndex: i === 0 ? 0 : -1 });
    span.style.background = colour((values[i] - centre) / scale);
    span.addEventListener("focus", () => describe(i));
    span.addEventListener("mouseenter", () => describe(i));
    span.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, Home: -i, End: spans.length - 1 - i }[event.key];
      if (step === undefined || !spans[i + step]) return;
      event.preventDefault();
      span.tabIndex = -1;
      spans[i + step].tabIndex = 0;
      spans[i + step].focus();
    });
    return span;
  });
  line.append(...spans);
  return line;
}

const SVG = "http://www.w3.org/2000/svg";
function valueLine(values) {
  const low = Math.min(0, ...values), high = Math.max(0, ...values), span = high - low || 1;
  const y = (x) => 38 - (36 * (x - low)) / span;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${Math.max(values.length - 1, 1)} 40`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `value before each token, from ${format(values[0])} to ${format(values.at(-1))}`);
  const zero = document.createElementNS(SVG, "line");
  for (const [key, value] of Object.entries({ x1: 0, x2: Math.max(values.length - 1, 1), y1: y(0), y2: y(0) })) zero.setAttribute(key, value);
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", values.map((x, i) => `${i},${y(x)}`).join(" "));
  svg.append(zero, line);
  return svg;
}

function describe(sample, i) {
  const numbers = Object.entries(sample.numbers).map(([name, values]) => `${name} ${format(values[i])}`);
  by("numbers").textContent = `token ${i + 1} of ${sample.tokens.length}, “${sample.tokens[i]}”: ${numbers.join(", ")}`;
}

function creditView() {
  const iterations = [...new Set(credit.map((sample) => sample.iteration))];
  const quantities = [...new Set(credit.flatMap((sample) => Object.keys(sample.numbers)))];
  choices(by("quantity"), quantities.map((name) => [name, name]));
  const panes = [by("pane0"), by("pane1")].map((pane, number) => {
    const select = make("select");
    choices(select, iterations.map((i) => [i, i]));
    select.value = iterations[number === 0 ? 0 : iterations.length - 1];
    const list = make("div");
    pane.append(make("label", {}, "Iteration ", select), list);
    select.addEventListener("change", draw);
    return { pane, select, list };
  });
  if (iterations.length < 2) by("both").checked = false;

  function draw() {
    const quantity = by("quantity").value, centre = CENTRES[quantity] ?? 0;
    const everywhere = reach(credit, quantity), own = by("scale").value === "sample";
    by("low").textContent = own ? "− its largest" : format(centre - everywhere);
    by("high").textContent = own ? "+ its largest" : format(centre + everywhere);
    by("unit").textContent = `${quantity}, ${UNITS[quantity]}`;
    const ramp = by("ramp").getContext("2d");
    ramp.clearRect(0, 0, 256, 1);
    for (let x = 0; x < 256; x++) { ramp.fillStyle = colour(x / 127.5 - 1); ramp.fillRect(x, 0, 1, 1); }
    panes[1].pane.hidden = !by("both").checked;
    const order = by("order").value;
    // The same prompts stand beside each other; others follow.
    const prompts = credit.filter((s) => s.iteration === Number(panes[0].select.value)).map((s) => s.prompt);
    const rank = (sample) => { const i = prompts.indexOf(sample.prompt); return i < 0 ? prompts.length : i; };
    for (const { select, list } of panes) {
      const samples = credit.filter((sample) => sample.iteration === Number(select.value));
      samples.sort(order === "written" ? (a, b) => rank(a) - rank(b) : (a, b) => (order === "best" ? b.reward - a.reward : a.reward - b.reward));
      list.replaceChildren(...samples.map((sample) => {
        const values = sample.numbers[quantity] ?? sample.tokens.map(() => centre);
        return make("div", { className: "sample" },
          make("div", { className: "about" }, make("span", { textContent: `reward ${format(sample.reward)}` }),
            make("span", { textContent: sample.truncated ? "cut off at the length limit" : `${sample.tokens.length} tokens` })),
          tokens(sample, values, own ? reach([sample], quantity) : everywhere, centre, (i) => describe(sample, i)),
          ...(sample.numbers.value ? [valueLine(sample.numbers.value)] : [])); // none without a critic
      }));
    }
  }
  for (const id of ["quantity", "order", "scale", "both"]) by(id).addEventListener("change", draw);
  dark.addEventListener("change", draw);
  draw();
}

function whatIf() {
  const iterations = [...new Set(credit.map((sample) => sample.iteration))];
  choices(by("if-iteration"), iterations.map((i) => [i, i]));
  by("if-iteration").value = iterations.at(-1);
  let samples = [];
  function list() {
    samples = credit.filter((sample) => sample.iteration === Number(by("if-iteration").value));
    choices(by("if-sample"), samples.map((s, i) => [i, `reward ${format(s.reward)}: ${s.prompt}${s.tokens.join("")}`.slice(0, 80)]));
    draw();
  }
  function draw() {
    const sample = samples[Number(by("if-sample").value)];
    by("alternatives").replaceChildren(...alternatives.flatMap((label, k) => {
      const values = sample.what_if[k];
      if (!values) return []; // it needs a critic's values
      const scale = Math.max(...values.map(Math.abs)) || 1, mean = values.reduce((a, b) => a + b, 0) / values.length;
      const deviation = Math.sqrt(values.reduce((a, b) => a + (b - mean) ** 2, 0) / values.length);
      const say = (i) => { by("numbers").textContent = `token ${i + 1}, “${sample.tokens[i]}”: advantage ${format(values[i])} with ${label}`; };
      return make("div", { className: "sample" },
        make("div", { className: "about" }, make("b", { textContent: label }),
          make("span", { textContent: `mean ${format(mean)}, deviation ${format(deviation)}` })),
        tokens(sample, values, scale, 0, say));
    }));
  }
  by("if-iteration").addEventListener("change", list);
  by("if-sample").addEventListener("change", draw);
  dark.addEventListener("change", draw);
  list();
}

function examples() {
  const first = credit[0].iteration, last = credit.at(-1).iteration;
  const ranked = [...credit].sort((a, b) => b.reward - a.reward);
  const groups = [
    [`before (iteration ${first})`, credit.filter((s) => s.iteration === first).slice(0, 4)],
    [`after (iteration ${last})`, credit.filter((s) => s.iteration === last).slice(0, 4)],
    ["best", ranked.slice(0, 3)], ["worst", ranked.slice(-3).reverse()],
  ];
  by("examples").replaceChildren(...groups.map(([title, samples]) => make("div", {}, make("h3", { textContent: title }),
    ...samples.map((sample) => make("p", {}, make("b", { textContent: `${format(sample.reward)} ` }),
      make("span", { className: "prompt", textContent: sample.prompt }), sample.tokens.join(""),
      title.includes("iteration") ? "" : ` (iteration ${sample.iteration})`)))));
}

function smooth(values, width) {
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - width + 1), i + 1).filter((x) => x !== null);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}

function plots() {
  const boxes = curves.map((group) => ({ group, box: by("plots").appendChild(make("div")) }));
  function draw() {
    const width = Number(by("smooth").value);
    by("smoothed").textContent = width;
    for (const { group, box } of boxes) {
      const traces = group.lines.map(({ name, x, y }) => ({ name: plain(name), x, y: smooth(y, width), mode: x.length > 1 ? "lines" : "markers", type: "scatter" }));
      plot(box, traces, {
        title: { text: group.title, font: { size: 15 } }, margin: { l: 50, r: 10, t: 40, b: 40 }, showlegend: true,
        legend: { orientation: "h", y: -0.2, font: { size: 11 } },
      });
    }
  }
  by("smooth").addEventListener("input", draw);
  dark.addEventListener("change", draw);
  draw();
}

if (credit.length) { creditView(); whatIf(); examples(); }
plots();
