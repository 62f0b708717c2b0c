"use strict";
// What a model wrote and what a configuration holds is untrusted: it enters a page as text nodes only, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("screen and (prefers-color-scheme: dark)");
const by = (id) => document.getElementById(id);
function format(x) { // as `two_digits` of templating.py
  if (x === null || x === undefined) return "none";
  const size = Math.abs(x);
  if (size >= 1e6 || (size > 0 && size < 0.0000995)) return x.toExponential(1).replace(/e([+-])(\d)$/, "e$10$2");
  if (size > 0 && size < 0.0995) return x.toPrecision(2);
  return size >= 100 || Number.isInteger(x) ? (Math.round(x) + 0).toLocaleString("en") : x.toFixed(2); // no minus sign at 0
}
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // Plotly reads tags and entities in its texts

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Rows of cells with one stop for Tab: arrow keys, Home and End walk over them.
function walk(rows, say, choose = say) {
  rows.forEach((cells, i) => cells.forEach((cell, j) => {
    cell.tabIndex = i || j ? -1 : 0;
    cell.addEventListener("mouseenter", () => say(i, j));
    cell.addEventListener("focus", () => choose(i, j));
    cell.addEventListener("keydown", (event) => {
      const [down, right] = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], Home: [0, -j], End: [0, cells.length - 1 - j] }[event.key] ?? [];
      const next = rows[i + down]?.[j + right];
      if (down === undefined || (down && rows.length === 1)) return; // in a text, up and down scroll
      event.preventDefault(); // also at an edge, where the page would scroll
      if (!next) return;
      for (const row of rows) for (const other of row) other.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  }));
}

function choices(select, pairs) {
  select.replaceChildren(...pairs.map(([value, text]) => make("option", { value, textContent: text })));
}

function plot(box, traces, { xaxis, yaxis, ...layout }) {
  const style = getComputedStyle(document.documentElement);
  const [ink, line, ground] = ["--ink", "--line", "--ground"].map((name) => style.getPropertyValue(name).trim());
  const grid = { gridcolor: line, zerolinecolor: line };
  Plotly.react(box, traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink }, colorway: {{ colours|tojson }}, hovermode: "x unified",
    hoverlabel: { bgcolor: ground, namelength: 30 }, xaxis: { ...grid, ...xaxis }, yaxis: { ...grid, ...yaxis }, ...layout,
  }, { responsive: true, displaylogo: false, displayModeBar: false });
}
