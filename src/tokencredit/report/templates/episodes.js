// Episodes of several turns. A turn of the policy is a range of tokens, from `start` to `end`; an observation has a `text`.
const known = (x) => x !== null && x !== undefined;
const acted = ({ turns }) => turns.filter(({ text }) => text === undefined);
const SHORT = 300, SHORTEST = 80, LINES = 8;

const begin = (text) => `${text.slice(0, SHORT / 2).split("\n").slice(0, 3).join("\n")} … `;
const ending = (text) => `… ${text.slice(-SHORT / 2).split("\n").slice(-4).join("\n")}`;

function folded(text, length, part = begin(text)) { // a long text, behind a part of it
  if (text.length <= SHORT && text.split("\n").length <= LINES) return make("div", { className: "tokens prompt", textContent: text });
  return make("details", { className: "tokens prompt" },
    make("summary", {}, make("span", { className: "part", textContent: part }), make("span", { className: "note", textContent: `${length.toLocaleString("en")} characters` })),
    make("div", { className: "whole", tabIndex: 0, role: "region", ariaLabel: "whole text", textContent: text }));
}

const speaker = (role) => make("span", { className: "who", textContent: role });
const sum = (values) => values.reduce((total, x) => total + x, 0);
const signed = (x) => (x > 0 ? `+${format(x)}` : format(x));

// Turns in rows: the speaker, the text, and in the margin the sum of a turn's credit, its reward and its problems.
function episode(sample, spans, line, credit) {
  const row = (kind, role, text, ...margin) => make("div", { className: `turn ${kind}` }, speaker(role), text, make("div", { className: "margin" }, ...margin));
  const note = (className, textContent) => make("div", { className, textContent });
  const rows = sample.turns.map((turn) => {
    if (turn.text !== undefined) return row("observation", turn.role, folded(turn.text, turn.length));
    const margin = [note("credit", `credit ${signed(Number(sum(credit.slice(turn.start, turn.end)).toFixed(4)))}`)];
    if (turn.reward !== null) margin.push(note("paid", `reward ${format(turn.reward)}`));
    margin.push(...turn.problems.map((problem) => note("problem", problem)));
    return row("acted", turn.role, line(...spans.slice(turn.start, turn.end)), ...margin);
  });
  const paid = sample.turns.some(({ reward }) => known(reward)) ? [] : [note("paid", `reward ${format(sample.reward)}`)];
  rows.push(row("ending", "end", note("note", sample.ending || "unknown"), ...paid));
  return make("div", { className: "episode" }, row("observation start", "prompt", folded(sample.prompt, sample.prompt.length, ending(sample.prompt))), ...rows);
}

// Messages of a prompt, as pairs of role and text. The sign after a role is escaped in what is said (transcript.py), so that no text
// can pass for a speaker. A prompt that is no conversation has no role; the answer's own role comes last, and is left out.
function messages({ chat, prompt }) {
  if (!chat) return [["", prompt]];
  return prompt.split(/^(?=[^›\n]* › )/m).map((part) => part.replace(/⏎?\n$/, "").split(/ › ([^]*)/, 2)).filter(([, text], i, all) => i < all.length - 1 || text);
}

function chat(sample, text) { // a completion that answers a conversation, as turns
  const rows = messages(sample).map(([role, said]) => make("div", { className: "turn observation" }, speaker(role), folded(said, said.length)));
  return make("div", { className: "episode" }, ...rows, make("div", { className: "turn acted" }, speaker("assistant"), text));
}

function placeOf(sample, i) { // the turn of a token in an episode
  if (!sample.turns) return "";
  const turns = acted(sample);
  return `turn ${turns.findIndex(({ end }) => i < end) + 1} of ${turns.length}, `;
}

function lengthOf(sample) {
  const count = acted(sample).length;
  return `${count} turn${count === 1 ? "" : "s"}, ${sample.tokens.length} tokens`;
}

function inline(sample, observed) { // an episode in a paragraph, with the starts of observations
  const cut = (text) => (text.length > SHORTEST ? `${text.slice(0, SHORTEST)}…` : text);
  return sample.turns.flatMap(({ role, text, start, end }) =>
    [speaker(` ${role} › `), text === undefined ? sample.tokens.slice(start, end).join("") : observed(cut(text))]);
}
