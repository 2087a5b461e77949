// The page is complete without this: it adds values under the pointer and the switch between light and dark.
"use strict";
(() => {
  const tip = document.querySelector(".tip");

  const place = (event) => {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 16 + box.width > innerWidth;
    const x = right ? event.clientX - box.width - 14 : event.clientX + 16;
    const y = Math.min(event.clientY + 14, innerHeight - box.height - 8);
    tip.style.left = Math.max(4, x) + "px";
    tip.style.top = Math.max(4, y) + "px";
  };
  const hide = () => { tip.hidden = true; document.querySelectorAll(".cross").forEach((line) => line.remove()); };

  // --- numbers, as pvg/reporting/formats.py writes them
  const duration = (v) => {
    if (v < 9.95) return v.toFixed(1) + " s";
    const s = Math.round(v), m = Math.round(v / 60), two = (n) => String(n).padStart(2, "0");
    return s < 60 ? s + " s" : s < 3600 ? Math.floor(s / 60) + " min " + two(s % 60) + " s" : Math.floor(m / 60) + " h " + two(m % 60) + " min";
  };
  const compact = (v) => {
    const size = Math.abs(v);
    for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= limit) return +(v / limit).toPrecision(3) + unit;
    return String(+v.toPrecision(3));
  };
  const shown = {
    share: (v) => (100 * v).toFixed(1) + " %", auc: (v) => v.toFixed(3), score: (v) => v.toFixed(3), rate: compact, number: compact,
    seconds: (v) => v === 0 ? "0 s" : Math.abs(v) < 1e-3 ? +(v * 1e6).toPrecision(3) + " µs" : Math.abs(v) < 1 ? +(v * 1e3).toPrecision(3) + " ms"
      : duration(v),
    bytes: (v) => { for (const [n, u] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) if (Math.abs(v) >= n) return +(v / n).toPrecision(3) + " " + u; return v + " B"; },
  };

  // --- charts over an x axis: a line at the pointer, the values nearest to it
  const numbers = (text) => text ? text.split(",").map(Number) : [];
  const series = (figure) => figure.series ??= [...figure.querySelectorAll("[data-ys]")].map((node) => ({
    name: node.dataset.name, style: node.dataset.style, xs: numbers(node.dataset.xs), ys: numbers(node.dataset.ys) }));
  const nearest = (xs, at) => {
    let low = 0, high = xs.length - 1;
    while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < at) low = middle + 1; else high = middle; }
    return low > 0 && at - xs[low - 1] < xs[low] - at ? low - 1 : low;
  };
  const where = (figure, x) => {
    const { bands, xname, xformat, cross } = figure.dataset;
    const step = cross === "bar" ? Math.ceil(x) : x;
    for (const band of (bands || "").split(";")) {
      const [start, end, ...name] = band.split(",");
      if (name.length && step > +start && step <= +end) return name.join(",") + ", " + xname + " " + +(step - start).toPrecision(4);
    }
    if (xformat === "seconds") return "after " + duration(x);
    return xname + " " + +step.toPrecision(5);
  };
  const line = (entry, value, format) => {
    const row = document.createElement("tr"), name = document.createElement("td"), number = document.createElement("td");
    const dot = document.createElement("i");
    dot.className = entry.style;
    name.append(dot, entry.name);
    number.textContent = format(value);
    row.append(name, number);
    return row;
  };
  const wire = (figure) => {
    const area = figure.querySelector(".area"), [low, high] = figure.dataset.x.split(" ").map(Number);
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect();
      const at = low + (high - low) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      let best = null;
      for (const one of series(figure)) if (one.xs.length) {
        const x = one.xs[nearest(one.xs, at)];
        if (best === null || Math.abs(x - at) < Math.abs(best - at)) best = x;
      }
      if (best === null) return;
      const format = shown[figure.dataset.format] || compact, table = document.createElement("table");
      const close = (high - low) / 400;
      for (const one of series(figure)) {
        const index = nearest(one.xs, best);
        if (one.xs.length && Math.abs(one.xs[index] - best) <= close && (figure.dataset.cross === "line" || one.ys[index] !== 0)) table.append(line(one, one.ys[index], format));
      }
      const head = document.createElement("div");
      head.className = "at";
      head.textContent = where(figure, best);
      tip.replaceChildren(head, table);
      let cross = area.querySelector(".cross");
      if (!cross) { hide(); cross = document.createElement("div"); cross.className = "cross"; area.append(cross); }
      cross.style.left = 100 * (best - low) / (high - low) + "%";
      place(event);
    });
    area.addEventListener("pointerleave", hide);
  };
  // What is wider than the screen fades out at the side where it goes on.
  const hint = (box) => {
    const rest = box.scrollWidth - box.clientWidth;
    box.classList.toggle("more-left", box.scrollLeft > 1);
    box.classList.toggle("more-right", box.scrollLeft < rest - 1);
  };
  const widths = typeof ResizeObserver === "undefined" ? null : new ResizeObserver((all) => all.forEach((one) => hint(one.target)));
  const prepare = (root) => {
    root.querySelectorAll("[data-cross]").forEach(wire);
    for (const box of root.querySelectorAll(".scroll, .contents")) {
      box.addEventListener("scroll", () => hint(box), { passive: true });
      widths?.observe(box);
      hint(box);
    }
  };
  prepare(document);
  document.addEventListener("pvg-new", (event) => { hide(); prepare(event.target); }); // live.js has replaced a part

  // --- everything else that has a <title>
  document.addEventListener("pointerover", (event) => {
    const owner = event.target.closest?.("svg :has(> title), svg [data-tip]");
    if (!owner) return;
    const title = owner.querySelector(":scope > title");
    if (title) { owner.dataset.tip = title.textContent; owner.setAttribute("aria-label", title.textContent); title.remove(); }
    tip.textContent = owner.dataset.tip;
    place(event);
    owner.addEventListener("pointermove", place);
    owner.addEventListener("pointerleave", () => { owner.removeEventListener("pointermove", place); hide(); }, { once: true });
  });
  addEventListener("scroll", hide, { passive: true });

  // --- light and dark
  const button = document.getElementById("theme"), root = document.documentElement, words = { "": "auto", light: "light", dark: "dark" };
  const remember = (theme) => { try { localStorage.setItem("pvg-theme", theme); } catch { /* a page from disk may not */ } };
  const recall = () => { try { return localStorage.getItem("pvg-theme") || ""; } catch { return ""; } };
  const apply = (theme) => {
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    button.textContent = words[theme] || "auto";
  };
  const order = ["", "dark", "light"];
  let theme = order.includes(recall()) ? recall() : "";
  apply(theme);
  button.hidden = false;
  button.addEventListener("click", () => { theme = order[(order.indexOf(theme) + 1) % 3]; apply(theme); remember(theme); });
})();
