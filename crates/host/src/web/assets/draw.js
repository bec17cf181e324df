"use strict";
/* Networks as drawings: the segment as a line, above it the fabric's own ports, below it the members. The drawing is made again only when
   members come or go; rates and states are changed in place. The same is in the table of ports, for those who do not see it. */

const SVG = "http://www.w3.org/2000/svg";
const CARD_W = 176, CARD_H = 92, GAP = 20, TOP = 10, BUS_H = 22, STEM = 34;

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const clip = (text, most) => { const shown = [...visible(text)]; return shown.length > most ? `${shown.slice(0, most - 1).join("")}…` : shown.join(""); };

function card(port, status, x, y, stem) {
  const machine = status.machines.find((m) => m.name === port.name);
  const address = machine?.addresses[port.network] ?? port.guard.find((a) => /^\d+\./.test(a)) ?? "";
  const text = (cls, dx, dy, value) => { const t = svg("text", { class: cls, x: x + dx, y: y + dy }); t.textContent = value; return t; };
  const group = svg("a", { class: "card-link", href: `#ports/${encodeURIComponent(port.name)}` });
  const title = svg("title");
  const line = svg("path", { class: "spark" });
  const parts = { rx: text("rate", 12, 62, ""), tx: text("rate", 12, 80, ""), dot: svg("circle", { class: "dot", cx: x + CARD_W - 15, cy: y + 17, r: 4.5 }), title, line, x, y };
  const stemLine = svg("path", { class: "stem", d: stem });
  group.append(title, stemLine,
    svg("rect", { class: "node", x, y, width: CARD_W, height: CARD_H, rx: 10 }), parts.dot,
    text("name", 12, 22, clip(port.name, 17)), text("sub", 12, 40, clip([machine ? machine.kind : port.kind, address].filter(Boolean).join(" · "), 25)), parts.rx, parts.tx, line);
  group.parts = parts;
  parts.stem = stemLine;
  return group;
}

function drawNetwork(network, status, width) {
  const ports = status.ports.filter((port) => port.network === network.name);
  const own = ports.filter((p) => ["gateway", "passt", "uplink", "user", "kernel"].includes(p.kind) || p.name.startsWith("gateway") || p.name.startsWith("uplink"));
  const members = ports.filter((p) => !own.includes(p));
  const columns = Math.max(1, Math.floor((width - GAP) / (CARD_W + GAP)));
  const rows = Math.ceil(members.length / columns);
  const upper = own.length ? CARD_H + STEM : 0;
  const busY = TOP + upper;
  const height = busY + BUS_H + (rows ? rows * (CARD_H + STEM) : 20) + 8;
  const inner = width;
  // Rows are in the middle, the last one as the others.
  const left = (count) => (inner - Math.min(columns, Math.max(count, 1)) * (CARD_W + GAP) + GAP) / 2;
  const picture = svg("svg", { viewBox: `0 0 ${inner} ${height}`, width: inner, height, role: "group", "aria-label": `Drawing of ${network.name}` });
  const cards = new Map();
  const add = (port, x, y, stem) => { const made = card(port, status, x, y, stem); cards.set(port.name, made.parts); picture.append(made); };
  own.slice(0, columns).forEach((port, at) => { const x = left(own.length) + at * (CARD_W + GAP); add(port, x, TOP, `M${x + CARD_W / 2} ${TOP + CARD_H}V${busY}`); });
  members.forEach((port, at) => {
    const x = left(members.length) + (at % columns) * (CARD_W + GAP), row = Math.floor(at / columns), y = busY + BUS_H + STEM + row * (CARD_H + STEM);
    const lane = x - GAP / 2;
    add(port, x, y, row === 0 ? `M${x + CARD_W / 2} ${busY + BUS_H}V${y}` : `M${lane} ${busY + BUS_H}V${y - STEM / 2}H${x + CARD_W / 2}V${y}`);
  });
  const bus = svg("rect", { class: "bus", x: GAP / 2, y: busY, width: inner - GAP, height: BUS_H, rx: BUS_H / 2 });
  const label = svg("text", { class: "bus-label", x: inner / 2, y: busY + BUS_H / 2 + 4.5, "text-anchor": "middle" });
  picture.append(bus, label);
  return { picture, cards, label };
}

function spark(values, x, y) {
  const w = 66, h = 26, most = Math.max(1, ...values);
  if (values.length < 2) return "";
  return values.map((value, at) => `${at ? "L" : "M"}${(x + CARD_W - 12 - w + at * w / (values.length - 1)).toFixed(1)} ${(y + CARD_H - 12 - h * value / most).toFixed(1)}`).join("");
}

const Drawn = new Map();

function drawNetworks(box, status, rates, history) {
  const width = Math.max(320, box.clientWidth - 34);
  for (const name of Drawn.keys()) if (!status.networks.some((n) => n.name === name)) { Drawn.get(name).article.remove(); Drawn.delete(name); }
  status.networks.forEach((network, at) => {
    const ports = status.ports.filter((port) => port.network === network.name);
    const shape = JSON.stringify([width, ports.map((p) => [p.name, p.kind]), status.machines.map((m) => [m.name, m.addresses])]);
    let known = Drawn.get(network.name);
    if (!known) {
      const id = `net-${at}-${Math.random().toString(36).slice(2)}`;
      const facts = el("p", { class: "hint" }), fault = el("p", { class: "warning", hidden: "" }), frame = el("div", { class: "scroll drawing" });
      const article = el("article", { class: "card", "aria-labelledby": id }, el("h3", { id }, network.name), facts, fault, frame);
      known = { article, facts, fault, frame };
      Drawn.set(network.name, known);
      box.append(article);
    }
    if (known.shape !== shape) {
      const focused = known.frame.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      Object.assign(known, drawNetwork(network, status, width), { shape });
      known.frame.replaceChildren(known.picture);
      if (focused) [...known.picture.querySelectorAll("a")].find((a) => a.getAttribute("href") === focused)?.focus();
    }
    const facts = visible([network.subnet, network.gateway ? `gateway ${network.gateway}` : "no gateway", `uplink ${network.uplink}`, `domain ${network.domain}`, `MTU ${network.mtu}`,
      `${network.leases.length} leases`, `${whole(network.flooded_unknown)} frames flooded`].join(" · "));
    if (known.facts.textContent !== facts) known.facts.textContent = facts;
    known.fault.textContent = visible(network.uplink_fault ? `The uplink does not work: ${network.uplink_fault}` : "");
    known.fault.hidden = !network.uplink_fault;
    let total = 0;
    for (const port of ports) {
      const parts = known.cards.get(port.name), rate = rates.get(port.name);
      if (!parts || !rate) continue;
      total += rate.rxBits;
      parts.dot.setAttribute("class", port.up ? "dot up" : "dot");
      parts.stem.setAttribute("class", rate.rx + rate.tx > 0 ? "stem busy" : "stem");
      parts.rx.textContent = `↑ ${short(rate.rxBits, "bit/s")}`;
      parts.tx.textContent = `↓ ${short(rate.txBits, "bit/s")}`;
      parts.line.setAttribute("d", spark(history.get(port.name) ?? [], parts.x, parts.y));
      parts.title.textContent = visible(`${port.name}, ${port.kind}, ${port.up ? "up" : "down"}: sends ${short(rate.rxBits, "bit/s")} and ${short(rate.rx)} frames/s, receives ${short(rate.txBits, "bit/s")} and ${short(rate.tx)} frames/s, ${whole(drops(port))} drops`);
    }
    known.label.textContent = visible(`${network.name} · ${short(total, "bit/s")}`);
  });
}
