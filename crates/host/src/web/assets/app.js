"use strict";
/* The page. It asks its server once a second, and shows what it hears as text: names, events and errors come from guests and are
   never made into HTML (the content security policy refuses that too). */

const PERIOD_MS = 1000;
const EVENTS_KEPT = 500;
const HISTORY = 60;

const App = { status: null, before: null, rates: new Map(), history: new Map(), events: [], lastEvent: null, port: null, console: null };
const $ = (id) => document.getElementById(id);

/* An element with attributes and children; texts are texts. */
function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(key, value);
  element.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(visible(child)))));
  return element;
}

/* What a guest says may have characters that turn or hide other text. */
function visible(text) {
  return String(text ?? "").replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/gu,
    (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`).slice(0, 2000);
}

const short = (value, unit = "") => {
  const steps = ["", " k", " M", " G", " T"];
  let at = 0;
  while (Math.abs(value) >= 1000 && at < steps.length - 1) { value /= 1000; at++; }
  const digits = at === 0 ? (Number.isInteger(value) ? 0 : 1) : value < 10 ? 2 : value < 100 ? 1 : 0;
  return `${value.toFixed(digits)}${steps[at] || (unit ? " " : "")}${unit}`;
};
const whole = (value) => Number(value ?? 0).toLocaleString("en");
const span = (s) => s == null ? "–" : s < 60 ? `${Math.floor(s)} s` : s < 3600 ? `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`
  : s < 86400 ? `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min` : `${Math.floor(s / 86400)} d ${Math.floor(s % 86400 / 3600)} h`;
const time = (ns) => ns < 1e3 ? `${ns} ns` : ns < 1e6 ? `${(ns / 1e3).toFixed(1)} µs` : ns < 1e9 ? `${(ns / 1e6).toFixed(2)} ms` : `${(ns / 1e9).toFixed(2)} s`;
const sum = (map) => Object.values(map ?? {}).reduce((a, b) => a + b, 0);
const drops = (port) => sum(port.counters.rx_drops) + sum(port.counters.tx_drops);

/* Puts rows into a table, each an object of `key` and `cells`. Rows and cells that did not change are left alone, so that focus,
   selection and a screen reader's place stay. */
function fill(table, rows, none) {
  const body = table.tBodies[0];
  const columns = table.tHead.rows[0].cells;
  const old = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  if (!rows.length) rows = [{ key: "\0none", cells: [none], wide: true }];
  rows.forEach((wanted, at) => {
    const key = String(wanted.key);
    let row = old.get(key);
    old.delete(key);
    if (!row) { row = document.createElement("tr"); row.dataset.key = key; }
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] ?? null);
    row.className = wanted.tone ?? "";
    wanted.cells.forEach((value, column) => {
      let cell = row.cells[column];
      if (!cell) {
        cell = document.createElement(column === 0 && !wanted.wide ? "th" : "td");
        if (column === 0 && !wanted.wide) cell.scope = "row";
        if (wanted.wide) { cell.colSpan = columns.length; cell.className = "none"; }
        else if (columns[column].classList.contains("n")) cell.className = "n";
        row.append(cell);
      }
      if (typeof value === "function") { if (!cell.firstChild) cell.append(value()); return; }
      if (value instanceof Node) { cell.replaceChildren(value); return; }
      const text = visible(value);
      if (cell.textContent !== text) cell.textContent = text;
    });
  });
  for (const row of old.values()) row.remove();
}

function state(good, text) {
  return el("span", { class: good ? "state good" : "state bad" }, text);
}

async function ask(path, options) {
  const answer = await fetch(path, { cache: "no-store", credentials: "same-origin", ...options });
  if (answer.status === 401) { locked(); throw new Error("no session"); }
  const body = answer.status === 204 ? null : await answer.json();
  if (!answer.ok) throw new Error([body.error, body.hint].filter(Boolean).join("; "));
  return body;
}

function locked(why) {
  App.open = false;
  $("shell").hidden = true;
  $("close").hidden = true;
  $("gate").hidden = false;
  $("fabric").textContent = "No session";
  $("facts").textContent = "";
  document.title = "Tombolo";
  if (why) $("gate-text").textContent = why;
  App.console?.close();
  App.console = null;
}

function trouble(text) {
  const box = $("fault");
  if (box.textContent !== (text ?? "")) box.textContent = visible(text);
  box.hidden = !text;
}

/* ---- rates */

function measure(status) {
  const before = App.status;
  const seconds = before ? status.uptime_s - before.uptime_s : 0;
  // An answer that is kept for several pages may be the same again.
  if (before && seconds === 0 && before.pid === status.pid) return false;
  const old = new Map((before?.ports ?? []).map((port) => [port.name, port.counters]));
  const rates = new Map();
  for (const port of status.ports) {
    const was = old.get(port.name), now = port.counters;
    const rate = (key) => (was && seconds > 0 && now[key] >= was[key] ? (now[key] - was[key]) / seconds : 0);
    const found = { rx: rate("rx_frames"), rxBits: 8 * rate("rx_bytes"), tx: rate("tx_frames"), txBits: 8 * rate("tx_bytes") };
    rates.set(port.name, found);
    const line = App.history.get(port.name) ?? [];
    if (was) line.push(found.rxBits + found.txBits);
    App.history.set(port.name, line.slice(-HISTORY));
  }
  for (const name of App.history.keys()) if (!rates.has(name)) App.history.delete(name);
  App.rates = rates;
  App.status = status;
  return true;
}

/* ---- views */

function showHead(status) {
  const title = `${status.name} · Tombolo`;
  if (document.title !== title) document.title = title;
  $("fabric").textContent = visible(status.name);
  $("facts").textContent = visible(`up ${span(status.uptime_s)} · ${status.machines.filter((m) => m.state === "running").length} of ${status.machines.length} machines run · ${status.ports.length} ports · Tombolo ${status.version}`);
  const list = $("warnings");
  const text = status.warnings.join("\n");
  if (list.dataset.text !== text) {
    list.dataset.text = text;
    list.replaceChildren(...status.warnings.map((warning) => el("p", { class: "warning" }, warning)));
  }
}

function showPorts(status) {
  fill($("port-table"), status.ports.map((port) => {
    const rate = App.rates.get(port.name) ?? { rx: 0, rxBits: 0, tx: 0, txBits: 0 }, lost = drops(port);
    return {
      key: port.name,
      tone: port.name === App.port ? "chosen" : "",
      cells: [
        () => el("a", { href: `#ports/${encodeURIComponent(port.name)}` }, port.name),
        port.network, port.kind, state(port.up, port.up ? "up" : "down"),
        short(rate.rx), short(rate.rxBits), short(rate.tx), short(rate.txBits), whole(lost), whole(port.counters.faults),
      ],
    };
  }), "no ports");
  const port = status.ports.find((one) => one.name === App.port);
  $("port-detail").hidden = !port;
  if (!port) return;
  const c = port.counters;
  $("port-name").textContent = visible(port.name);
  $("port-facts").textContent = visible([
    `${port.kind} on ${port.network}`, port.offloads.length ? `offloads ${port.offloads.join(", ")}` : "no offloads",
    port.guard.length ? `may use ${port.guard.join(", ")}` : "any source address", port.last_fault ? `last fault: ${port.last_fault}` : "",
  ].filter(Boolean).join(" · "));
  fill($("port-counters"), [
    ["Frames from it", c.rx_frames], ["Bytes from it", c.rx_bytes], ["Frames to it", c.tx_frames], ["Bytes to it", c.tx_bytes],
    ["Waited for a buffer", c.queued_frames], ["Wake-ups", c.wakeups], ["Late wake-ups", c.late_wakeups], ["Late signals", c.late_signals],
    ["Turns", c.turns], ["Exhausted budgets", c.exhausted_budgets], ["Checksums in software", c.software_checksums],
    ["Segments in software", c.software_segments], ["Merged segments", c.software_merged], ["Captured", c.captured], ["Lost by captures", c.capture_lost],
    ["Faults", c.faults], ["Restarts", c.restarts], ["MAC addresses behind it", port.macs],
  ].map(([name, value]) => ({ key: name, cells: [name, whole(value)] })), "");
  fill($("port-drops"), [[c.rx_drops, "from it"], [c.tx_drops, "to it"]].flatMap(([map, way]) =>
    Object.entries(map).filter(([, n]) => n > 0).map(([reason, n]) => ({ key: `${way} ${reason}`, cells: [reason, way, whole(n)] }))),
  "nothing was dropped");
  const turns = c.frames_per_turn, most = Math.max(1, ...turns), all = Math.max(1, turns.reduce((a, b) => a + b, 0));
  fill($("port-turns"), turns.map((n, i) => ({
    key: i,
    cells: [i < 2 ? String(i) : `${2 ** (i - 1)} – ${2 ** i - 1}`, bar(n / most, `${(100 * n / all).toFixed(1)} %`), whole(n)],
  })).filter((row, i) => turns[i] > 0), "no turns yet");
}

/* A bar with its figure as text. */
function bar(part, text) {
  const fillOf = el("span", { class: "fill" });
  fillOf.style.width = `${Math.round(100 * Math.min(1, Math.max(0, part)))}%`;
  return el("span", { class: "barbox" }, el("span", { class: "track", "aria-hidden": "true" }, fillOf), el("span", { class: "figure" }, text));
}

function showMachines(status) {
  fill($("machine-table"), status.machines.map((m) => ({
    key: m.name,
    cells: [
      m.name, `${m.kind}, ${m.accel}`,
      state(m.state === "running", m.restart_in_s != null ? `${m.state}, again in ${span(m.restart_in_s)}` : m.state),
      Object.entries(m.addresses).map(([network, ip]) => `${ip} (${network})`).join(", ") || "–", span(m.uptime_s), whole(m.restarts),
      () => {
        const button = el("button", { type: "button", class: "small" }, "Open", el("span", { class: "hidden" }, ` console of ${m.name}`));
        button.addEventListener("click", () => { location.hash = `#consoles/${encodeURIComponent(m.name)}`; openConsole(m.name); });
        return button;
      },
    ],
  })), "no machines");
}

function openConsole(name) {
  if (App.console?.machine === name) { App.console.term.focus(); return; }
  closeConsole();
  $("terminal-box").hidden = false;
  $("terminal-name").textContent = visible(name);
  App.console = new MachineConsole($("terminal"), name, (text) => { $("terminal-state").textContent = visible(text); });
  App.console.term.focus();
}

function closeConsole() {
  App.console?.close();
  App.console = null;
  $("terminal").replaceChildren();
  $("terminal-box").hidden = true;
}

function showAddresses(status) {
  fill($("lease-table"), status.networks.flatMap((n) => n.leases.map((l) => ({
    key: `${n.name} ${l.ip}`,
    cells: [l.ip, l.name ? `${l.name}.${n.domain}` : "–", l.mac, n.name, l.expires_s != null ? `in ${span(l.expires_s)}` : l.fixed ? "fixed" : "never"],
  }))), "no leases yet");
}

async function showTables() {
  const tables = await ask("/api/tables");
  fill($("neighbour-table"), tables.neighbours.map((n) => ({
    key: `${n.network} ${n.ip} ${n.source}`, cells: [n.ip, n.name ?? "–", n.mac ?? "–", n.port ?? "–", n.network, n.source],
  })), "no neighbours yet");
  fill($("mac-table"), tables.macs.slice(0, 1000).map((m) => ({
    key: `${m.network} ${m.mac} ${m.vlan}`, cells: [m.mac, m.port, m.vlan ? `${m.network}, VLAN ${m.vlan}` : m.network, m.age_ms == null ? "pinned" : span(m.age_ms / 1000)],
  })), "no addresses learned yet");
}

function showForwards(status) {
  fill($("forward-table"), status.forwards.map((f) => ({
    key: `${f.proto} ${f.listen}`, cells: [f.listen, f.proto, f.to, f.address, state(!f.fault, f.fault ?? "works")],
  })), "no forwards; [[forward]] in the fabric file makes one");
}

async function showServices() {
  const services = await ask("/api/services");
  const now = performance.now();
  const known = App.services ?? {};
  App.services = {};
  fill($("service-table"), Object.entries(services).map(([name, r]) => {
    if (!r) return { key: name, cells: [name, "–", "–", "–", "–", "–", state(false, "gives no report"), "–", "–", "–"] };
    const a = r.answers, missed = a.late + a.overran + a.expired, met = Math.max(0, a.served - a.overran);
    const was = known[name];
    App.services[name] = { served: a.served, at: now, rate: was?.rate ?? 0 };
    if (was && now - was.at < 500) App.services[name] = was;
    else if (was) App.services[name].rate = Math.max(0, (a.served - was.served) / ((now - was.at) / 1000));
    const share = met + missed ? met / (met + missed) : 1;
    const refused = a.refused_queue_full + a.refused_admission + a.refused_memory + a.refused_reply_memory + a.refused_stopping;
    return { key: name, cells: [name, whole(r.clients), whole(r.pending), short(App.services[name].rate), whole(met), whole(missed),
      met + missed ? bar(share, `${(Math.floor(share * 1e5) / 1e3).toFixed(share === 1 ? 0 : share > 0.99 ? 3 : 1)} %`) : "no calls yet", whole(refused),
      time(r.queued.p99_ns), time(r.service.p99_ns)] };
  }), "no services run");
}

async function newEvents() {
  const first = App.lastEvent == null;
  for (let pages = 0; pages < 50; pages++) {
    const answer = await ask(`/api/events${App.lastEvent == null ? "" : `?after=${App.lastEvent}`}`);
    if (!answer.events.length) { App.lastEvent ??= answer.last; break; }
    App.lastEvent = answer.events.at(-1).id;
    App.events.push(...answer.events);
    App.events = App.events.slice(-EVENTS_KEPT);
    if (!first && $("event-say").checked) $("event-live").textContent = visible(answer.events.slice(-3).map((e) => e.text).join(". "));
    if (App.lastEvent >= answer.last) break;
  }
}

function showEvents() {
  fill($("event-table"), App.events.toReversed().map((e) => ({
    key: e.id,
    cells: [new Date(e.unix_ms).toLocaleString("sv"), el("span", { class: `state ${["death", "fault"].includes(e.kind) ? "bad" : ["up", "start", "port-up"].includes(e.kind) ? "good" : "neutral"}` }, e.kind), e.text + (e.cause ? `: ${e.cause}` : "")],
  })), "nothing has happened yet");
}

/* ---- captures */

function showChoices(status) {
  const select = $("capture-of");
  const wanted = [...status.networks.map((n) => ["networks", n.name]), ...status.ports.map((p) => ["ports", p.name])];
  const text = JSON.stringify(wanted);
  if (select.dataset.text === text) return;
  select.dataset.text = text;
  const chosen = select.value;
  const group = (kind, label) => el("optgroup", { label }, ...wanted.filter(([k]) => k === kind).map(([, name]) => el("option", { value: `${kind}/${name}` }, name)));
  select.replaceChildren(group("networks", "Networks"), group("ports", "Ports"));
  if ([...select.options].some((option) => option.value === chosen)) select.value = chosen;
}

async function showCaptures() {
  fill($("capture-table"), (await ask("/api/captures")).map((c) => ({
    key: c.id,
    cells: [c.of, span(c.seconds), whole(c.frames), short(c.bytes, "B"), () => {
      const button = el("button", { type: "button", class: "small" }, "Stop and keep", el("span", { class: "hidden" }, ` the capture of ${c.of}`));
      button.addEventListener("click", () => ask(`/api/capture/stop?id=${c.id}`, { method: "POST" }).catch((error) => { $("capture-told").textContent = visible(error.message); }));
      return button;
    }],
  })), "no captures");
}

async function startCapture(event) {
  event.preventDefault();
  const [kind, name] = $("capture-of").value.split("/");
  const id = [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  const words = new URLSearchParams({ id, kind, name, seconds: $("capture-seconds").value, filter: $("capture-filter").value.trim() });
  const told = (text) => { $("capture-told").textContent = visible(text); };
  try {
    // What is wrong with it is told before a download begins.
    await ask(`/api/capture?${words}`, { method: "POST" });
    el("a", { href: `/api/capture?id=${id}`, download: "" }).click();
    told(`Capturing ${name}; the browser saves ${name}.pcapng.`);
  } catch (error) { told(`No capture: ${error.message}`); }
}

/* ---- the loop */

const VIEWS = [...document.querySelectorAll("[data-view]")].map((section) => section.dataset.view);

function view() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  let argument = rest.join("/");
  try { argument = decodeURIComponent(argument); } catch { argument = ""; }
  return [VIEWS.includes(name) ? name : "networks", argument];
}

function navigate(focus) {
  const [name, argument] = view();
  for (const section of document.querySelectorAll("[data-view]")) section.hidden = section.dataset.view !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  App.port = name === "ports" ? argument : null;
  if (name !== "consoles") closeConsole();
  else if (argument && App.console?.machine !== argument && App.status?.machines.some((m) => m.name === argument)) openConsole(argument);
  show();
  if (!focus || (name === "consoles" && argument)) return;
  (App.port ? $("port-name") : $(`t-${name}`)).focus();
}

function show() {
  const status = App.status;
  if (!status) return;
  showHead(status);
  const [name] = view();
  if (name === "networks") drawNetworks($("drawings"), status, App.rates, App.history);
  if (name === "ports") showPorts(status);
  if (name === "consoles") showMachines(status);
  if (name === "addresses") showAddresses(status);
  if (name === "forwards") showForwards(status);
  if (name === "captures") showChoices(status);
  if (name === "events") showEvents();
}

async function turn() {
  const status = await ask("/api/status");
  const first = !App.status;
  measure(status);
  await newEvents();
  const [name] = view();
  if (name === "addresses") await showTables();
  if (name === "captures") await showCaptures();
  if (name === "services") await showServices();
  if (!App.open) {
    App.open = true;
    $("gate").hidden = true;
    $("shell").hidden = false;
    $("close").hidden = false;
  }
  if (first) navigate(false); else show();
  trouble(null);
}

async function run() {
  const token = /^#token=([0-9a-f]{64})$/.exec(location.hash)?.[1];
  if (token) {
    history.replaceState(null, "", "/");
    try { await ask("/session", { method: "POST", body: token }); } catch (error) { locked(`This link does not work: ${error.message}. Press Enter in the terminal for another one.`); }
  }
  for (;;) {
    if (!document.hidden && (App.open !== false)) {
      try { await turn(); } catch (error) { if (App.open) trouble(error.message); else if (App.open === undefined) locked(error.message); }
    }
    await new Promise((later) => setTimeout(later, PERIOD_MS));
  }
}

addEventListener("hashchange", () => { if (/^#token=/.test(location.hash)) location.reload(); else navigate(true); });
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); $("content").focus(); });
$("capture-form").addEventListener("submit", startCapture);
$("terminal-close").addEventListener("click", () => { const name = App.console?.machine; closeConsole(); location.hash = "#consoles"; [...$("machine-table").tBodies[0].rows].find((row) => row.dataset.key === name)?.querySelector("button")?.focus(); });
$("close").addEventListener("click", async () => { try { await ask("/session/close", { method: "POST" }); } catch { /* It is over either way. */ } locked("The session has ended. Press Enter in the terminal for another link."); });
run();
