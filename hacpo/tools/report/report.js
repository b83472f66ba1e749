"use strict";
// Tooltips read the table below each chart; the reader shows texts with textContent only, never as markup.

const byId = (id) => document.getElementById(id);

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined && text !== null) element.textContent = String(text);
  return element;
}

// --- theme: as the system says, until the button says otherwise -------------------------------------------------------

function setUpTheme() {
  const order = ["system", "light", "dark"];
  const button = byId("theme");
  const recall = () => { try { return localStorage.getItem("hacpo-theme"); } catch { return null; } };
  const keep = (theme) => { try { localStorage.setItem("hacpo-theme", theme); } catch { /* a file:// page may not */ } };
  const show = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = "Theme: " + theme;
    button.dataset.now = theme;
  };
  const wished = new URLSearchParams(location.search).get("theme") || recall();
  show(order.includes(wished) ? wished : "system");
  button.hidden = false;
  button.addEventListener("click", () => {
    const next = order[(order.indexOf(button.dataset.now) + 1) % order.length];
    show(next);
    keep(next);
  });
}

// --- contents: mark the section in view -------------------------------------------------------------------------------

function setUpContents() {
  const links = new Map([...document.querySelectorAll(".contents a")].map((link) => [link.hash.slice(1), link]));
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  document.querySelectorAll("main > section").forEach((section) => watcher.observe(section));
}

// --- charts -----------------------------------------------------------------------------------------------------------

function setUpChart(chart) {
  const tip = byId("tip");
  const plot = chart.querySelector(".plot");
  const table = chart.nextElementSibling.querySelector("table");
  const names = [...table.tHead.rows[0].cells].slice(1);
  const rows = [...table.tBodies[0].rows];
  const places = rows.map((row) => Number(row.dataset.x));
  const cursor = make("i", "cursor");
  cursor.hidden = true;
  plot.append(cursor);
  let shown = -1;

  function show(index, x, y) {
    shown = index;
    const row = rows[index];
    cursor.hidden = false;
    cursor.style.left = 100 * places[index] + "%";
    tip.replaceChildren(make("strong", "", table.tHead.rows[0].cells[0].textContent + " " + row.cells[0].textContent));
    names.forEach((name, number) => {
      const value = row.cells[number + 1].textContent;
      if (!value) return;
      const line = make("div");
      line.append(make("i", "swatch " + name.className), make("span", "", name.textContent), make("b", "", value));
      tip.append(line);
    });
    tip.hidden = false;
    const width = tip.offsetWidth;
    const left = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, Math.min(y - 20, innerHeight - tip.offsetHeight - 4)) + "px";
  }
  function hide() {
    shown = -1;
    cursor.hidden = true;
    tip.hidden = true;
  }
  if (!rows.length) return;
  chart.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width;
    let nearest = 0;
    places.forEach((place, index) => {
      if (Math.abs(place - at) < Math.abs(places[nearest] - at)) nearest = index;
    });
    show(nearest, event.clientX, event.clientY);
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -rows.length, End: rows.length };
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    const from = shown < 0 ? (moves[event.key] > 0 ? -1 : rows.length) : shown;
    const index = Math.min(Math.max(from + moves[event.key], 0), rows.length - 1);
    const box = plot.getBoundingClientRect();
    show(index, box.left + places[index] * box.width, box.top + 20);
    const words = (node) => [...node.childNodes].map((part) => part.textContent.trim()).filter(Boolean).join(" ");
    byId("spoken").textContent = [...tip.childNodes].map(words).join(", ");
  });
}

// --- the reader of answers --------------------------------------------------------------------------------------------

function signed(value, digits) {
  if (value === null) return "–";
  return (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
}

function plain(value) {
  return value === 0 ? "0" : value === null ? "–" : Math.abs(value) >= 1000 ? value.toPrecision(3) : value.toFixed(Math.abs(value) < 0.1 ? 4 : 3);
}

/** What became of a response at one learner: a word and a class. `imitated`: its likelihood is raised in any case. */
function outcome(entry, imitated) {
  if (entry.status !== null && entry.status !== "kept") return ["not used: " + entry.status, "off"];
  if (entry.effective_advantage === null) return ["not judged yet", "off"];
  if (imitated && entry.ratio !== null) return ["↑ likelier", "up"];
  if (entry.effective_advantage === 0) return ["no signal", "off"];
  if (entry.ratio === null) return ["not updated yet", "off"];
  if (entry.clipped) {
    const side = entry.ratio < entry.lower ? ", < " + plain(entry.lower) : entry.ratio > entry.upper ? ", > " + plain(entry.upper) : "";
    return ["silenced" + side, "off"];
  }
  return entry.effective_advantage > 0 ? ["↑ likelier", "up"] : ["↓ less likely", "down"];
}

class Reader {
  constructor(index) {
    this.index = index;
    this.loaded = new Map();
    this.at = { step: 0, problem: 0 };
    this.brief = index.agents.reduce((sum, agent) => sum + agent.name.length, 0) < 16; // names fit beside their colours
    this.response = Object.fromEntries(index.responseFields.map((name, place) => [name, place]));
    const steps = byId("reader-step");
    index.steps.forEach((entry, place) => steps.append(new Option(String(entry.step), String(place))));
    const filter = byId("reader-filter");
    filter.append(new Option("all problems", ""));
    index.filters.forEach(([key, label]) => {
      const count = index.steps.reduce((sum, entry) => sum + entry.problems.filter((p) => p.flags.includes(key)).length, 0);
      const option = new Option(label + " (" + count + ")", key);
      option.disabled = count === 0;
      filter.append(option);
    });
    steps.addEventListener("change", () => this.go(Number(steps.value), 0));
    filter.addEventListener("change", () => this.refilter());
    byId("reader-previous").addEventListener("click", () => this.move(-1));
    byId("reader-next").addEventListener("click", () => this.move(1));
    byId("reader").hidden = false;
    this.refilter();
  }

  /** [step place, problem place] of every problem that the filter lets through. */
  matches() {
    const key = byId("reader-filter").value;
    return this.index.steps.flatMap((entry, step) =>
      entry.problems.flatMap((problem, place) => (!key || problem.flags.includes(key) ? [[step, place]] : [])));
  }

  refilter() {
    this.found = this.matches();
    const same = this.found.findIndex(([step, problem]) => step === this.at.step && problem === this.at.problem);
    const near = same >= 0 ? same : this.found.findIndex(([step]) => step >= this.at.step);
    const [step, problem] = this.found[Math.max(near, 0)] || [this.at.step, 0];
    this.show(step, problem);
  }

  go(step) {
    const inStep = this.found.find(([found]) => found === step);
    this.show(step, inStep ? inStep[1] : -1);
  }

  move(by) {
    const here = this.found.findIndex(([step, problem]) =>
      step > this.at.step || (step === this.at.step && problem >= this.at.problem));
    const exact = here >= 0 && this.found[here][0] === this.at.step && this.found[here][1] === this.at.problem;
    const next = here < 0 ? (by < 0 ? this.found.length - 1 : -1) : here + (by < 0 ? -1 : exact ? 1 : 0);
    if (this.found[next]) this.show(...this.found[next]);
  }

  load(step) {
    const number = this.index.steps[step].step;
    if (!this.loaded.has(number)) this.loaded.set(number, JSON.parse(byId("reader-step-" + number).textContent));
    return this.loaded.get(number);
  }

  show(step, problem) {
    this.at = { step, problem };
    byId("reader-step").value = String(step);
    const place = this.found.findIndex(([s, p]) => s === step && p === problem);
    byId("reader-count").textContent = place < 0 ? "no such problem in this step" : `${place + 1} of ${this.found.length}`;
    byId("reader-previous").disabled = !this.found.length || place === 0;
    byId("reader-next").disabled = !this.found.length || place === this.found.length - 1;
    const list = byId("reader-problems");
    list.replaceChildren();
    for (const [, number] of this.found.filter(([s]) => s === step)) list.append(this.entry(step, number, number === problem));
    const article = byId("reader-problem");
    article.hidden = problem < 0;
    if (problem >= 0) this.draw(article, this.load(step)[problem], this.index.steps[step].problems[problem]);
  }

  entry(step, number, current) {
    const problem = this.index.steps[step].problems[number];
    const button = make("button");
    button.type = "button";
    if (current) button.setAttribute("aria-current", "true");
    button.append(make("span", "what", problem.problem));
    const rates = make("span", "rates");
    this.index.agents.forEach((agent, place) => {
      const rate = make("span");
      const value = problem.rates[place];
      const named = make("span", this.brief ? "" : "hidden", agent.name + " ");
      rate.title = agent.name;
      rate.append(make("i", "swatch " + agent.color), named, value === null ? "–" : this.rate(value));
      rates.append(rate);
    });
    button.append(rates);
    button.addEventListener("click", () => this.show(step, number));
    const item = make("li");
    item.append(button);
    return item;
  }

  rate(value) {
    return this.index.graded ? plain(value) : Math.round(100 * value) + " %";
  }

  /** A reward in a colour between those of the run's lowest and highest. */
  grade(value) {
    const [low, high] = this.index.rewards;
    const share = high > low ? Math.min(Math.max((value - low) / (high - low), 0), 1) : 0.5;
    const text = make("span", "verdict grade", "reward " + value);
    text.style.color = `color-mix(in oklab, var(--fine) ${(100 * share).toFixed(1)}%, var(--bad))`;
    return text;
  }

  /** What the verifier said. A function's `correct` and `wrong` say no more than that a reward is above 0 or not. */
  judged(verdict, reward) {
    if (verdict === null) return [make("span", "verdict", "not judged yet")];
    if (this.index.graded) {
      const words = [this.grade(reward)];
      if (!["correct", "wrong"].includes(verdict)) words.push(make("span", "verdict", verdict));
      return words;
    }
    const word = make("span", "verdict " + (["correct", "wrong"].includes(verdict) ? verdict : ""), verdict);
    return [word, make("span", "", "reward " + reward)];
  }

  draw(article, problem, entry) {
    const header = make("header");
    header.append(make("p", "", problem.problem));
    const meta = make("div", "meta");
    meta.append("reference answer: ", make("code", "", problem.answer), " · ", make("span", "", problem.id));
    header.append(meta);
    const columns = make("div", "columns");
    columns.tabIndex = 0;
    this.index.agents.forEach((agent, place) => {
      const column = make("div", "column " + agent.color);
      const title = make("h4", "", "");
      const rate = entry.rates[place];
      title.append(make("i", "swatch " + agent.color), make("b", "", agent.name), make("span", "", rate === null ? "" : "mean reward " + plain(rate)));
      column.append(title, ...problem.agents[place].map((response) => this.card(response, place)));
      if (!problem.agents[place].length) column.append(make("p", "note", "No answers yet."));
      columns.append(column);
    });
    article.replaceChildren(header, columns);
  }

  card(response, author) {
    const value = (name) => response[this.response[name]];
    const card = make("div", "response");
    const meta = make("div", "meta");
    meta.append(make("span", "", "#" + value("sample")));
    const verdict = value("verdict");
    meta.append(...this.judged(verdict, value("reward")));
    if (verdict && !this.index.graded) {
      const answer = make("span", "", value("extracted") === null ? "no answer found" : "answer ");
      if (value("extracted") !== null) answer.append(make("code", "", value("extracted")));
      meta.append(answer);
    }
    if (value("tokens") !== null) meta.append(make("span", "", value("tokens") + " tokens"));
    if (value("finish_reason") === "length") meta.append(make("span", "", "cut off by the length limit"));
    const text = value("text");
    const said = make("div", "said" + (text ? "" : " nothing"), text || "(nothing)");
    said.dir = "auto";
    card.append(meta, said);
    if (value("cut")) card.append(make("p", "error", "… " + value("cut").toLocaleString("en") + " more characters in the rollouts table"));
    const learners = value("learners").map((fields, place) => [fields, place]).filter(([fields]) => fields !== null);
    if (learners.length) {
      const fit = make("div", "fit");
      fit.append(this.worth(learners, author));
      card.append(fit);
    }
    return card;
  }

  worth(learners, author) {
    const table = make("table", "worth");
    const head = table.createTHead().insertRow();
    for (const [name, meaning] of [
      ["learner", "who learns from this answer"],
      ["effect", "what the update did with it"],
      ["A", "advantage: better (+) or worse (−) than the baseline"],
      ["ω", "omega: factor for the author's relative ability"],
      ["ω·A", "effective advantage"],
      ["ratio", "importance ratio at the update that used it"],
      ["weight", "importance weight"],
    ]) {
      const cell = make("th", "", name);
      cell.scope = "col";
      cell.title = meaning;
      head.append(cell);
    }
    const body = table.createTBody();
    for (const [fields, place] of learners) {
      const entry = Object.fromEntries(this.index.learnerFields.map((name, number) => [name, fields[number]]));
      const own = place === author;
      const row = body.insertRow();
      const name = make("th");
      name.scope = "row";
      name.append(make("i", "swatch " + this.index.agents[place].color), this.index.agents[place].name);
      name.title = this.index.agents[place].name;
      const [word, kind] = outcome(entry, !own && this.index.imitates);
      const bounds = entry.ratio === null ? "" : `bounds ${plain(entry.lower)} to ${plain(entry.upper)}, update ${entry.update}, objective ${plain(entry.objective)}`;
      row.append(name, make("td", kind, word));
      for (const text of [signed(entry.advantage, 2), own ? "" : plain(entry.omega), own ? "" : signed(entry.effective_advantage, 2)]) {
        row.append(make("td", "", text));
      }
      const ratio = make("td", "", plain(entry.ratio));
      ratio.title = bounds;
      row.append(ratio, make("td", "", own ? "" : plain(entry.is_weight)));
      row.title = `baseline ${plain(entry.baseline)}${entry.guarded ? ", guarded" : ""}${bounds ? "; " + bounds : ""}`;
    }
    return table;
  }
}

setUpTheme();
setUpContents();
document.querySelectorAll(".chart").forEach(setUpChart);
const readerIndex = JSON.parse(byId("reader-index").textContent);
if (readerIndex.steps.length) new Reader(readerIndex);
