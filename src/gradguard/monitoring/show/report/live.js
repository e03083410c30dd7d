// Follows the record: asks the server what it has now, and puts the new page in place of the old one.
(() => {
  "use strict";
  const SECONDS = 2;
  let version = document.body.dataset.version;

  function say(text, age = "") {
    const line = document.getElementById("live"), aged = document.getElementById("age");
    if (line.textContent !== text) line.textContent = text; // a screen reader says each change
    if (aged) aged.textContent = age; // and not this one, which changes every time
  }

  const kept = (root, selector) => new Map([...root.querySelectorAll(selector)].filter((one) => one.id).map((one) => [one.id, one]));

  function replace(next) { // what the reader has opened, chosen, zoomed and focused stays
    const old = document.getElementById("main"), main = next.getElementById("main");
    const focused = document.activeElement, opened = kept(old, "details[open]"), plots = kept(old, ".plot");
    for (const details of main.querySelectorAll("details")) details.open = opened.has(details.id);
    for (const choice of old.querySelectorAll(".modes input:checked:not(:disabled)")) {
      const same = main.querySelector(`.modes input[name="${choice.name}"][value="${choice.value}"]:not(:disabled)`);
      if (same) same.checked = true;
    }
    for (const [id, place] of kept(main, ".plot")) {
      const plot = plots.get(id);
      if (!plot) continue;
      plot.setAttribute("aria-label", place.getAttribute("aria-label"));
      place.replaceWith(plot);
    }
    document.title = next.title;
    for (const selector of ["h1", "#kind"])
      document.querySelector(selector).textContent = next.querySelector(selector).textContent;
    old.replaceWith(main);
    if (focused !== document.activeElement) {
      const again = focused.isConnected ? focused : focused.id && document.getElementById(focused.id);
      if (again) again.focus({ preventScroll: true });
    }
    dispatchEvent(new Event("page-changed"));
  }

  async function look() {
    const answer = await fetch("version", { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    const now = await answer.json();
    if (now.version !== version) {
      const page = await (await fetch(".", { cache: "no-store" })).text();
      const next = new DOMParser().parseFromString(page, "text/html");
      version = next.body.dataset.version;
      if (!document.getElementById("palette") || !next.getElementById("palette")) return location.reload(); // it waited
      replace(next);
    }
    say(now.words, now.age);
  }

  async function follow() {
    try { await look(); } catch { say("The server does not answer: this is the last that it said."); }
    setTimeout(follow, 1000 * SECONDS);
  }

  follow();
})();
