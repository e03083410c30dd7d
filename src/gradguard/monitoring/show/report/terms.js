// Show the meaning of a term beside it, on hover and on focus; the meanings are in the list at the end of the page.
(() => {
  "use strict";
  const tip = document.getElementById("tip");
  let shown = null;

  function show(term) {
    const meaning = document.getElementById(term.hash.slice(1))?.querySelector("dd");
    if (!meaning) return;
    hide();
    tip.textContent = meaning.textContent;
    tip.hidden = false;
    const word = term.getClientRects()[0], box = tip.getBoundingClientRect(), edge = document.documentElement.clientWidth - 8;
    const below = word.bottom + box.height + 12 < innerHeight;
    tip.style.left = `${scrollX + Math.max(8, Math.min(word.left, edge - box.width))}px`;
    tip.style.top = `${scrollY + (below ? word.bottom + 6 : word.top - box.height - 6)}px`;
    term.setAttribute("aria-describedby", "tip");
    shown = term;
  }

  function hide() {
    shown?.removeAttribute("aria-describedby");
    shown = null;
    tip.hidden = true;
  }

  const termOf = (target) => (target instanceof Element ? target.closest(".term") : null);
  for (const [begin, end] of [["mouseover", "mouseout"], ["focusin", "focusout"]]) {
    addEventListener(begin, (event) => { const term = termOf(event.target); if (term) show(term); });
    addEventListener(end, (event) => { if (termOf(event.target) && event.relatedTarget !== tip) hide(); });
  }
  tip.addEventListener("mouseleave", hide);
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  addEventListener("click", hide);
})();
