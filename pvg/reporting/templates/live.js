// Follows a run: an event says that there is something new, and the parts that are on the screen are fetched again.
"use strict";
(() => {
  const parts = [...document.querySelectorAll("[data-part]")], near = new Set(), shown = new Map(), texts = new Map();
  let revision = 0, busy = false;

  const link = (part) => document.querySelector(`[data-of="${part}"]`);
  const inUse = (part) => part.matches(":hover") && !document.querySelector(".tip").hidden
    || [getSelection()].some((chosen) => chosen && !chosen.isCollapsed && part.contains(chosen.anchorNode));
  const replace = (part, found) => {
    const open = new Set([...part.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
    const across = [...part.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
    part.innerHTML = found.html;
    part.hidden = !found.html;
    for (const summary of part.querySelectorAll("details > summary")) if (open.has(summary.textContent)) summary.parentNode.open = true;
    part.querySelectorAll(".scroll").forEach((box, place) => { box.scrollLeft = across[place] || 0; });
    const entry = link(part.dataset.part);
    if (entry) { entry.hidden = !found.html; entry.textContent = found.title; }
    part.dispatchEvent(new Event("pvg-new", { bubbles: true }));
  };
  const refresh = async (part) => {
    const name = part.dataset.part, wanted = revision;
    const answer = await fetch("parts/" + name + "?revision=" + wanted);
    if (!answer.ok) return;
    const text = await answer.text();
    shown.set(part, wanted);
    if (texts.get(part) !== text) { texts.set(part, text); replace(part, JSON.parse(text)); }
  };
  const work = async () => {
    if (busy || document.hidden) return;
    busy = true;
    try {
      for (const part of parts) if ((near.has(part) || part.hidden) && (shown.get(part) || 0) < revision && !inUse(part)) await refresh(part);
    } catch { /* the connection is lost: the event source says so, and comes back */ } finally { busy = false; }
  };
  const seen = new IntersectionObserver((all) => {
    for (const one of all) if (one.isIntersecting) near.add(one.target); else near.delete(one.target);
    work();
  }, { rootMargin: "400px" });
  parts.forEach((part) => seen.observe(part));
  setInterval(work, 2000); // for parts that were in use

  const lost = document.getElementById("lost");
  const show = (event) => {
    const found = JSON.parse(event.data);
    lost.hidden = true;
    document.title = found.title;
    for (const [name, text] of Object.entries(found.texts)) {
      const node = document.getElementById("live-" + name);
      if (node && node.textContent !== text) node.textContent = text;
    }
    const bar = document.getElementById("live-bar");
    if (bar) bar.value = found.share;
    revision = found.revision;
    work();
  };
  // A page in the background does not listen, because a browser opens only six connections to one address.
  let source = null;
  const listen = () => {
    if (document.hidden) { source?.close(); source = null; return; }
    if (source) return;
    source = new EventSource("events");
    source.addEventListener("run", show);
    source.addEventListener("error", () => { lost.hidden = false; });
  };
  document.addEventListener("visibilitychange", listen);
  listen();
})();
