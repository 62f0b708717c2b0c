const { tokens, asked, lens, attention, critic } = data;
const MODELS = ["base", "tuned"];
const quoted = (token) => `“${token.trim() || token || "∅"}”`;
const largest = (lists) => lists.flat().reduce((most, x) => Math.max(most, Math.abs(x)), 0) || 1;

function shade(element, share) { // from −1, purple, to 1, orange
  element.style.setProperty("--share", Math.min(Math.abs(share), 1).toFixed(3));
  element.classList.toggle("below", share < 0);
}

// A table with a shaded cell per row and column; returns the cells.
function map(box, label, rows, columns, write, say, choose) {
  const cells = rows.map((_, i) => columns.map((_, j) => make("td", { role: "gridcell", textContent: write(i, j) })));
  const header = make("tr", {}, make("td"), ...columns.map(({ text, asked }) => make("th", { scope: "col", textContent: text, className: asked ? "asked" : "" })));
  const body = cells.map((row, i) => make("tr", {}, make("th", { scope: "row", textContent: rows[i] }), ...row));
  const table = make("table", {}, make("thead", {}, header), make("tbody", {}, ...body));
  table.setAttribute("role", "grid");
  table.setAttribute("aria-label", label);
  box.replaceChildren(table);
  walk(cells, say, choose);
  return cells;
}

const header = (positions) => positions.map((t) => ({ text: tokens[t] || "∅", asked: t === asked }));
const place = (t) => `after ${quoted(tokens[t])} (position ${t + 1} of ${tokens.length})`;

function reveal(box, column) {
  const cell = box.querySelectorAll("thead th")[column];
  if (cell) box.scrollLeft = cell.offsetLeft - box.clientWidth / 2;
}

function lensColumn(column) { // both models after each layer, at one position
  const cells = (model, i) => {
    const [token, probability, rank] = ["token", "probability", "rank"].map((key) => lens[model][key][i][column]);
    const cell = make("td", { className: "token shaded", textContent: token || "∅" });
    shade(cell, probability);
    return [cell, make("td", { textContent: format(probability) }), make("td", { textContent: format(rank) })];
  };
  const titles = ["layer", ...MODELS.flatMap((model) => [model, "probability", "rank"]), "KL"];
  by("column").replaceChildren(
    make("thead", {}, make("tr", {}, ...titles.map((textContent) => make("th", { scope: "col", textContent })))),
    make("tbody", {}, ...lens.layers.map((layer, i) => make("tr", {}, make("th", { scope: "row", textContent: layer }),
      ...MODELS.flatMap((model) => cells(model, i)), make("td", { textContent: format(lens.kl[i][column]) })))));
}

function lensView() {
  const { layers, positions } = lens, column = Math.max(positions.indexOf(asked), 0);
  choices(by("position"), positions.map((t, j) => [j, `${t + 1}: ${tokens[t]} → ${tokens[t + 1]}`]));
  by("position").value = column;
  by("position").addEventListener("change", () => lensColumn(Number(by("position").value)));
  lensColumn(column);
  const say = (i, j) => {
    const next = quoted(tokens[positions[j] + 1]);
    const one = (model) => `${model} says ${quoted(lens[model].token[i][j])}, and ${next} with probability ${format(lens[model].probability[i][j])}, rank ${format(lens[model].rank[i][j])}`;
    by("lens-numbers").textContent = `layer ${layers[i]}, ${place(positions[j])}: ${MODELS.map(one).join("; ")}; KL ${format(lens.kl[i][j])} nats`;
  };
  const boxes = MODELS.map((model) => by(`lens-${model}`));
  const cells = MODELS.map((model, k) => map(boxes[k], `Logit lens of the ${model} model`, layers, header(positions), (i, j) => lens[model].token[i][j] || "∅", say));
  const ranks = Math.log(largest(MODELS.map((model) => lens[model].rank.flat())) + 1), kl = largest(lens.kl);
  const shares = {
    probability: (model, i, j) => lens[model].probability[i][j],
    rank: (model, i, j) => 1 - Math.log(lens[model].rank[i][j]) / ranks,
    kl: (_, i, j) => lens.kl[i][j] / kl,
  };
  const draw = () => MODELS.forEach((model, k) => cells[k].forEach((row, i) => row.forEach((cell, j) => shade(cell, shares[by("shade").value](model, i, j)))));
  by("shade").addEventListener("change", draw);
  draw();
  for (const box of boxes) reveal(box, column);
  boxes.forEach((box, k) => box.addEventListener("scroll", () => { boxes[1 - k].scrollLeft = box.scrollLeft; }));
}

function strip(title, positions, values, scale, say) { // tokens of the text, shaded by a number
  const spans = positions.map((t) => make("span", { textContent: tokens[t] || "∅" }));
  spans.forEach((span, j) => shade(span, values[j] / scale));
  walk([spans], (_, j) => say(j));
  return make("div", { className: "strip" }, make("b", { textContent: title }), ...spans);
}

function headsView() {
  const { from, to, heads } = attention, numbers = by("attention-numbers");
  const change = ({ base, tuned }) => base.reduce((sum, x, j) => sum + Math.abs(tuned[j] - x), 0);
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const layers = [...new Set(heads.map(({ layer }) => layer))];
  const grid = layers.map((layer) => heads.filter((head) => head.layer === layer));
  const most = largest(heads.map(change));
  const name = ({ layer, head }) => `layer ${layer} head ${head}`;
  const say = (i, j) => {
    const head = grid[i][j];
    numbers.textContent = `${name(head)}: attention to the prompt changed by ${format(change(head))}; in all it was ${format(sum(head.base))} in the base model and is ${format(sum(head.tuned))} in the tuned one`;
  };
  function show(i, j) {
    const head = grid[i][j], scale = largest([head.base, head.tuned]);
    cells.flat().forEach((cell) => cell.setAttribute("aria-selected", cell === cells[i][j]));
    by("head").textContent = `${name(head)}, from ${quoted(tokens[from])}`;
    by("head-tokens").replaceChildren(...MODELS.map((model) => strip(`${model}, full colour at ${format(scale)}`, to, head[model], scale, (k) => {
      numbers.textContent = `${quoted(tokens[to[k]])}: attention ${format(head.base[k])} in the base model, ${format(head.tuned[k])} in the tuned one`;
    })));
  }
  const choose = (i, j) => { show(i, j); say(i, j); };
  const cells = map(by("heads"), "Heads", layers, grid[0].map(({ head }) => ({ text: head })), () => "", say, choose);
  cells.forEach((row, i) => row.forEach((cell, j) => {
    cell.ariaLabel = `${name(grid[i][j])}, changed by ${format(change(grid[i][j]))}`;
    shade(cell, change(grid[i][j]) / most);
  }));
  const first = heads.reduce((best, head) => (change(head) > change(best) ? head : best));
  const layer = layers.indexOf(first.layer);
  show(layer, grid[layer].indexOf(first));
}

function gradientView() {
  const { to, input_gradient } = attention, scale = largest(MODELS.map((model) => input_gradient[model]));
  by("gradient").replaceChildren(...MODELS.map((model) => strip(`${model}, full colour at ${format(scale)}`, to, input_gradient[model], scale, (k) => {
    by("attention-numbers").textContent = `${quoted(tokens[to[k]])}: gradient × input ${format(input_gradient.base[k])} in the base model, ${format(input_gradient.tuned[k])} in the tuned one`;
  })));
}

function criticView() {
  const { layers, positions, values, final, score } = critic, scale = largest([final, score ?? 0]);
  by("critic-scale").textContent = `Colour: from −${format(scale)}, purple, to ${format(scale)}, orange: the largest of the critic’s own values${score === null ? "" : " and the score"}. Beyond it the colour stays.`;
  const say = (i, j) => { by("critic-numbers").textContent = `layer ${layers[i]}, ${place(positions[j])}: value ${format(values[i][j])}, the critic's ${format(final[j])}`; };
  const cells = map(by("values"), "Value by layer and position", layers, header(positions), (i, j) => format(values[i][j]), say);
  cells.forEach((row, i) => row.forEach((cell, j) => shade(cell, values[i][j] / scale)));
  reveal(by("values"), positions.indexOf(asked));
}

for (const button of document.querySelectorAll("button[aria-controls]")) {
  button.addEventListener("click", () => {
    const rows = by(button.getAttribute("aria-controls"));
    rows.hidden = !rows.hidden;
    button.setAttribute("aria-expanded", !rows.hidden);
  });
}
const passage = by("passage");
passage.scrollTop = passage.querySelector("mark").offsetTop - passage.clientHeight / 2; // the asked token in the middle
lensView();
gradientView();
if (critic) criticView();
if (attention.heads.length) headsView();
