// The switch between light and dark, and the fading edges of what is wider than the screen.
"use strict";
(() => {
  const hint = (box) => {
    const rest = box.scrollWidth - box.clientWidth;
    box.classList.toggle("more-left", box.scrollLeft > 1);
    box.classList.toggle("more-right", box.scrollLeft < rest - 1);
  };
  const widths = new ResizeObserver((all) => all.forEach((one) => hint(one.target)));
  const prepare = (root) => {
    for (const box of root.querySelectorAll(".scroll, .contents")) {
      box.addEventListener("scroll", () => hint(box), { passive: true });
      widths.observe(box);
    }
  };
  prepare(document);
  document.addEventListener("pvg-new", (event) => prepare(event.target)); // live.js has replaced a part

  const button = document.getElementById("theme"), root = document.documentElement, words = { "": "auto", light: "light", dark: "dark" };
  const remember = (theme) => { try { localStorage.setItem("pvg-theme", theme); } catch { /* a page from disk may not */ } };
  const recall = () => { try { return localStorage.getItem("pvg-theme") || ""; } catch { return ""; } };
  const apply = (theme) => {
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    button.textContent = words[theme] || "auto";
    document.dispatchEvent(new Event("pvg-theme"));
  };
  const order = ["", "dark", "light"];
  let theme = order.includes(recall()) ? recall() : "";
  apply(theme);
  button.hidden = false;
  button.addEventListener("click", () => { theme = order[(order.indexOf(theme) + 1) % 3]; apply(theme); remember(theme); });
})();
