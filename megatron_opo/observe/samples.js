"use strict";
// Text of models enters the page as text nodes only; nothing here makes HTML of a string.
(() => {
  const section = document.getElementById("browser");
  const form = section.querySelector("form");
  const list = document.getElementById("groups");
  const more = document.getElementById("more");
  const PAGE = 8;
  const LONG = 300;
  let data;
  let sharedStart = 0;
  let matching = [];
  let drawn = 0;

  const keys = new WeakMap();

  const read = () => JSON.parse(document.getElementById("samples-data").textContent);

  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function options(select, pairs) {
    const chosen = select.value;
    select.replaceChildren(...pairs.map(([value, label]) => {
      const option = make("option", "", label);
      option.value = value;
      return option;
    }));
    select.value = chosen;
    if (select.selectedIndex < 0) select.selectedIndex = 0;
  }

  function take(newData) {
    data = newData;
    section.hidden = !data.groups.length;
    sharedStart = startOfAll(data.groups.map((group) => group.prompt));
    const steps = [...new Set(data.groups.map((group) => group.step))].sort((a, b) => a - b);
    const colors = Object.keys(data.halves).filter((name) =>
      data.groups.some((group) => group.members.some((member) => member[name])));
    const runs = data.runs.map((name, i) => [String(i), name]);
    options(form.elements.run, [["", "all"], ...runs]);
    const named = steps.map((step) => [String(step), String(step)]);
    options(form.elements.step, [["", "all"], ...named]);
    options(form.elements.color, [["", "nothing"], ...colors.map((name) => [name, name])]);
    document.getElementById("of-run").hidden = data.runs.length < 2;
    document.getElementById("of-color").hidden = !colors.length;
    document.getElementById("speakers").hidden =
      !data.groups.some((group) => group.members.some((member) => member.added));
  }

  // Up to which character all prompts are the same, as those of one chat template are.
  function startOfAll(prompts) {
    const different = [...new Set(prompts)];
    if (different.length < 2) return 0;
    let end = 0;
    while (different.every((p) => p[end] !== undefined && p[end] === different[0][end])) end += 1;
    const words = different[0].slice(0, end).lastIndexOf(" ") + 1;
    return end > 40 ? words || end : 0;
  }

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

  function find(least = PAGE) {
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
      const half = `${want.color === "logprob" ? "-" : ""}${data.halves[want.color]}`;
      scale.append(`${want.color} 0`, make("i"), `far from 0; half of the colour is ${half} nats`);
      found.append(scale);
    }
    drawn = 0;
    draw(want, least);
  }

  // What stands there already stays as it is, so that nobody who reads it is disturbed.
  function draw(want, count = PAGE) {
    const end = Math.min(drawn + count, matching.length);
    for (; drawn < end; drawn += 1) {
      const [group, hits] = matching[drawn];
      const key = JSON.stringify([group, hits, want.color, want.text, sharedStart]);
      const there = list.children[drawn];
      if (there && keys.get(there) === key) continue;
      const node = groupNode(group, hits, want);
      keys.set(node, key);
      if (there) there.replaceWith(node);
      else list.append(node);
    }
    while (list.children.length > drawn) list.lastChild.remove();
    more.hidden = drawn >= matching.length;
  }

  function title(prompt) {
    const words = prompt.slice(sharedStart).replace(/\s+/g, " ").trim();
    const shortened = words.length > 60 ? `${words.slice(0, 60)}...` : words;
    return sharedStart ? `... ${shortened}` : shortened;
  }

  // 1, 0, 0, 1 as "1 x2, 0 x2", with the sign of multiplication.
  function tally(rewards) {
    const counts = new Map();
    for (const reward of [...rewards].sort((a, b) => b - a)) {
      counts.set(short(reward), (counts.get(short(reward)) ?? 0) + 1);
    }
    if (counts.size > 6) return `${short(Math.min(...rewards))} to ${short(Math.max(...rewards))}`;
    return [...counts].map(([reward, n]) => (n > 1 ? `${reward} \u00d7${n}` : reward)).join(", ");
  }

  function groupNode(group, hits, want) {
    const node = make("article", "group");
    const header = make("header");
    const kind = group.kind === "eval" ? "evaluation" : "training";
    const run = data.runs.length > 1 ? `${data.runs[group.run]}, ` : "";
    const name = make("h3", "", `${run}${kind}, step ${group.step}: `);
    const start = make("bdi");
    start.append(...marked(title(group.prompt), want.text));
    name.append(start);
    const rewards = group.members.map((m) => m.reward).filter((r) => r !== undefined);
    const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
    const number = group.members.length;
    const responses = `${number} ${number === 1 ? "response" : "responses"}`;
    const facts = [group.of ? `the first ${number} of ${group.of} responses` : responses];
    if (rewards.length) facts.push(`rewards ${tally(rewards)}`);
    if (rewards.length > 1 && !group.of) facts.push(`mean ${short(mean)}`);
    const baselines = [...new Set(group.members.map((m) => m.baseline)
      .filter((b) => b !== undefined).map(short))];
    if (baselines.length === 1) facts.push(`baseline ${baselines[0]}`);
    header.append(name, make("span", "", facts.join("; ")));
    const prompt = make("pre", "prompt");
    prompt.dir = "auto";
    prompt.append(...marked(group.prompt, want.text));
    prompt.hidden = title(group.prompt) === group.prompt;
    const truth = make("div", "truth", "ground truth ");
    truth.append(make("code", "", group.truth));
    const long = group.members.some((member) => member.text.length > LONG);
    const members = make("div", long ? "members long" : "members");
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
      const sign = member.advantage > 0 ? "+" : "";
      header.append(make("span", "", `advantage ${sign}${short(member.advantage)}`));
    }
    if (ownBaseline && member.baseline !== undefined) {
      header.append(make("span", "", `baseline ${short(member.baseline)}`));
    }
    const cut = member.cut ? ", cut at the limit" : "";
    header.append(make("span", "", `${member.length} tokens${cut}`));
    const text = make("pre");
    text.dir = "auto";
    const colour = want.color && member[want.color] ? want.color : "";
    if (colour) text.className = "tokens";
    if (colour || member.added) text.append(...spoken(member, colour, want.text));
    else text.append(...marked(member.text || "(empty)", want.text));
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

  // Text of a response by who said it: what was added to the policy's words is marked as such.
  // Ranges count characters as Python does; JavaScript's strings count halves of some.
  function spoken(member, colour, wantedText) {
    const characters = Array.from(member.text);
    const nodes = [];
    let end = 0;
    for (const [start, stop] of [...(member.added ?? []), [characters.length, characters.length]]) {
      const say = (from, to) => (colour ? coloured(member, colour, characters, from, to)
        : marked(characters.slice(from, to).join(""), wantedText));
      if (start > end) nodes.push(...say(end, start));
      if (stop > start) {
        const node = make("span", "added");
        node.append(...say(start, stop));
        nodes.push(node);
      }
      end = stop;
    }
    return nodes;
  }

  // The tokens between two places, each on its colour.
  function coloured(member, name, characters, first, last) {
    const nodes = [];
    let end = 0;
    member.chars.forEach((size, i) => {
      const start = end;
      end += size;
      const piece = characters.slice(Math.max(start, first), Math.min(end, last)).join("");
      if (!piece || start >= last) return;
      const node = make("span", "", piece);
      const level = data.levels.indexOf(member[name][i]);
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
  // A page that is kept up to date says so when it has other samples.
  document.addEventListener("samples", () => { take(read()); find(Math.max(drawn, PAGE)); });
  take(read());
  recall();
  find();
})();
