// What the page asks of the server that it came from.

// Of the settings, those that go into a request as numbers.
export const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"];

const headers = (key) => ({ "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) });

async function failed(answer) {
  const said = await answer.json().catch(() => null);
  return new Error(said?.error?.message ?? `the server answered ${answer.status}`);
}

export async function get(path, key) {
  const answer = await fetch(path, { headers: headers(key), cache: "no-store" });
  if (!answer.ok) throw await failed(answer);
  return answer.json();
}

// The answer to some messages, piece by piece: {content, thought, reason}. `signal` cancels it.
export async function* answer(messages, settings, signal) {
  const body = { messages, stream: true };
  if (settings.model) body.model = settings.model;
  for (const name of NUMBERS) {
    if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  }
  const found = await fetch("v1/chat/completions", { method: "POST", headers: headers(settings.key), body: JSON.stringify(body), signal });
  if (!found.ok) throw await failed(found);
  const reader = found.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const told = JSON.parse(event.slice(6));
      if (told.error) throw new Error(told.error.message);
      const [choice] = told.choices;
      if (choice) yield { content: choice.delta.content ?? "", thought: choice.delta.reasoning_content ?? "", reason: choice.finish_reason };
    }
  }
}
