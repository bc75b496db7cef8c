"use strict";
// Text of models enters the page as text nodes only; nothing here makes HTML of a string.
(() => {
  const data = JSON.parse(document.getElementById("samples-data").textContent);
  const section = document.getElementById("browser");
  if (!data.groups.length) return;
  section.hidden = false;
  const form = section.querySelector("form");
  const list = document.getElementById("groups");
  const more = document.getElementById("more");
  const PAGE = 8;
  let matching = [];
  let drawn = 0;

  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function options(select, pairs) {
    select.replaceChildren(...pairs.map(([value, label]) => {
      const option = make("option", "", label);
      option.value = value;
      return option;
    }));
  }

  const steps = [...new Set(data.groups.map((group) => group.step))].sort((a, b) => a - b);
  const colors = Object.keys(data.halves).filter((name) =>
    data.groups.some((group) => group.members.some((member) => member[name])));
  options(form.elements.run, [["", "all"], ...data.runs.map((name, i) => [String(i), name])]);
  options(form.elements.step, [["", "all"], ...steps.map((step) => [String(step), String(step)])]);
  options(form.elements.color, [["", "nothing"], ...colors.map((name) => [name, name])]);
  document.getElementById("of-run").hidden = data.runs.length < 2;
  document.getElementById("of-color").hidden = !colors.length;

  function wanted() {
    const value = (name) => form.elements[name].value;
    const bound = (name, otherwise) => (value(name) === "" ? otherwise : Number(value(name)));
    return {
      run: value("run"), kind: value("kind"), step: value("step"),
      reward: [bound("reward_from", -Infinity), bound("reward_to", Infinity)],
      length: [bound("length_from", -Infinity), bound("length_to", Infinity)],
      anyReward: value("reward_from") === "" && value("reward_to") === "",
      text: value("text").toLowerCase(), cut: form.elements.cut.checked, color: value("color"),
    };
  }

  const inside = (value, [least, largest]) => value >= least && value <= largest;

  function fits(group, member, want) {
    if (want.cut && !member.cut) return false;
    if (!want.anyReward && !(member.reward !== undefined && inside(member.reward, want.reward))) {
      return false;
    }
    if (!inside(member.length ?? 0, want.length)) return false;
    return !want.text || member.text.toLowerCase().includes(want.text) ||
      group.prompt.toLowerCase().includes(want.text);
  }

  function find() {
    const want = wanted();
    matching = [];
    let responses = 0;
    for (const group of data.groups) {
      if (want.run !== "" && group.run !== Number(want.run)) continue;
      if (want.kind && group.kind !== want.kind) continue;
      if (want.step !== "" && group.step !== Number(want.step)) continue;
      const hits = group.members.map((member) => fits(group, member, want));
      const count = hits.filter(Boolean).length;
      responses += count;
      if (count) matching.push([group, hits]);
    }
    const groups = matching.length === 1 ? "1 group" : `${matching.length} groups`;
    const found = document.getElementById("found");
    found.textContent = `${responses} ${responses === 1 ? "response" : "responses"} in ${groups}. `;
    if (want.color) {
      const scale = make("span", "scale", "");
      const ends = want.color === "logprob" ? ["likely", "unlikely"] : ["0", "large"];
      scale.append(ends[0], make("i"), ends[1]);
      found.append(scale);
    }
    list.replaceChildren();
    drawn = 0;
    draw(want);
  }

  function draw(want) {
    for (const [group, hits] of matching.slice(drawn, drawn + PAGE)) {
      list.append(groupNode(group, hits, want));
    }
    drawn = Math.min(drawn + PAGE, matching.length);
    more.hidden = drawn >= matching.length;
  }

  function groupNode(group, hits, want) {
    const node = make("article", "group");
    const header = make("header");
    const kind = group.kind === "eval" ? "evaluation" : "training";
    const run = data.runs.length > 1 ? `${data.runs[group.run]}, ` : "";
    header.append(make("b", "", `${run}${kind}, step ${group.step}`));
    const rewards = group.members.map((m) => m.reward).filter((r) => r !== undefined);
    const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
    const facts = [`${group.members.length} responses`];
    if (rewards.length) facts.push(`mean reward ${short(mean)}`);
    const baselines = [...new Set(group.members.map((m) => m.baseline)
      .filter((b) => b !== undefined).map(short))];
    if (baselines.length === 1) facts.push(`baseline ${baselines[0]}`);
    header.append(facts.join(", "));
    const prompt = make("pre", "prompt");
    prompt.dir = "auto";
    prompt.append(...marked(group.prompt, want.text));
    const truth = make("div", "truth", "ground truth ");
    truth.append(make("code", "", group.truth));
    const members = make("div", "members");
    group.members.forEach((member, i) => {
      members.append(card(member, hits[i], want, baselines.length > 1));
    });
    node.append(header, prompt, truth, members);
    return node;
  }

  function card(member, hit, want, ownBaseline) {
    const none = member.reward === undefined;
    const tone = none ? "none" : member.reward > 0 ? "good" : "bad";
    const node = make("article", `card ${tone}${hit ? "" : " other"}`);
    const header = make("header");
    header.append(make("span", "badge", none ? "unscorable" : `reward ${short(member.reward)}`));
    if (member.advantage !== undefined) {
      header.append(make("span", "", `advantage ${member.advantage > 0 ? "+" : ""}${short(member.advantage)}`));
    }
    if (ownBaseline && member.baseline !== undefined) {
      header.append(make("span", "", `baseline ${short(member.baseline)}`));
    }
    header.append(make("span", "", `${member.length} tokens${member.cut ? ", cut at the limit" : ""}`));
    const text = make("pre");
    text.dir = "auto";
    if (want.color && member[want.color]) {
      text.className = "tokens";
      text.append(...coloured(member, want.color));
    } else {
      text.append(...marked(member.text || "(empty)", want.text));
    }
    node.append(header, text);
    if (member.error) node.append(make("div", "truth", `not scored: ${member.error}`));
    return node;
  }

  const short = (value) => String(Number(value.toPrecision(3)));

  function marked(text, wantedText) {
    if (!wantedText) return [text];
    const lower = text.toLowerCase();
    if (lower.length !== text.length) return [text];
    const parts = [];
    let from = 0;
    for (let at; (at = lower.indexOf(wantedText, from)) >= 0; from = at + wantedText.length) {
      parts.push(text.slice(from, at), make("mark", "", text.slice(at, at + wantedText.length)));
    }
    parts.push(text.slice(from));
    return parts;
  }

  // member.chars counts characters as Python does; JavaScript's strings count halves of some.
  function coloured(member, name) {
    const characters = Array.from(member.text);
    const nodes = [];
    let from = 0;
    member.chars.forEach((size, i) => {
      const piece = characters.slice(from, from + size).join("");
      from += size;
      const level = data.levels.indexOf(member[name][i]);
      if (!piece) return;
      const node = make("span", "", piece);
      if (level >= 0) {
        const share = level / data.levels.length;
        const value = (data.halves[name] * share) / (1 - share);
        const percent = Math.round(100 * share);
        node.style.backgroundColor = `color-mix(in srgb, var(--heat) ${percent}%, transparent)`;
        node.title = `${name} about ${short(name === "logprob" ? -value : value)}`;
      }
      nodes.push(node);
    });
    return nodes;
  }

  // The filters are in the address, so that a view can be sent on and survives a reload.
  function remember() {
    const state = new URLSearchParams();
    for (const [name, value] of new FormData(form)) if (value !== "") state.set(name, value);
    const text = state.toString();
    if (text !== location.hash.slice(1)) {
      try { history.replaceState(null, "", `#${text}`); } catch { /* a page without an address */ }
    }
  }

  function recall() {
    const state = new URLSearchParams(location.hash.slice(1));
    for (const field of form.elements) {
      if (!field.name || !state.has(field.name)) continue;
      if (field.type === "checkbox") field.checked = true;
      else field.value = state.get(field.name);
      if (field.tagName === "SELECT" && field.selectedIndex < 0) field.value = "";
    }
  }

  let waiting = 0;
  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { remember(); find(); }, 120);
  });
  form.addEventListener("reset", () => setTimeout(() => { remember(); find(); }, 0));
  form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => draw(wanted()));
  recall();
  find();
})();
