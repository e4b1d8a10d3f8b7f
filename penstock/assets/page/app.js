// The page: conversations, messages, settings. What it keeps stays in this browser.

import { watch } from "./live.js";
import { markdown } from "./markdown.js";
import { answer, get, NUMBERS } from "./server.js";
import * as store from "./store.js";

const at = (id) => document.getElementById(id);
const make = (name, fields = {}, ...children) => {
  const made = Object.assign(document.createElement(name), fields);
  made.append(...children);
  return made;
};

const chats = store.load();
let now = chats[0];
let settings = store.settings();
let under = null;  // what cancels the answer that comes

function keep() {
  if (!store.keep(chats)) say("This browser has no room for more conversations.", true);
}

function say(text, wrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
}

function showList() {
  at("list").replaceChildren(...chats.map((chat) => {
    const name = store.title(chat);
    const open = make("button", { textContent: name, onclick: () => turnTo(chat) });
    if (chat === now) open.setAttribute("aria-current", "true");
    const drop = make("button", { textContent: "×", title: "Delete", onclick: () => remove(chat) });
    drop.setAttribute("aria-label", `Delete ${name}`);
    return make("li", {}, open, drop);
  }));
}

function turnTo(chat) {
  under?.abort();
  now = chat;
  at("chats").classList.remove("open");
  at("show-chats").setAttribute("aria-expanded", "false");
  say("");
  showList();
  showMessages();
  at("prompt").focus();
}

function remove(chat) {
  chats.splice(chats.indexOf(chat), 1);
  if (!chats.length) chats.push(store.conversation({}));
  keep();
  turnTo(chat === now ? chats[0] : now);
}

function fill(item, message) {
  const text = item.querySelector(".text");
  const said = message.role === "user" ? [message.content] : markdown(message.content);
  const thought = message.thought ? [make("div", { className: "thought", textContent: message.thought })] : [];
  text.replaceChildren(...thought, ...said);
}

function shown(message, index) {
  const user = message.role === "user";
  const act = (name, what) => make("button", { type: "button", textContent: name, onclick: what });
  const acts = [act("Copy", () => navigator.clipboard?.writeText(message.content))];
  if (user) acts.push(act("Edit", () => edit(index)));
  else if (index === now.messages.length - 1) acts.push(act("Regenerate", () => again(index)));
  const item = make("article", { className: message.role }, make("div", { className: "who", textContent: user ? "You" : "Model" }),
    make("div", { className: "text" }), make("div", { className: "acts" }, ...acts));
  fill(item, message);
  return item;
}

function showMessages() {
  at("messages").replaceChildren(...now.messages.map(shown));
  at("messages").lastElementChild?.scrollIntoView({ block: "end" });
}

// What was said from here on goes, and the message stands in the field again.
function edit(index) {
  under?.abort();
  at("prompt").value = now.messages[index].content;
  now.messages.length = index;
  keep();
  showMessages();
  at("prompt").focus();
}

function again(index) {
  now.messages.length = index;
  speak();
}

async function speak() {
  const chat = now, message = { role: "assistant", content: "", thought: "" }, cancel = new AbortController();
  under?.abort();
  under = cancel;
  const asked = chat.messages.map(({ role, content }) => ({ role, content }));
  if (settings.system) asked.unshift({ role: "system", content: settings.system });
  chat.messages.push(message);
  showList();
  showMessages();
  const item = at("messages").lastElementChild;
  at("messages").setAttribute("aria-busy", "true");
  at("send").hidden = !(at("stop").hidden = false);
  say("Waiting for the first word…");
  const begun = performance.now();
  let tokens = 0, first = 0, drawn = 0, reason = null;
  try {
    for await (const piece of answer(asked, settings, cancel.signal)) {
      if (piece.content || piece.thought) {
        first ||= performance.now() - begun;
        tokens += 1;
      }
      message.content += piece.content;
      message.thought += piece.thought;
      reason = piece.reason ?? reason;
      if (performance.now() - drawn > 60) {  // to draw each of 200 tokens a second would take all of the processor
        const end = at("messages");
        const follows = end.scrollHeight - end.scrollTop - end.clientHeight < 80;
        fill(item, message);
        if (follows) end.scrollTop = end.scrollHeight;
        drawn = performance.now();
      }
    }
    const seconds = (performance.now() - begun - first) / 1000;
    const pace = tokens > 1 && seconds > 0 ? `${((tokens - 1) / seconds).toFixed(1)} tokens/s · ` : "";
    say(`${pace}first word after ${(first / 1000).toFixed(2)} s${reason === "length" ? " · cut at its length" : ""}`);
  } catch (error) {
    if (cancel.signal.aborted) say("Stopped.");
    else say(error.message, true);
  } finally {
    if (!message.content && !message.thought) chat.messages.pop();
    keep();
    if (under === cancel) {
      under = null;
      at("stop").hidden = !(at("send").hidden = false);
      at("messages").removeAttribute("aria-busy");
      if (chat === now) showMessages();
    }
  }
}

function toggle(button, panel) {
  at(button).onclick = () => {
    const open = at(panel).classList.toggle("open");
    at(button).setAttribute("aria-expanded", String(open));
  };
}

at("compose").onsubmit = (event) => {
  event.preventDefault();
  const text = at("prompt").value.trim();
  if (!text || under) return;
  at("prompt").value = "";
  now.messages.push(store.message("user", text));
  keep();
  speak();
};
at("prompt").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("compose").requestSubmit();
  }
};
at("stop").onclick = () => under?.abort();
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && under && !at("settings").open) under.abort();
});
at("new").onclick = () => {
  const empty = chats.find((chat) => !chat.messages.length) ?? store.conversation({});
  if (!chats.includes(empty)) chats.unshift(empty);
  turnTo(empty);
};
at("save").onclick = () => {
  const file = new Blob([JSON.stringify(now, null, 1)], { type: "application/json" });
  const link = make("a", { href: URL.createObjectURL(file), download: "conversation.json" });
  link.click();
  URL.revokeObjectURL(link.href);
};
at("open").onchange = async () => {
  const [file] = at("open").files;
  at("open").value = "";
  try {
    const chat = store.conversation({ ...JSON.parse(await file.text()), id: undefined });
    if (!chat.messages.length) throw new Error();
    chats.unshift(chat);
    keep();
    turnTo(chat);
  } catch {
    say("This file holds no conversation.", true);
  }
};
at("show-settings").onclick = async () => {
  const form = at("settings").querySelector("form");
  const offer = (names, chosen) => {
    form.model.replaceChildren(...names.map((name) => make("option", { textContent: name, value: name })));
    form.model.value = names.includes(chosen) ? chosen : names[0] ?? "";
  };
  for (const field of ["system", ...NUMBERS, "key"]) form[field].value = settings[field] ?? "";
  offer(settings.model ? [settings.model] : [], settings.model);
  at("settings").showModal();  // a busy server may take a while to say which models it has
  const names = await get("v1/models", settings.key).then((found) => found.data.map((model) => model.id)).catch(() => []);
  if (at("settings").open && names.length) offer(names, form.model.value);
};
at("settings").onclose = () => {
  const form = at("settings").querySelector("form");
  settings = Object.fromEntries(["system", "model", ...NUMBERS, "key"].map((field) => [field, form[field].value]));
  store.keepSettings(settings);
};
toggle("show-chats", "chats");
toggle("show-machine", "machine");
watch(() => settings.key, (told) => { at("model").textContent = told.model; });
turnTo(now);
