"use strict";
// Buttons of pages: those of a picture show one of its steps; one beside a command copies it.

for (const picture of document.querySelectorAll(".stepped")) {
  const steps = [...picture.querySelectorAll(".step")], end = steps.length - 1;
  let now = 0, playing = 0;
  const show = step => {
    steps[now].hidden = true;
    now = Math.max(0, Math.min(step, end));
    steps[now].hidden = false;
    picture.querySelector("output").textContent = `${now + 1} of ${steps.length}`;
  };
  const play = on => {
    clearInterval(playing);
    playing = on ? setInterval(() => now < end ? show(now + 1) : play(false), 2500) : 0;
    buttons.play.textContent = on ? "pause" : "play";
  };
  const buttons = Object.fromEntries([...picture.querySelectorAll("button")].map(one => [one.textContent, one]));
  const to = {start: () => 0, back: () => now - 1, next: () => now + 1, end: () => end};
  for (const [name, step] of Object.entries(to)) {
    buttons[name].addEventListener("click", () => { play(false); show(step()); });
  }
  buttons.play.addEventListener("click", () => {
    if (!playing && now === end) show(0);
    play(!playing);
  });
}

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling ?? button.nextElementSibling;
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "copied";
  });
}
