"use strict";
// Edits lists. Python draws, proves and runs them. The settings, with an edited text, stand behind the address's #.

const $ = id => document.getElementById(id);
let selected = "0 0", asked = 0, typed;

const settings = () => new URLSearchParams(location.hash.slice(1));
const cells = () => [...$("grid").querySelectorAll("[data-place]")];
const cellAt = place => cells().find(cell => cell.dataset.place === place);

async function ask(what, query) {
  let answer;
  try {
    answer = await fetch(what, {method: "POST", body: query});
  } catch {
    throw Error("no answer: does `python -m lessons explore` still run?");
  }
  if (!answer.ok) throw Error(await answer.text());
  return answer.json();
}

// Changes settings. The browser's Back takes that back.
function change(changes) {
  const query = settings();
  for (const [name, value] of Object.entries(changes)) value === null ? query.delete(name) : query.set(name, value);
  location.hash = query;
}

async function draw() {
  const query = settings(), number = ++asked;
  for (const field of $("controls").elements) {
    field.value = query.get(field.name) ?? field.value;
    if (!query.has(field.name)) query.set(field.name, field.value);
  }
  let found;
  try {
    found = await ask("grid", query);
  } catch (error) {
    found = {svg: "", says: "", why: error.message};
  }
  if (number !== asked) return; // a later question has been asked
  const isFocused = $("grid").contains(document.activeElement);
  $("grid").innerHTML = found.svg;
  $("says").textContent = found.says;
  $("refused").textContent = found.why;
  $("run").disabled = Boolean(found.why);
  if (document.activeElement !== $("text") && found.text) $("text").value = found.text;
  for (const cell of cells()) {
    const [rank, index] = cell.dataset.place.split(" ");
    cell.setAttribute("role", "button");
    cell.setAttribute("aria-label", `rank ${rank}: ${rows()[rank]?.[index]}`);
  }
  select(cellAt(selected) ? selected : "0 0", isFocused);
}

function select(place, focus) {
  selected = place;
  for (const cell of cells()) cell.setAttribute("tabindex", cell.dataset.place === place ? 0 : -1);
  for (const cell of cells()) cell.classList.toggle("selected", cell.dataset.place === place);
  if (focus) cellAt(place)?.focus();
}

const rows = () => $("text").value.split("\n").map(line => line.replace(/^rank \d+/, "").split(/\s+/).filter(Boolean));

function move(place, to) {
  const [rank, from] = place.split(" ").map(Number), edited = rows();
  if (to < 0 || to >= edited[rank].length || to === from) return;
  edited[rank].splice(to, 0, ...edited[rank].splice(from, 1));
  selected = `${rank} ${to}`;
  rewrite(edited.map((row, number) => `rank ${number}  ${row.join(" ")}`).join("\n"));
}

function rewrite(text) {
  $("text").value = text;
  change({text});
}

const middle = cell => {
  const {left, right} = cell.getBoundingClientRect();
  return (left + right) / 2;
};

let dragged = null;
$("grid").addEventListener("pointerdown", event => {
  const cell = event.target.closest("[data-place]");
  if (!cell) return;
  select(cell.dataset.place, true);
  if (event.pointerType === "touch") return; // which scrolls
  event.preventDefault();
  $("grid").setPointerCapture(event.pointerId);
  dragged = {cell, from: event.clientX};
});
$("grid").addEventListener("pointermove", event => {
  dragged?.cell.setAttribute("transform", `translate(${event.clientX - dragged.from} 0)`);
});
$("grid").addEventListener("pointerup", () => {
  if (!dragged) return;
  const {cell} = dragged, [rank] = cell.dataset.place.split(" ");
  const others = cells().filter(other => other !== cell && other.dataset.place.split(" ")[0] === rank);
  const to = others.filter(other => middle(other) < middle(cell)).length;
  cell.removeAttribute("transform");
  dragged = null;
  move(cell.dataset.place, to);
});
$("grid").addEventListener("pointercancel", () => {
  dragged?.cell.removeAttribute("transform");
  dragged = null;
});
$("grid").addEventListener("keydown", event => {
  const step = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
  const place = event.target.closest("[data-place]")?.dataset.place;
  if (!step || !place) return;
  event.preventDefault();
  const [rank, index] = place.split(" ").map((at, n) => Number(at) + step[n]);
  if (event.shiftKey) move(place, index);
  else if (cellAt(`${rank} ${index}`)) select(`${rank} ${index}`, true);
});

$("controls").addEventListener("change", ({target}) => {
  change(target.name === "zero" ? {zero: target.value} : {[target.name]: target.value, text: null});
});
$("text").addEventListener("input", () => {
  clearTimeout(typed);
  $("run").disabled = true;
  typed = setTimeout(() => change({text: $("text").value}), 400);
});
$("split").addEventListener("click", () => rewrite($("text").value.replace(/\bB(\S+)/g, "I$1 W$1")));

$("run").addEventListener("click", async () => {
  const begun = Date.now(), query = new URLSearchParams({text: $("text").value, zero: $("controls").elements.zero.value});
  const show = () => { $("running").textContent = `trains: ${Math.round((Date.now() - begun) / 1000)} s`; };
  const clock = setInterval(show, 1000);
  show();
  $("run").hidden = !($("cancel").hidden = false);
  try {
    const {says, svg} = await ask("run", query);
    $("ran").hidden = false;
    $("ran").firstChild.textContent = says;
    $("ran").lastChild.innerHTML = svg;
    $("ran").scrollIntoView({block: "center"});
    $("running").textContent = "";
  } catch (error) {
    $("running").textContent = error.message;
  }
  clearInterval(clock);
  $("run").hidden = !($("cancel").hidden = true);
});
$("cancel").addEventListener("click", () => ask("cancel", ""));

addEventListener("hashchange", draw);
draw();
