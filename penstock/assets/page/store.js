// Conversations and settings, kept in this browser alone. A key is kept until the tab is closed.

const CHATS = "penstock.chats", SETTINGS = "penstock.settings", KEY = "penstock.key";
const MOST = 200;  // conversations; the oldest leave

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export const message = (role, content) => ({ role, content });

// What of a value is a conversation: {id, messages: [{role, content, thought}]}.
export function conversation(value) {
  const roles = new Set(["user", "assistant", "system"]);
  const messages = Array.isArray(value?.messages) ? value.messages : [];
  const good = messages.filter((m) => roles.has(m?.role) && typeof m.content === "string").slice(0, 10000);
  return {
    id: typeof value?.id === "string" ? value.id : crypto.randomUUID?.() ?? String(Math.random()).slice(2),
    messages: good.map(({ role, content, thought }) => ({ role, content, thought: typeof thought === "string" ? thought : "" })),
  };
}

export const title = (chat) => (chat.messages.find((m) => m.role === "user")?.content ?? "").trim().slice(0, 60) || "New chat";

export function load() {
  const kept = read(CHATS, []);
  const chats = Array.isArray(kept) ? kept.map(conversation) : [];
  return chats.length ? chats : [conversation({})];
}

// Keeps what has messages. False where the browser has no room.
export function keep(chats) {
  try {
    localStorage.setItem(CHATS, JSON.stringify(chats.filter((chat) => chat.messages.length).slice(0, MOST)));
    return true;
  } catch {
    return false;
  }
}

export const settings = () => ({ ...read(SETTINGS, {}), key: sessionStorage.getItem(KEY) ?? "" });

export function keepSettings({ key, ...others }) {
  sessionStorage.setItem(KEY, key ?? "");
  localStorage.setItem(SETTINGS, JSON.stringify(others));
}
