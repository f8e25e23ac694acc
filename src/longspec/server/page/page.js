// A playground for the server that serves this page. All that comes from a model is set as text.

const $ = (id) => document.getElementById(id);
const ROUNDS_SHOWN = 60;
let messages = [];
let running = null;

// --- the server ---

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function connect() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) {
    $("model").textContent = response.status === 401 ? "an API key is needed" : "no model";
    throw new Error(await failure(response));
  }
  const model = (await response.json()).data[0];
  const draft = model.draft ? `draft ${model.draft}` : "no draft";
  $("model").textContent =
    `${model.id} (${draft}) on ${model.device}, ${model.dtype}, context ${model.max_model_len} tokens`;
  const chosen = $("method").value || "auto";
  $("method").replaceChildren(...model.methods.map((name) => new Option(name, name, name === "auto", name === chosen)));
}

// Yields the objects of a stream.
async function* ask(body, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(), signal, body: JSON.stringify({ ...body, stream: true, explain: true,
      stream_options: { include_usage: true } }),
  });
  if (!response.ok) throw new Error(await failure(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error) throw new Error(told.error.message);
      yield told;
    }
  }
}

// --- what an answer looks like ---

// Counts tokens as they come. A round ends with a token of the target's own.
class Tally {
  constructor() {
    Object.assign(this, { count: 0, drafted: 0, copied: 0, rounds: [], open: 0, first: 0, last: 0, text: "" });
  }

  add(token) {
    const now = performance.now();
    if (!this.count) this.first = now;
    this.last = now;
    this.count += 1;
    this.open += 1;
    this.text += token.text;
    if (token.copied) this.copied += 1;
    else if (token.depth) this.drafted += 1;
    if (!token.depth) {
      this.rounds.push(this.open);
      this.open = 0;
    }
  }

  // The first token belongs to the prompt's time.
  get speed() {
    return this.count > 1 && this.last > this.first ? ((this.count - 1) * 1000) / (this.last - this.first) : 0;
  }

  get tau() {
    const rounds = this.rounds.length - 1;
    return rounds > 0 ? (this.count - this.open - 1) / rounds : 0;
  }

  figures() {
    return `${this.count} tokens, ${this.speed.toFixed(1)} a second, ${this.tau.toFixed(2)} a round`;
  }
}

function tokenSpan(token) {
  const span = document.createElement("span");
  span.textContent = token.text;
  const depth = Math.min(token.depth, 5);
  span.className = token.copied ? "copied" : `d${depth}`;
  span.title = token.copied
    ? `copied from the text, depth ${token.depth}`
    : token.depth ? `drafted, accepted at depth ${token.depth}` : "from the target itself";
  return span;
}

function showStrip(tally) {
  const share = (part) => (tally.count ? `${Math.round((100 * part) / tally.count)}%` : "–");
  $("speed").textContent = tally.speed.toFixed(1);
  $("tau").textContent = tally.tau.toFixed(2);
  $("drafted").textContent = share(tally.drafted);
  $("copied").textContent = share(tally.copied);
  $("count").textContent = tally.count;
  const shown = tally.rounds.slice(-ROUNDS_SHOWN);
  const most = Math.max(4, ...shown);
  const width = 240 / ROUNDS_SHOWN;
  $("rounds").replaceChildren(...shown.map((tokens, place) => {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const height = (40 * tokens) / most;
    for (const [name, value] of Object.entries({ x: place * width, y: 40 - height, width: width - 0.6, height })) {
      bar.setAttribute(name, value);
    }
    return bar;
  }));
}

function showReuse(usage) {
  const { prompt_tokens: all, prompt_tokens_details: { cached_tokens: reused } } = usage;
  $("reuse").textContent = `${reused} of ${all} prompt tokens were reused (${Math.round((100 * reused) / all)}%)`;
  return `${reused} of ${all} prompt tokens reused`;
}

// Streams an answer into a paragraph; returns the tally.
async function stream(body, paragraph, figures, signal) {
  const tally = new Tally();
  let usage = "";
  try {
    for await (const chunk of ask(body, signal)) {
      for (const token of chunk.tokens ?? []) {
        tally.add(token);
        if (token.text) paragraph.append(tokenSpan(token));
      }
      if (chunk.usage) usage = `; ${showReuse(chunk.usage)}`;
      showStrip(tally);
      figures.textContent = tally.figures() + usage;
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    figures.textContent = `${tally.figures()}; stopped`;
  }
  return tally;
}

// --- what the user does ---

function bodyFor(question) {
  const text = $("document").value.trim();
  const context = text ? [{ role: "system", content: `Answer questions about this document.\n\n${text}` }] : [];
  return {
    messages: [...context, ...messages, { role: "user", content: question }],
    method: $("method").value || "auto",
    temperature: Number($("temperature").value),
    seed: Number($("seed").value),
    max_tokens: Number($("max-tokens").value),
  };
}

function bubble(role, text) {
  const box = document.createElement("article");
  box.className = `message ${role}`;
  const paragraph = Object.assign(document.createElement("p"), { className: "text", textContent: text });
  const figures = Object.assign(document.createElement("p"), { className: "figures" });
  box.append(paragraph, ...(role === "assistant" ? [figures] : []));
  $("log").append(box);
  box.scrollIntoView({ block: "end", behavior: "smooth" });
  return [paragraph, figures];
}

// Runs one thing at a time, which Stop ends.
async function exclusively(work) {
  if (running) return;
  running = new AbortController();
  $("problem").textContent = "";
  $("send").disabled = $("start-race").disabled = true;
  $("stop").disabled = false;
  try {
    await work(running.signal);
  } catch (error) {
    $("problem").textContent = error.message;
  } finally {
    running = null;
    $("send").disabled = $("start-race").disabled = false;
    $("stop").disabled = true;
    $("prompt").focus();
  }
}

// Takes the question from its box; after a failure it is there again.
const asking = (work) => exclusively(async (signal) => {
  const question = $("prompt").value.trim();
  if (!question) return;
  $("prompt").value = "";
  try {
    await work(question, signal);
  } catch (error) {
    $("prompt").value ||= question;
    throw error;
  }
});

const send = () => asking(async (question, signal) => {
  const body = bodyFor(question);
  const conversation = messages; // another one may have begun when the answer is there
  const asked = bubble("user", question);
  const answer = bubble("assistant", "");
  const tally = await stream(body, ...answer, signal).catch((error) => {
    if (!answer[0].textContent) for (const [paragraph] of [asked, answer]) paragraph.parentElement.remove();
    throw error;
  });
  conversation.push({ role: "user", content: question }, { role: "assistant", content: tally.text });
});

// One after the other, because side by side each would slow the other down.
const race = () => asking(async (question, signal) => {
  const body = bodyFor(question);
  $("race").hidden = false;
  $("race-question").textContent = question;
  $("race-name").textContent = body.method;
  for (const id of ["race-method", "race-vanilla", "race-method-figures", "race-vanilla-figures", "verdict"]) {
    $(id).replaceChildren();
  }
  $("race").scrollIntoView({ block: "nearest", behavior: "smooth" });
  const ours = await stream(body, $("race-method"), $("race-method-figures"), signal);
  if (signal.aborted) return;
  const vanilla = await stream({ ...body, method: "vanilla" }, $("race-vanilla"), $("race-vanilla-figures"), signal);
  if (signal.aborted) return;
  const ratio = vanilla.speed ? (ours.speed / vanilla.speed).toFixed(2) : "–";
  const same = ours.text === vanilla.text ? "the same words" : "other words";
  showStrip(ours);
  $("verdict").textContent = `${body.method} is ${ratio} times as fast as vanilla, with ${same}.`;
});

function showDocument() {
  const size = $("document").value.length;
  $("document-size").textContent = size ? `(${size.toLocaleString()} characters)` : "";
  if (!size) $("reuse").textContent = "";
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (event.ctrlKey || event.metaKey) race();
  else send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("start-race").addEventListener("click", race);
$("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  $("log").replaceChildren();
  $("race").hidden = true;
  $("prompt").focus();
});
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  if (file) $("document").value = await file.text();
  showDocument();
});
$("document").addEventListener("input", showDocument);
$("forget").addEventListener("click", () => {
  $("document").value = $("file").value = "";
  showDocument();
});
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
});
const reconnect = () => connect().then(
  () => { $("problem").textContent = ""; },
  (error) => { $("problem").textContent = error.message; },
);
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  reconnect();
});
reconnect();
