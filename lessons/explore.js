"use strict";
// Draws what Python has computed. NAME is the page's; FIXED its data, or null where a server answers questions. The
// address carries the settings behind #: files have no queries, and a server refuses addresses as long as some lists.

const $ = id => document.getElementById(id);
const query = new URLSearchParams(location.hash.slice(1));
let asked = 0, isDrawn = false, isRunning = false;

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function remember() {
  history[FIXED ? "replaceState" : "pushState"](null, "", "#" + query);
}

async function ask(what, options) {
  let answer;
  try {
    answer = await fetch(what, options);
  } catch {
    throw Error("no answer: does `python -m lessons explore` still run?");
  }
  if (!answer.ok) throw Error(await answer.text());
  return answer.json();
}

// Says why there is no picture of the present settings, or "". Only what is drawn can be edited and run.
function refuse(why) {
  $("refused").textContent = why;
  $("said").textContent = "";
  document.body.classList.toggle("stale", Boolean(why));
  for (const button of document.querySelectorAll("#editing button")) button.disabled = Boolean(why);
}

function allow(nowDrawn) {
  isDrawn = nowDrawn;
  if ($("run")) $("run").disabled = !isDrawn || isRunning || Boolean(picture.why);
}

// Fades the right edge of what goes on there.
function fade() {
  for (const box of document.querySelectorAll(".scroll")) {
    box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  }
}

// Asks for the picture of the present settings, and draws it, or says why there is none. A late answer is left out.
async function refresh(draw) {
  const number = ++asked;
  const later = setTimeout(() => { $("said").textContent = "computing ..."; }, 500);
  allow(false);
  try {
    const data = FIXED ? FIXED[query.get("schedule") ?? "fixed"]
      : await ask(`${NAME}.json`, {method: "POST", body: query});
    if (number !== asked) return;
    refuse("");
    draw(data);
    allow(true);
    fade();
  } catch (error) {
    if (number === asked) refuse(error.message);
  } finally {
    clearTimeout(later);
  }
}

function offer(name, values) {
  $("controls").elements[name].append(...values.map(value => new Option(value, value)));
}

function fillControls() {
  for (const field of $("controls").elements) if (query.has(field.name)) field.value = query.get(field.name);
}

// ------------------------------------------------------------------------------------------------------------ pipeline

const LEFT = 62, ROW = 50, HIGH = 24;
const KINDS = {F: "forward", B: "backward: I and W in one", I: "gradient of the input", W: "gradient of the weights"};
let picture, times, now, selected = null;

// A list that cannot run has no times: its actions stand in a row.
function inARow({text, ...more}) {
  const ranks = text.split("\n").map((line, rank) => line.split(/\s+/).slice(2).filter(Boolean).map(
    (name, index) => [name, name[0], Number(name.split("/")[1] ?? rank), index, index + 1, false]));
  return {...more, text, ranks, length: Math.max(...ranks.map(row => row.length))};
}

const rounded = number => String(Number(number.toFixed(2)));

// How many pixels a unit of time takes: as many as fit, and enough to read the shortest action, or one that is longer
// than this share of them.
function pixels(element, pictures, share = 0) {
  const cells = pictures.flatMap(some => some.ranks.flat());
  const taken = cells.map(([, , , start, end]) => end - start).filter(time => time > 0).sort((a, b) => a - b);
  const shortest = taken[Math.floor(share * taken.length)] ?? Infinity;
  const fits = (element.parentElement.clientWidth - LEFT - 4) / Math.max(...pictures.map(some => some.length));
  return Math.min(Math.max(fits, 16 / shortest), 8000 / Math.max(...pictures.map(some => some.length)));
}

function drawCell(cell, rank, index, unit, {ranks, why}) {
  const [name, kind, stage, start, end, critical] = cell;
  const width = Math.max(unit * (end - start) - 1, 1);
  const label = [name, name.match(/\d+/)[0], ""].find(text => 7 * text.length <= width);
  const odd = Math.floor(stage / ranks.length) % 2 ? " odd" : "";
  const when = why ? "" : `, from ${rounded(start)} to ${rounded(end)}${critical ? ", critical" : ""}`;
  const said = `rank ${rank}: ${name}${when}`;
  return svg("g", {class: `cell${odd}${critical ? " critical" : ""}`, style: `--kind: var(--${kind})`,
                   "data-rank": rank, "data-index": index, "aria-label": said},
             svg("title", {}, said),
             svg("rect", {x: LEFT + unit * start, y: 4 + ROW * rank, width, height: HIGH}),
             svg("text", {x: LEFT + unit * start + width / 2, y: 20 + ROW * rank}, label));
}

// What a rank holds, as steps below its row; the highest step of all ranks is `most`.
function drawHeld(held, rank, unit, most) {
  const base = ROW * (rank + 1) - 4;
  let path = `M${LEFT} ${base}`;
  for (const [time, number] of held) path += `H${LEFT + unit * time}V${base - 16 * number / (most || 1)}`;
  return svg("path", {class: "held", d: path + `V${base}Z`});
}

function drawGrid(element, data, unit) {
  const {ranks, held, length} = data;
  const most = Math.max(...(held ?? []).flat().map(([, number]) => number));
  element.replaceChildren();
  element.setAttribute("width", LEFT + unit * length + 4);
  element.setAttribute("height", ROW * ranks.length);
  for (const [rank, row] of ranks.entries()) {
    element.append(svg("text", {x: 0, y: 20 + ROW * rank}, `rank ${rank}`));
    element.append(...row.map((cell, index) => drawCell(cell, rank, index, unit, data)));
    if (!held) continue;
    element.append(svg("text", {x: 0, y: 42 + ROW * rank},
                       `max ${rounded(Math.max(...held[rank].map(([, number]) => number)))}`));
    element.append(drawHeld(held[rank], rank, unit, most));
  }
}

const cellAt = (rank, index) => $("grid").querySelector(`[data-rank="${rank}"][data-index="${index}"]`);

function describe(data) {
  if (data.why) return "";
  const formulas = Object.entries(data.formulas).filter(([, time]) => time !== null);
  const costs = ["f", "i", "w"].map(name => `${name.toUpperCase()} ${query.get(name) ?? 1}`).join(", ");
  const {p, m} = $("controls").elements;
  return `${p.value} ranks, ${m.value} micro-batches, ${costs}: ${rounded(data.length)} long. ` +
    `A rank idles ${rounded(data.idle)}, ` +
    `${Math.round(100 * data.idle / data.length)} %. It holds ${rounded(data.peak)} at most.` +
    (formulas.length ? " Idle by the formulas: " + formulas.map(([name, time]) => `${name} ${rounded(time)}`).join(", ")
      + "." : "");
}

function drawPipeline(data) {
  const focused = $("grid").contains(document.activeElement);
  picture = data = data.why ? inARow(data) : data;
  drawGrid($("grid"), data, pixels($("grid"), [data]));
  if (document.activeElement !== $("text")) $("text").value = data.text;
  const {p, m, v, schedule} = $("controls").elements;
  p.value = data.ranks.length;
  m.value = 1 + Math.max(...data.ranks.flat().map(([name]) => Number(name.match(/\d+/)[0])));
  const stages = new Set(data.ranks.flat().map(([, , stage]) => stage)).size;
  v.value = data.why ? "" : stages / data.ranks.length;
  $("said").textContent = describe(data);
  $("pale").hidden = stages <= data.ranks.length;
  p.disabled = m.disabled = query.has("text"); // which says them
  v.disabled = schedule.value !== "interleaved";
  $("clock").hidden = Boolean(data.why);
  $("refused").textContent = data.why ?? "";
  for (const [rank, index] of Object.entries(data.at ?? {})) {
    const cell = cellAt(rank, index);
    cell?.classList.add("bad");
    cell?.querySelector("title").replaceChildren(data.why);
    cell?.setAttribute("aria-label", `${cell.getAttribute("aria-label")}: ${data.why}`);
  }
  times = [...new Set(data.ranks.flat().flatMap(([, , , start, end]) => [start, end]))].sort((a, b) => a - b);
  if (!data.why) setClock(times.length - 1);
  if (FIXED) return;
  for (const cell of $("grid").querySelectorAll(".cell")) {
    cell.classList.add("movable");
    cell.setAttribute("role", "button");
  }
  select(selected && cellAt(...selected) ? selected : [0, 0], focused);
}

// Actions that have not begun at times[index] are pale.
function setClock(index) {
  now = Math.max(0, Math.min(index, times.length - 1));
  const time = times[now], ends = now === times.length - 1;
  const said = picture.ranks.map((row, rank) => {
    const runs = row.find(([, , , start, end]) => start <= time && time < end);
    const [, holds] = picture.held[rank].findLast(([moment]) => moment <= time);
    return `rank ${rank} ${runs ? runs[0] : "idles"}, holds ${rounded(holds)}`;
  });
  $("now").textContent = ends ? `time ${rounded(time)}, the end` : `time ${rounded(time)}: ${said.join("; ")}`;
  for (const cell of $("grid").querySelectorAll(".cell")) {
    const start = picture.ranks[cell.dataset.rank][cell.dataset.index][3];
    cell.classList.toggle("later", !ends && start > time);
  }
}

function select(place, focus) {
  selected = place;
  for (const cell of $("grid").querySelectorAll(".cell")) {
    cell.setAttribute("tabindex", -1);
    cell.classList.remove("selected");
  }
  const cell = cellAt(...place);
  cell?.setAttribute("tabindex", 0);
  cell?.classList.add("selected");
  if (focus) cell?.focus();
}

function edit(text) {
  query.set("text", text);
  remember();
  showSettings();
  refresh(drawPipeline);
}

function move([rank, from], to) {
  const rows = picture.ranks.map(row => row.map(([name]) => name));
  if (!isDrawn || to < 0 || to >= rows[rank].length || to === from) return;
  rows[rank].splice(to, 0, ...rows[rank].splice(from, 1));
  selected = [rank, to];
  edit(rows.map((row, number) => `rank ${number}  ${row.join(" ")}`).join("\n"));
}

function dragging(grid) {
  let dragged = null;
  grid.addEventListener("pointerdown", event => {
    const cell = event.target.closest(".movable");
    if (!cell) return;
    select([Number(cell.dataset.rank), Number(cell.dataset.index)], true);
    if (event.pointerType === "touch") return; // which scrolls
    event.preventDefault();
    grid.setPointerCapture(event.pointerId);
    dragged = {cell, from: event.clientX};
  });
  grid.addEventListener("pointermove", event => {
    dragged?.cell.setAttribute("transform", `translate(${event.clientX - dragged.from} 0)`);
  });
  grid.addEventListener("pointerup", event => {
    if (!dragged) return;
    const [rank, index] = selected, row = picture.ranks[rank];
    const unit = (grid.getAttribute("width") - LEFT - 4) / picture.length;
    const middle = ([, , , start, end]) => (start + end) / 2;
    const time = middle(row[index]) + (event.clientX - dragged.from) / unit;
    dragged.cell.removeAttribute("transform");
    dragged = null;
    move(selected, row.filter((cell, other) => other !== index && middle(cell) < time).length);
  });
  grid.addEventListener("pointercancel", () => {
    dragged?.cell.removeAttribute("transform");
    dragged = null;
  });
}

function byKeyboard(event) {
  const step = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
  const {dataset} = event.target.closest(".cell") ?? {};
  if (!step || !dataset) return;
  event.preventDefault();
  const place = [Number(dataset.rank), Number(dataset.index)];
  const [rank, index] = [place[0] + step[0], place[1] + step[1]];
  if (event.shiftKey) move(place, index);
  else if (cellAt(rank, index)) select([rank, index], true);
}

async function run() {
  isRunning = true;
  allow(isDrawn);
  $("running").textContent = "these lists and 1F1B train in turns: a quarter of a minute to two";
  try {
    const body = new URLSearchParams({text: picture.text});
    const {yours, "1f1b": plain, predicted, measured, clock, ...ran} = await ask("run", {method: "POST", body});
    $("ran").hidden = false;
    const equal = yours.losses.every((loss, step) => Math.abs(loss - plain.losses[step]) < 1e-5);
    $("losses").className = equal ? "" : "bad";
    const shown = ({losses}) => losses.slice(-3).map(loss => loss.toFixed(6)).join(" ");
    const takes = ({ms, low, high}) => `${Math.round(ms)} ms (${Math.round(low)} to ${Math.round(high)})`;
    const overlap = yours.low <= plain.high && plain.low <= yours.high;
    $("losses").textContent = `In turns, ${yours.steps} steps each of the same ${ran.layers} layers. A step takes ${
      takes(yours)} with these lists, ${takes(plain)} with 1F1B: the median, and between which the middle half lies. ` +
      (overlap ? "These overlap, so here nothing says which is faster. " : "") +
      `By the clock, with F, I and W as measured, the pipeline takes ${Math.round(predicted.length)} ms, 1F1B's ${
      Math.round(clock)}. ` + (ran.cores < ran.ranks ? `${ran.ranks} ranks share ${ran.cores} cores here: while one ` +
      "idles, another has its core. So here the work counts, and not the idle time. " : "") +
      `Losses of the last steps: these lists ${shown(yours)}, 1F1B ${shown(plain)}: ${equal ? "equal" : "not equal"}.`;
    const unit = pixels($("predicted"), [predicted, measured], 0.5);
    drawGrid($("predicted"), predicted, unit);
    drawGrid($("measured"), measured, unit);
    fade();
    $("running").textContent = "";
  } catch (error) {
    $("running").textContent = error.message;
  }
  isRunning = false;
  allow(isDrawn);
}

function showSettings() {
  fillControls();
  $("edited").hidden = !query.has("text");
  if (query.has("text")) $("controls").elements.schedule.value = "";
}

function pipelinePage() {
  if (FIXED) query.delete("text");
  if (FIXED && !FIXED[query.get("schedule")]) query.set("schedule", "1f1b");
  $("controls").elements.schedule.append(Object.assign(new Option("edited", ""), {id: "edited", hidden: true}));
  offer("schedule", FIXED ? Object.keys(FIXED) : SCHEDULES);
  $("controls").elements.schedule.value = "1f1b";
  $("legend").prepend(...Object.entries(KINDS).map(([kind, what]) => {
    const mark = Object.assign(document.createElement("i"), {style: `--kind: var(--${kind})`});
    const word = document.createElement("span");
    word.append(mark, `${kind} ${what}`);
    return word;
  }));
  $("controls").addEventListener("change", ({target}) => {
    if (!"fiw".includes(target.name)) query.delete("text");
    for (const field of $("controls").elements) if (field.value && !field.disabled) query.set(field.name, field.value);
    remember();
    showSettings();
    refresh(drawPipeline);
  });
  const clock = {first: () => 0, back: () => now - 1, next: () => now + 1, last: () => times.length};
  for (const [id, index] of Object.entries(clock)) {
    $(id).addEventListener("click", () => setClock(index()));
  }
  let typed;
  $("text").addEventListener("input", () => {
    clearTimeout(typed);
    allow(false);
    typed = setTimeout(() => edit($("text").value), 400);
  });
  $("earlier").addEventListener("click", () => move(selected, selected[1] - 1));
  $("later").addEventListener("click", () => move(selected, selected[1] + 1));
  $("split").addEventListener("click", () => isDrawn && edit(picture.text.replace(/\bB(\S+)/g, "I$1 W$1")));
  $("run").addEventListener("click", run);
  $("grid").addEventListener("keydown", byKeyboard);
  dragging($("grid"));
  addEventListener("resize", () => {
    if (!isDrawn) return;
    const before = now;
    drawPipeline(picture);
    if (!picture.why) setClock(before);
  });
  showSettings();
  $("text").value = query.get("text") ?? "";
  return drawPipeline;
}

// -------------------------------------------------------------------------------------------------------------- layout

// Rows by the column of ?sort=2, or of ?sort=-2 the other way round; at first by time.
function drawLayout({asked, columns, rows}) {
  const sort = query.get("sort") || "1", column = Math.abs(sort), sign = sort.startsWith("-") ? -1 : 1;
  const sorted = [...rows].sort(({[column]: a}, {[column]: b}) =>
    sign * (typeof a === "number" ? a - b : String(a).localeCompare(b, "en", {numeric: true})));
  const head = document.createElement("tr"), [thead, tbody] = $("table").children;
  for (const [index, name] of columns.entries()) {
    const cell = document.createElement("th"), button = document.createElement("button");
    button.textContent = name + (index === column ? (sign > 0 ? " ↑" : " ↓") : "");
    if (index === column) cell.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    button.addEventListener("click", () => {
      query.set("sort", (index === column && sign > 0 ? "-" : "") + index);
      remember();
      drawLayout({asked, columns, rows});
      thead.querySelectorAll("button")[index].focus();
    });
    cell.append(button);
    head.append(cell);
  }
  thead.replaceChildren(head);
  tbody.replaceChildren(...sorted.map(row => {
    const line = document.createElement("tr");
    line.append(...row.map(value => Object.assign(document.createElement("td"), {
      textContent: typeof value === "number" ? value.toFixed(value < 1000 ? 1 : 0) : value ?? "-"})));
    line.firstChild.replaceChildren(...row[0].split(/ (?=--)/).flatMap(flag =>
      [Object.assign(document.createElement("span"), {textContent: flag}), " "])); // a line breaks between flags
    return line;
  }));
  $("said").textContent = asked + (rows.length ? ` ${rows.length} layouts, each with its fastest micro-batches.`
    : " Nothing divides batch and heads and fits: give more GPUs, or another number of sequences.");
}

function layoutPage() {
  if (!FIXED) offer("model", MODELS);
  if (!FIXED) offer("machine", MACHINES);
  if (!FIXED) $("controls").elements.model.value = "gpt2-xl";
  if (!FIXED) $("controls").elements.machine.value = "h200";
  let gpus = 8;
  $("controls").addEventListener("change", ({target}) => {
    const {batch} = $("controls").elements;
    if (target.name === "gpus") { // each keeps as many sequences as it had
      batch.value = Math.max(1, Math.round(batch.value * target.value / gpus)) || 1;
      gpus = target.value;
    }
    for (const field of $("controls").elements) query.set(field.name, field.value);
    remember();
    refresh(drawLayout);
  });
  fillControls();
  gpus = $("controls").elements.gpus.value;
  return drawLayout;
}

// --------------------------------------------------------------------------------------------------------------- steps

// FIXED: [a picture as SVG, what happens] of each step.
function stepsPage() {
  let playing = 0;
  const end = FIXED.length - 1, now = () => Math.max(0, Math.min(Number(query.get("step")) || 0, end));
  const show = step => {
    query.set("step", step);
    [$("steps").innerHTML, $("said").textContent] = FIXED[now()];
    $("now").textContent = `${now() + 1} of ${FIXED.length}`;
    $("first").disabled = $("back").disabled = now() === 0;
    $("last").disabled = $("next").disabled = now() === end;
    remember();
  };
  const play = on => {
    clearInterval(playing);
    $("play").textContent = on ? "pause" : "play";
    playing = on ? setInterval(() => now() < end ? show(now() + 1) : play(false), 2500) : 0;
  };
  const steps = {first: () => 0, back: () => now() - 1, next: () => now() + 1, last: () => end};
  for (const [id, other] of Object.entries(steps)) {
    $(id).addEventListener("click", () => { play(false); show(other()); });
  }
  $("play").addEventListener("click", () => {
    if (!playing) show(now() < end ? now() + 1 : 0);
    play(!playing);
  });
  show(now());
}

if (FIXED) document.body.classList.add("fixed");
const draw = {pipeline: pipelinePage, layout: layoutPage}[NAME]?.() ?? stepsPage();
if (draw) {
  refresh(draw);
  addEventListener("scroll", fade, true);
  addEventListener("resize", fade);
  addEventListener("popstate", () => location.reload());
}
