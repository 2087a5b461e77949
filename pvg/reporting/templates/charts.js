// Draws every element with data-chart (pvg.reporting.charts) with uPlot, in the colours of the page.
"use strict";
(() => {
  // --- numbers, as pvg/reporting/formats.py writes them
  const duration = (v) => {
    if (v < 9.95) return v.toFixed(1) + " s";
    const s = Math.round(v), m = Math.round(v / 60), two = (n) => String(n).padStart(2, "0");
    return s < 60 ? s + " s" : s < 3600 ? Math.floor(s / 60) + " min " + two(s % 60) + " s" : Math.floor(m / 60) + " h " + two(m % 60) + " min";
  };
  const digits = (v, n = 3) => String(+v.toPrecision(n));
  const compact = (v) => {
    for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(v) >= limit) return digits(v / limit) + unit;
    return digits(v);
  };
  const seconds = (v) => v === 0 ? "0 s" : Math.abs(v) < 1e-3 ? digits(v * 1e6) + " µs" : Math.abs(v) < 1 ? digits(v * 1e3) + " ms" : duration(v);
  const bytes = (v) => { for (const [n, u] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) if (Math.abs(v) >= n) return digits(v / n) + " " + u; return v + " B"; };
  const share = (v) => (100 * v).toFixed(1) + " %", three = (v) => v.toFixed(3);
  const shown = { share, auc: three, score: three, rate: compact, number: compact, count: (v) => String(Math.abs(v)), seconds, sample_s: seconds, bytes };
  const tick = { share: (v) => digits(100 * v, 6) + " %", bytes, seconds: (v) => seconds(v).replace(".0 s", " s").replace(/ 00 (s|min)$/, ""), count: (v) => String(Math.abs(v)) };

  // --- colours
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  const colour = (style, alpha = 1) => {
    probe.className = "probe " + style;
    const [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g);
    return `rgba(${r},${g},${b},${/\blight\b/.test(style) ? 0.4 : alpha})`;
  };
  const DASHES = { dashed: [6, 4], dotted: [2, 3] };

  // --- one chart
  const ends = (spec, stack) => {
    const { range, zero } = spec.y;
    if (range) return range;
    const all = [...stack.flat(), ...(spec.intervals || []).flatMap((one) => [...one.low, ...one.high]), ...(spec.references || []).map((one) => one[0])];
    const known = all.filter((v) => v !== null && v !== undefined);
    let low = Math.min(...known, ...(zero ? [0] : [])), high = Math.max(...known, ...(zero ? [0] : []));
    if (low === high) [low, high] = [zero || !low ? low : low - Math.abs(low) / 2, high + (Math.abs(high) / 2 || 1)];
    return uPlot.rangeNum(low, high, 0.1, true);
  };
  // Heights of stacked series: values above and below 0 are added apart.
  const heights = (series) => {
    const up = [], down = [];
    return series.map((one) => one.y.map((v, at) => {
      const side = v < 0 ? down : up;
      return v ? side[at] = (side[at] || 0) + v : null;
    }));
  };
  const where = (x) => (u, value) => {
    if (value === null || value === undefined) return "";
    for (const [start, end, name] of x.bands) if (value > start && value <= end) return `${name}, ${digits(value - start, 5)}`;
    const named = x.ticks.find(([at]) => Math.abs(at - value) < 0.2);
    return named ? named[1] : x.style === "share" ? share(value) : digits(value, 5);
  };
  const behind = (spec) => (u) => {
    const { ctx, bbox } = u, { left, top, width, height } = bbox;
    const px = (v) => u.valToPos(v, "x", true), py = (v) => u.valToPos(v, "y", true);
    const line = (points) => { ctx.beginPath(); points.forEach(([a, b], place) => place ? ctx.lineTo(a, b) : ctx.moveTo(a, b)); };
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    ctx.fillStyle = colour("band");
    spec.x.bands.forEach(([start, end], place) => { if (place % 2) ctx.fillRect(px(start), top, px(end) - px(start), height); });
    for (const { kind, style, x, low, high } of spec.intervals || []) {
      if (kind === "band") {
        line([...x.map((v, at) => [px(v), py(high[at])]), ...x.map((v, at) => [px(v), py(low[at])]).reverse()]);
        ctx.fillStyle = colour(style, 0.16);
        ctx.fill();
      } else for (let at = 0; at < x.length; at++) {
        line([[px(x[at]), py(low[at])], [px(x[at]), py(high[at])]]);
        ctx.strokeStyle = colour(style, 0.6);
        ctx.lineWidth = 2 * devicePixelRatio;
        ctx.stroke();
      }
    }
    ctx.strokeStyle = ctx.fillStyle = colour("reference");
    ctx.lineWidth = devicePixelRatio;
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const [value, label] of spec.references || []) {
      line([[left, py(value)], [left + width, py(value)]]);
      ctx.stroke();
      ctx.textAlign = "right";
      ctx.fillText(label, left + width - 4, py(value) - 4);
    }
    ctx.restore();
  };
  // Marks of places on the x axis: over the series, which would hide them.
  const above = (spec) => (u) => {
    const { ctx, bbox } = u, { left, top, width, height } = bbox;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("reference");
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    for (const [at, label] of spec.x.marks) {
      const x = u.valToPos(at, "x", true), right = x > left + 0.75 * width, y = top + 11 * devicePixelRatio;
      if (x < left || x > left + width) continue;
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.lineWidth = devicePixelRatio;
      ctx.strokeStyle = ctx.fillStyle;
      ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + height); ctx.stroke();
      ctx.setLineDash([]);
      ctx.lineWidth = 4 * devicePixelRatio;
      ctx.strokeStyle = getComputedStyle(document.body).backgroundColor; // a rim, so that bars do not cover the text
      ctx.textAlign = right ? "right" : "left";
      ctx.strokeText(label, x + (right ? -4 : 4), y);
      ctx.fillText(label, x + (right ? -4 : 4), y);
    }
    ctx.restore();
  };
  // The value of each series that is nearest to the pointer: series need not have the same places.
  const nearest = (u, number, at) => {
    const values = u.data[number];
    for (let far = 0; number && far < values.length; far++) for (const place of [at - far, at + far]) if (values[place] !== null && values[place] !== undefined) return place;
    return at;
  };
  const options = (spec, order, limits, width) => {
    const { x, y } = spec, format = shown[y.style] || compact;
    const axis = { stroke: colour("quiet-ink"), grid: { stroke: colour("grid-ink"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif" };
    const across = { ...axis, label: x.label, labelSize: 16, size: 26, grid: { show: false } };
    if (x.ticks.length) {
      across.splits = (u, _, low, high) => {
        let free = -Infinity; // where the label before ends
        return x.ticks.map((one) => one[0]).filter((at, place) => {
          const middle = (at - low) / (high - low) * (width - 60), half = 3.5 * x.ticks[place][1].length;
          if (at < low || at > high || middle - half < free) return false;
          free = middle + half;
          return true;
        });
      };
      across.values = (u, places) => places.map((at) => x.ticks.find((one) => one[0] === at)[1]);
    } else across.values = (u, places) => places.map((at) => tick[x.style]?.(at) ?? (Math.abs(at) >= 1000 ? compact(at) : digits(at, 6)));
    const up = { ...axis, size: 56, values: (u, places) => places.map((v) => v === null ? null : (tick[y.style] || compact)(v)) };
    if (y.style === "bytes") up.incrs = Array.from({ length: 60 }, (_, power) => 2 ** power);
    const one = (series, number) => ({
      label: series.name,
      class: series.look === "faint" ? "faint" : null,
      stroke: colour(series.style, series.look === "faint" ? 0.35 : 1),
      dash: DASHES[series.dash],
      width: spec.stacked ? 0 : series.look === "faint" ? 1 : 1.8,
      fill: spec.stacked ? colour(series.style) : undefined,
      paths: spec.stacked ? uPlot.paths.bars({ size: [0.92, Infinity] }) : undefined,
      points: { show: !spec.stacked && (series.look === "dots" || series.x.length === 1), size: 6, fill: colour(series.style) },
      value: (u, v, _, at) => v === null || v === undefined ? "" : format(spec.stacked ? order[number].y[at] : v),
    });
    return {
      width, height: spec.stacked ? 230 : 190,
      scales: {
        x: { time: false, range: (u, low, high) => low === u.data[0][0] && high === u.data[0].at(-1) ? [x.low, x.high] : [low, high] },
        y: { range: () => limits },
      },
      axes: [across, up],
      series: [{ label: x.label || "x", value: where(x) }, ...order.map(one)],
      legend: { markers: { width: 3, dash: (u, number) => order[number - 1]?.dash || "solid" } },
      cursor: { dataIdx: spec.stacked ? undefined : nearest, y: false },
      hooks: { drawAxes: [behind(spec)], draw: [above(spec)] },
    };
  };
  const draw = (box) => {
    const spec = JSON.parse(box.dataset.chart), width = box.clientWidth;
    box.plot?.destroy();
    const order = spec.stacked ? [...spec.series].reverse() : spec.series;
    const stack = spec.stacked ? heights(spec.series).reverse() : order.map((one) => one.y);
    const data = spec.stacked ? [order[0].x, ...stack] : uPlot.join(order.map((one, at) => [one.x, stack[at]]));
    box.plot = new uPlot(options(spec, order, ends(spec, stack), width), data, box);
  };

  // --- all charts: drawn when they get a width, which a folded one has not, and again in other colours
  const sizes = new ResizeObserver((all) => {
    for (const { target } of all) {
      const width = target.clientWidth;
      if (!width || target.plot?.width === width) continue;
      if (target.plot) target.plot.setSize({ width, height: target.plot.height }); else draw(target);
    }
  });
  const prepare = (root) => root.querySelectorAll("[data-chart]").forEach((box) => sizes.observe(box));
  const redraw = () => document.querySelectorAll("[data-chart]").forEach((box) => { if (box.plot) draw(box); });
  prepare(document);
  document.addEventListener("pvg-new", (event) => prepare(event.target)); // live.js has replaced a part
  document.addEventListener("pvg-theme", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
})();
