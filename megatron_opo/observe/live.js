"use strict";
// Takes over what is new of the page, so that filters, places and what is open stay as they are.
(() => {
  let shown = null;

  const openOnes = () => [...document.querySelectorAll("details[open]")].map((node) => node.id);

  function takeOver(page) {
    const open = openOnes();
    for (const part of ["header", "headline", "curves", "samples", "details"]) {
      const [ours, theirs] = [document, page].map((of) => of.getElementById(part));
      if (ours && theirs && ours.innerHTML !== theirs.innerHTML) ours.replaceWith(theirs);
    }
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    const [ours, theirs] = [document, page].map((of) => of.getElementById("samples-data"));
    if (ours.textContent === theirs.textContent) return;
    ours.textContent = theirs.textContent;
    const [kept, nowKept] = [document, page].map((of) => of.getElementById("kept"));
    kept.textContent = nowKept.textContent;
    document.dispatchEvent(new Event("samples"));
  }

  async function look() {
    const version = await (await fetch("version", { cache: "no-store" })).text();
    if (version !== shown) {
      const answer = await fetch("", { cache: "no-store" });
      if (!answer.ok) return;
      // Scripts of a page that is parsed so do not run.
      takeOver(new DOMParser().parseFromString(await answer.text(), "text/html"));
    }
    shown = version;
  }

  async function follow() {
    await look().catch(() => { /* the program has ended: what is shown stays */ });
    setTimeout(follow, 1000);
  }
  follow();
})();
