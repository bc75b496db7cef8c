"use strict";
// Filters are in the address and browsers keep the place on the page, so a reload disturbs little.
(() => {
  let shown = null;
  setInterval(async () => {
    try {
      const answer = await fetch("version", { cache: "no-store" });
      const version = await answer.text();
      if (shown !== null && version !== shown) location.reload();
      shown = version;
    } catch { /* the program has ended: what is shown stays */ }
  }, 3000);
})();
