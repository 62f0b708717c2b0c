"use strict";
// What a model wrote and what a configuration holds is untrusted: it enters a page as text nodes only, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const by = (id) => document.getElementById(id);
const format = (x) => (x === null || x === undefined ? "none" : Number(x.toPrecision(4)).toString());
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // Plotly reads tags and entities in its texts

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function choices(select, pairs) {
  select.replaceChildren(...pairs.map(([value, text]) => make("option", { value, textContent: text })));
}

function plot(box, traces, { xaxis, yaxis, ...layout }) {
  const style = getComputedStyle(document.documentElement);
  const [ink, line, ground] = ["--ink", "--line", "--ground"].map((name) => style.getPropertyValue(name).trim());
  const grid = { gridcolor: line, zerolinecolor: line };
  Plotly.react(box, traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink }, hovermode: "x unified",
    hoverlabel: { bgcolor: ground, namelength: 30 }, xaxis: { ...grid, ...xaxis }, yaxis: { ...grid, ...yaxis }, ...layout,
  }, { responsive: true, displaylogo: false, displayModeBar: false });
}
