// An agent's episode: pictures, a square per step, and a chart per number, of which each chooses a step of the others.
function agentEpisode({ actions, marks, numbers, frames }) {
  const reachOf = Math.max(...numbers.advantage.map((x) => Math.abs(x ?? 0))) || 1;
  const squares = marks.map((textContent) => make("span", { textContent }));
  const pictures = frames.map(({ step, src }) => make("button", { type: "button" },
    make("img", { src, alt: `the environment after ${step} steps` }), step < actions.length ? `step ${step + 1}` : "the end"));
  const film = by("film");

  function choose(i, follow = true) {
    const texts = Object.entries(numbers).map(([name, values]) => `${name} ${format(values[i])}`);
    by("step").textContent = `step ${i + 1} of ${actions.length}: action ${actions[i]}, ${texts.join(", ")}`;
    squares.forEach((square, j) => square.classList.toggle("now", j === i));
    const seen = frames.findLastIndex(({ step }) => step <= i);
    pictures.forEach((picture, j) => picture.classList.toggle("now", j === seen));
    if (follow && film && seen >= 0) film.scrollLeft = pictures[seen].offsetLeft - film.offsetLeft - film.clientWidth / 2;
  }
  walk([squares], (_, i) => choose(i));
  if (pictures.length) walk([pictures], (_, i) => choose(Math.min(frames[i].step, actions.length - 1), false));
  by("steps").append(...squares);
  film?.append(...pictures);

  const charts = Object.entries(numbers).map(([name, values]) => {
    const box = by("step-charts").appendChild(make("div", { ariaLabel: `${name} of each step` }));
    const title = { advantage: "advantage of each step", value: "value before each step", reward: "reward of each step" }[name];
    return [box, title, values];
  });
  function draw() {
    squares.forEach((square, i) => { square.style.backgroundColor = colour((numbers.advantage[i] ?? 0) / reachOf); });
    for (const [box, text, values] of charts) {
      const line = { x: values.map((_, i) => i + 1), y: values, type: "scatter", mode: "lines", text: values.map(format), hovertemplate: "%{text}<extra></extra>" };
      plot(box, [line], { title: { text, font: { size: 14 } }, margin: { l: 60, r: 10, t: 36, b: 40 }, xaxis: { title: { text: "step" } }, yaxis: { exponentformat: "none" } });
    }
  }
  draw();
  for (const [box] of charts) box.on("plotly_hover", ({ points }) => choose(points[0].x - 1));
  dark.addEventListener("change", draw);
}
if (data.episode) agentEpisode(data.episode);
