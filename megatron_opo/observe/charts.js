"use strict";
// A tap on a chart shows the numbers of that step, as pointing at it does with a mouse.
(() => {
  const box = document.createElement("div");
  box.className = "numbers";
  box.setAttribute("role", "status");
  box.hidden = true;
  document.body.append(box);

  document.addEventListener("click", (event) => {
    const title = event.target.closest("svg g")?.querySelector("title");
    box.hidden = !title;
    if (!title) return;
    box.textContent = title.textContent;
    const room = document.documentElement.clientWidth - box.offsetWidth - 8;
    box.style.left = `${Math.max(8, Math.min(event.pageX + 12, room))}px`;
    box.style.top = `${event.pageY + 12}px`;
  });
})();
