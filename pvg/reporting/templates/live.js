// Reloads the page of a run that is played, and replaces the header and the sections that have changed.
"use strict";
(() => {
  const main = document.querySelector("main"), nav = document.querySelector("nav.contents"), lost = document.getElementById("lost");
  const shown = new Map(); // id of a section, "" for the header -> its markup as it was received
  let tag = "", newest = null;

  const inUse = (part) => part.querySelector(".u-over:hover")
    || (!getSelection().isCollapsed && part.contains(getSelection().anchorNode));
  const replace = (old, fresh) => {
    const open = new Set([...old.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
    const across = [...old.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
    for (const summary of fresh.querySelectorAll("details > summary")) if (open.has(summary.textContent)) summary.parentNode.open = true;
    old.replaceWith(fresh);
    fresh.querySelectorAll(".scroll").forEach((box, place) => { box.scrollLeft = across[place] || 0; });
    fresh.dispatchEvent(new Event("pvg-new", { bubbles: true }));
  };
  const apply = () => {
    const wanted = [...newest.querySelector("main").children], ids = new Set(wanted.map((part) => part.id));
    document.title = newest.title;
    nav.replaceChildren(...[...newest.querySelector("nav.contents").children].map((link) => link.cloneNode(true)));
    for (const part of [...main.children]) if (!ids.has(part.id)) part.remove();
    wanted.forEach((part, place) => {
      const old = [...main.children].find((one) => one.id === part.id), text = part.outerHTML;
      if (old && (shown.get(part.id) === text || inUse(old))) return;
      shown.set(part.id, text);
      const fresh = part.cloneNode(true);
      if (old) { replace(old, fresh); return; }
      main.insertBefore(fresh, main.children[place] || null);
      fresh.dispatchEvent(new Event("pvg-new", { bubbles: true }));
    });
  };
  const look = async () => {
    if (document.hidden) return;
    try {
      const answer = await fetch("/", { headers: { "If-None-Match": tag } });
      lost.hidden = true;
      if (answer.ok) { newest = new DOMParser().parseFromString(await answer.text(), "text/html"); tag = answer.headers.get("ETag"); }
      if (newest) apply(); // again for parts that were in use
    } catch { lost.hidden = false; }
  };
  const follow = async () => { await look(); setTimeout(follow, 2000); };
  document.addEventListener("visibilitychange", look);
  follow();
})();
