// Searches and filters the solutions that this page contains (pvg.reporting.rollouts_file). Everything that a model wrote
// goes into the page as text. The address after # says what is shown, so links and the back button work.
"use strict";
(() => {
  const at = (id) => document.getElementById(id), LINE = 400, SIDES = 60; // characters in the list, solutions at once
  const form = at("filters"), opening = at("opening"), texts = [...document.querySelectorAll("script.texts")];
  const WHOLE = ["round", "first_step", "last_step"], REAL = ["lowest", "highest"]; // the fields that are numbers
  let data = null, homes = null, asked = 0, lastList = "#";

  // --- what the page contains
  const unpack = async (node) => {
    const bytes = Uint8Array.from(atob(node.textContent), (letter) => letter.charCodeAt(0));
    const found = JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
    node.textContent = ""; // only now, so that a later call can read a block again that failed
    return found;
  };
  const opened = new Map(); // number of a block -> a promise of its texts
  const block = (number) => {
    if (!opened.has(number)) opened.set(number, unpack(texts[number]).catch((error) => { opened.delete(number); throw error; }));
    return opened.get(number);
  };
  const blockOf = (place) => { // the last block that begins at or before the solution
    let low = 0, high = data.starts.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (data.starts[middle] <= place) low = middle; else high = middle - 1; }
    return low;
  };
  const homesOf = () => { // the block of each problem: that of its first solution
    const found = new Array(data.words.problem.length).fill(-1);
    data.problem.forEach((number, place) => { if (found[number] < 0) found[number] = blockOf(place); });
    return found;
  };
  const problemOf = async (place) => (await block(homes[data.problem[place]])).problems[data.problem[place]];
  const word = (name, place) => data.words[name][data[name][place]];
  const row = async (place) => {
    const number = blockOf(place), found = await block(number), there = place - data.starts[number];
    const [phase, label] = word("phase", place), problem = word("problem", place), [question, reference] = await problemOf(place);
    return {
      role: word("role", place), grade: word("grade", place), verdict: word("verdict", place), phase, label, problem, question, reference,
      round: data.round[place], step: data.step[place], score: data.score[place], reward: data.reward[place],
      id: found.id[there], text: found.text[there], mark: found.mark[there], said: found.said[there],
      before: found.before[there] || [], after: found.after[there] || [],
    };
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
  const fits = (query, place) => {
    const grade = word("grade", place), between = (value, low, high) =>
      (low === undefined && high === undefined) || (value !== null && !(value < low) && !(value > high));
    return (!query.role || word("role", place) === query.role)
      && (!query.grade || grade === query.grade || (query.grade === "wrong" && grade === "flaw"))
      && (!query.phase || word("phase", place)[0] === query.phase)
      && between(data.round[place], query.round, query.round)
      && between(data.step[place], query.first_step, query.last_step)
      && between(data.score[place], query.lowest, query.highest);
  };
  const containing = async (places, text, current) => {
    const part = text.toLowerCase(), found = [], asking = new Map(); // number of a problem -> whether it has the text
    let number = -1, here = null;
    for (const place of places) {
      const problem = data.problem[place];
      if (!asking.has(problem)) {
        const [question] = await problemOf(place);
        if (!current()) return [];
        asking.set(problem, question.toLowerCase().includes(part));
      }
      if (asking.get(problem)) { found.push(place); continue; }
      if (blockOf(place) !== number) {
        number = blockOf(place);
        if (number % 16 === 15) at("count").textContent = `Searching … ${Math.round(100 * number / texts.length)} %`;
        here = await block(number);
        if (!current()) return [];
      }
      const there = place - data.starts[number];
      if ([here.text[there], ...(here.after[there] || [])].some((one) => one.toLowerCase().includes(part))) found.push(place);
    }
    return found;
  };
  const sorted = (places, order) => { // `places`: the newest first. Equal solutions: the oldest first.
    if (!order || order === "newest") return places;
    places.reverse();
    const by = order === "highest" || order === "lowest" ? data.score : data.tokens, sign = order === "highest" || order === "longest" ? -1 : 1;
    const compare = (a, b) => by[a] === null || by[b] === null ? (by[a] === null) - (by[b] === null) : sign * (by[a] - by[b]);
    return order === "oldest" ? places : places.sort(compare);
  };
  const find = async (query, current) => {
    let places = [];
    for (let place = 0; place < data.role.length; place++) if (fits(query, place)) places.push(place);
    if (query.text) places = await containing(places, query.text, current);
    return sorted(places, query.order);
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
    node.querySelector(".hit-text").textContent = short([found.text, ...found.after].join("\n"));
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
    fill(node, ".id", [`step ${found.step}`, found.reward === null ? "" : `reward ${scored(found.reward)}`, found.id].filter(Boolean).join(", "));
    if (found.mark) {
      const mark = document.createElement("mark"), [begin, end] = found.mark;
      mark.textContent = found.text.slice(begin, end);
      text.replaceChildren(found.text.slice(0, begin), mark, found.text.slice(end));
    } else text.textContent = found.text;
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
  const showList = async (fields, current) => {
    const [query, problems] = queryOf(fields), found = await find(query, current);
    if (!current()) return;
    const pages = Math.max(1, Math.ceil(found.length / data.page)), number = Math.min(pages, Math.max(1, parseInt(query.page) || 1));
    const first = (number - 1) * data.page, shown = await Promise.all(found.slice(first, first + data.page).map(row));
    if (!current()) return;
    const range = shown.length ? `; shown: ${(first + 1).toLocaleString("en")} to ${(first + shown.length).toLocaleString("en")}` : "";
    at("count").textContent = `${many(found.length, "solution")} of ${data.role.length.toLocaleString("en")}${range}`;
    at("problems").replaceChildren(...problems.map((text) => { const item = document.createElement("li"); item.textContent = text; return item; }));
    at("problems").hidden = !problems.length;
    at("hits").replaceChildren(...shown.map(hit));
    numbers(fields, number, pages);
  };
  // All solutions of a problem: the newest phase first, within a phase by role and score.
  const showProblem = async (problem, chosen, current) => {
    const places = [];
    for (let place = 0; place < data.role.length; place++) if (word("problem", place) === problem) places.push(place);
    const found = await Promise.all(places.map(row));
    if (!current()) return;
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
  const show = async (current) => {
    const wanted = new URLSearchParams(location.hash.slice(1)), problem = wanted.get("problem");
    at("list").hidden = problem !== null;
    at("problem").hidden = problem === null;
    if (problem !== null) await showProblem(problem, wanted.get("solution"), current);
    else {
      lastList = location.hash || "#";
      for (const field of form.elements) if (field.name && field !== document.activeElement) field.value = wanted.get(field.name) || (field.name === "order" ? "newest" : "");
      await showList([...wanted], current);
    }
  };
  const failed = (error) => {
    opening.hidden = false;
    opening.textContent = `This browser cannot open the solutions (${error.message}). pvg watch shows them without a script.`;
    for (const id of ["count", "hits", "pages", "question", "solutions-count", "solutions"]) at(id).replaceChildren();
    at("reference").hidden = true;
  };
  const draw = async () => {
    const mine = ++asked, current = () => mine === asked;
    at("browser").setAttribute("aria-busy", "true");
    try { await show(current); if (current()) opening.hidden = true; } catch (error) { if (current()) failed(error); }
    if (current()) at("browser").setAttribute("aria-busy", "false");
  };
  let waiting = 0;
  const changed = () => {
    const hash = "#" + new URLSearchParams(fieldsOf());
    if (hash !== (location.hash || "#")) location.replace(hash); // without an entry in the history for each letter
  };
  form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(changed, 250); });
  form.addEventListener("submit", (event) => { event.preventDefault(); document.activeElement?.blur(); changed(); });

  opening.hidden = false;
  unpack(at("columns")).then((found) => {
    data = found;
    homes = homesOf();
    at("browser").hidden = false;
    addEventListener("hashchange", draw);
    return draw();
  }).catch(failed);
})();
