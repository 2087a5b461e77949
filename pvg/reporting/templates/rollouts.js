// Searches and filters the solutions that this page contains (pvg.reporting.solutions). Everything that a model wrote
// goes into the page as text. The address after # says what is shown, so links and the back button work.
"use strict";
(() => {
  const at = (id) => document.getElementById(id), LINE = 400, SIDES = 60; // characters in the list, solutions at once
  const form = at("filters"), opening = at("opening");
  const WHOLE = ["round", "first_step", "last_step"], REAL = ["lowest", "highest"]; // the fields that are numbers
  let rows = null, size = 50, lastList = "#";

  const unpack = async () => {
    const bytes = Uint8Array.from(atob(at("data").textContent), (letter) => letter.charCodeAt(0));
    const found = JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
    for (const row of found.rows) [row.problem, row.question, row.reference] = found.problems[row.problem];
    rows = found.rows;
    size = found.page;
  };

  // --- finding
  const queryOf = (fields) => {
    const query = {}, problems = [];
    const label = (name) => form.elements[name].labels[0].firstChild.textContent;
    const unusable = (name, value) => problems.push(`${label(name)}: '${value.slice(0, 40)}' cannot be used, so it is left out.`);
    for (const [name, value] of fields) {
      if (!value.trim()) continue;
      if (WHOLE.includes(name) || REAL.includes(name)) {
        const number = Number(value.trim());
        if (Number.isNaN(number) || (WHOLE.includes(name) && !Number.isInteger(number))) unusable(name, value);
        else query[name] = number;
      } else query[name] = value;
    }
    return [query, problems];
  };
  const fits = (query, row) => {
    const between = (value, low, high) => (low === undefined && high === undefined) || (value !== null && !(value < low) && !(value > high));
    const part = query.text?.toLowerCase();
    return (!query.role || row.role === query.role)
      && (!query.grade || row.grade === query.grade || (query.grade === "wrong" && row.grade === "flaw"))
      && (!query.verdict || row.verdict === query.verdict)
      && (!query.phase || row.phase === query.phase)
      && between(row.round, query.round, query.round)
      && between(row.step, query.first_step, query.last_step)
      && between(row.score, query.lowest, query.highest)
      && (!part || [row.question, row.text.join(""), ...row.after].some((one) => one.toLowerCase().includes(part)));
  };
  const sorted = (found, order) => { // `found`: the newest first. Equal solutions: the oldest first.
    if (!order || order === "newest") return found;
    found.reverse();
    const by = order === "highest" || order === "lowest" ? "score" : "tokens", sign = order === "highest" || order === "longest" ? -1 : 1;
    const compare = (a, b) => a[by] === null || b[by] === null ? (a[by] === null) - (b[by] === null) : sign * (a[by] - b[by]);
    return order === "oldest" ? found : found.sort(compare);
  };

  // --- drawing
  const many = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
  const scored = (score) => (score < 0 ? "" : "+") + score.toFixed(3);
  const copy = (name) => at(name).content.firstElementChild.cloneNode(true);
  const fill = (node, part, text) => { const found = node.querySelector(part); if (text) found.textContent = text; else found.remove(); };
  const graded = (node, found) => node.classList.add(found.grade === "correct" ? "right" : "wrong");
  const short = (text) => text.length > LINE ? text.slice(0, LINE) + "…" : text;
  const link = (found) => "#" + new URLSearchParams({ problem: found.problem, solution: found.id });
  const hit = (found) => {
    const node = copy("hit"), grade = node.querySelector(".grade");
    node.href = link(found);
    node.classList.add(found.role);
    grade.classList.remove("right");
    graded(grade, found);
    fill(node, ".role", found.role);
    fill(node, ".grade", found.grade);
    fill(node, ".score", found.score === null ? "" : `${scored(found.score)} ${found.verdict}`);
    fill(node, ".hit-place", `round ${found.round}, ${found.label}, step ${found.step}`);
    fill(node, ".hit-problem", short(found.question));
    node.querySelector(".hit-text").textContent = short([found.text.join(""), ...found.after].join("\n"));
    return node;
  };
  const quiet = (text) => { const pre = document.createElement("pre"); pre.className = "quiet"; pre.textContent = text; return pre; };
  const solution = (found) => {
    const node = copy("solution"), text = node.querySelector("pre"), grade = node.querySelector(".grade");
    node.classList.add(found.role);
    node.dataset.id = found.id;
    grade.classList.remove("right");
    graded(grade, found);
    fill(node, ".role", found.role);
    fill(node, ".score", found.score === null ? "" : [`score ${scored(found.score)}`, found.verdict].filter(Boolean).join(", "));
    fill(node, ".grade", found.said);
    fill(node, ".id", [`step ${found.step}`, found.reward === null ? "" : `reward ${scored(found.reward)}`, found.read, found.id].filter(Boolean).join(", "));
    const [before, wrong, after] = found.text, mark = document.createElement("mark");
    mark.textContent = wrong;
    text.replaceChildren(before, ...(wrong ? [mark] : []), after);
    text.before(...found.before.map(quiet));
    text.after(...found.after.map(quiet));
    return node;
  };
  const numbers = (fields, number, pages) => {
    const nodes = [];
    let before = 0;
    for (let n = 1; n <= pages; n++) {
      if (n !== 1 && n !== pages && Math.abs(n - number) > 2) continue;
      if (n > before + 1) nodes.push("…");
      const node = document.createElement(n === number ? "span" : "a");
      node.textContent = n.toLocaleString("en");
      if (n === number) { node.className = "here"; node.setAttribute("aria-current", "page"); }
      else node.href = "#" + new URLSearchParams([...fields.filter(([name]) => name !== "page"), ["page", n]]);
      nodes.push(node, " ");
      before = n;
    }
    at("pages").replaceChildren(...(pages > 1 ? nodes : []));
  };
  const showList = (fields) => {
    const [query, problems] = queryOf(fields), found = sorted(rows.filter((row) => fits(query, row)), query.order);
    const pages = Math.max(1, Math.ceil(found.length / size)), number = Math.min(pages, Math.max(1, parseInt(query.page) || 1));
    const first = (number - 1) * size, shown = found.slice(first, first + size);
    const range = shown.length ? `; shown: ${(first + 1).toLocaleString("en")} to ${(first + shown.length).toLocaleString("en")}` : "";
    at("count").textContent = `${many(found.length, "solution")} of ${rows.length.toLocaleString("en")}${range}`;
    at("problems").replaceChildren(...problems.map((text) => { const item = document.createElement("li"); item.textContent = text; return item; }));
    at("problems").hidden = !problems.length;
    at("hits").replaceChildren(...shown.map(hit));
    numbers(fields, number, pages);
  };
  // All solutions of a problem: the newest phase first, within a phase by role and score.
  const showProblem = (problem, chosen) => {
    const found = rows.filter((row) => row.problem === problem);
    const stages = new Map();
    for (const one of found) {
      const stage = `Round ${one.round}, ${one.label}`;
      if (!stages.has(stage)) stages.set(stage, []);
      stages.get(stage).push(one);
    }
    at("question").textContent = found.length ? found[0].question : "This page has no such problem.";
    at("reference").hidden = !found.length || !found[0].reference;
    at("reference").querySelector(".given").textContent = found.length ? found[0].reference : "";
    at("solutions-count").textContent = stages.size > 1 ? many(found.length, "solution") : "";
    at("back").href = lastList;
    at("solutions").replaceChildren(...[...stages].flatMap(([stage, all]) => {
      all.sort((a, b) => a.role < b.role ? -1 : a.role > b.role ? 1 : (b.score ?? -Infinity) - (a.score ?? -Infinity) || 0);
      const head = document.createElement("h3"), sides = document.createElement("div");
      head.className = "stage";
      head.textContent = `${stage}: ${many(all.length, "solution")}`;
      sides.className = "sides";
      const more = (from) => {
        sides.append(...all.slice(from, from + SIDES).map(solution));
        if (all.length <= from + SIDES) return;
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = `Show ${Math.min(SIDES, all.length - from - SIDES)} more`;
        button.addEventListener("click", () => { button.remove(); more(from + SIDES); });
        sides.append(button);
      };
      more(0);
      return [head, sides];
    }));
    const node = [...at("solutions").querySelectorAll(".solution")].find((one) => one.dataset.id === chosen);
    node?.classList.add("chosen");
    if (node) node.scrollIntoView({ block: "center" }); else scrollTo(0, 0);
  };

  // --- the address
  const fieldsOf = () => [...new FormData(form)].filter(([name, value]) => value.trim() && !(name === "order" && value === "newest"));
  const show = () => {
    const wanted = new URLSearchParams(location.hash.slice(1)), problem = wanted.get("problem");
    at("list").hidden = problem !== null;
    at("problem").hidden = problem === null;
    if (problem !== null) { showProblem(problem, wanted.get("solution")); return; }
    lastList = location.hash || "#";
    for (const field of form.elements) if (field.name && field !== document.activeElement) field.value = wanted.get(field.name) || (field.name === "order" ? "newest" : "");
    showList([...wanted]);
  };
  let waiting = 0;
  const changed = () => {
    const hash = "#" + new URLSearchParams(fieldsOf());
    if (hash !== (location.hash || "#")) location.replace(hash); // without an entry in the history for each letter
  };
  form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(changed, 250); });
  form.addEventListener("submit", (event) => { event.preventDefault(); document.activeElement?.blur(); changed(); });

  opening.hidden = false;
  unpack().then(() => {
    opening.hidden = true;
    at("browser").hidden = false;
    addEventListener("hashchange", show);
    show();
  }).catch((error) => { opening.textContent = `This browser cannot open the solutions: ${error.message}.`; });
})();
