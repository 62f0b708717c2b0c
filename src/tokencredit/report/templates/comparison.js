const transparent = (colour) => `${colour}40`; // a quarter

const quiet = { mode: "lines", hoverinfo: "skip", type: "scatter" }; // only curves answer to the pointer

function band({ x, low, high }, { colour }) {
  if (!low) return [];
  const edge = { ...quiet, x, line: { width: 0 } };
  return [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor: transparent(colour) }];
}

const mode = (x) => (x.length > data.marked ? "lines" : "lines+markers"); // a single point has no line

function thin({ runs }, { colour }) {
  return runs.length > 1 ? runs.map((run) => ({ ...quiet, ...run, mode: mode(run.x), line: { color: colour, width: 1 }, marker: { color: colour, size: 4 }, opacity: 0.7 })) : [];
}

function thick({ x, y, low, high }, { label, colour, dash }) {
  const interval = x.map((_, i) => (low ? ` [${format(low[i])}, ${format(high[i])}]` : ""));
  return { name: plain(label), x, y, mode: mode(x), type: "scatter", line: { color: colour, dash, width: 2.5 },
    marker: { color: colour }, text: y.map((value, i) => format(value) + interval[i]), hovertemplate: "%{text}" };
}

function draw() {
  const axis = by("axis").value, shown = data.groups.filter((_, i) => by(`group${i}`).checked);
  const traces = [band, thin, thick].flatMap((part) => shown.flatMap((group) => part(group.curves[axis], group))); // curves on top
  plot(by("plot"), traces, {
    margin: { l: 60, r: 10, t: 20, b: 50 }, showlegend: false,
    xaxis: { title: { text: data.axes[axis] } },
    yaxis: { title: { text: plain(data.metric) }, range: data.reach },
  });
}

choices(by("axis"), Object.entries(data.axes));
by("axis").addEventListener("change", draw);
data.groups.forEach((_, i) => by(`group${i}`).addEventListener("change", draw));
dark.addEventListener("change", draw);
draw();
