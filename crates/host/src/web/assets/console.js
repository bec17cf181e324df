"use strict";
/* A console of a machine in xterm.js. What a guest prints is not trusted:
   - nothing that it prints is answered, so a guest (or its old output) types nothing;
   - it makes no links (OSC 8), reaches no clipboard (OSC 52), changes no title and no colours of the page.

   xterm.js makes style elements and style attributes. The content security policy allows the first with the page's nonce,
   and the second only through the object model. */
(() => {
  const nonce = document.getElementById("style").nonce;
  const create = document.createElement.bind(document);
  document.createElement = (name, options) => {
    const element = create(name, options);
    if (String(name).toLowerCase() === "style") element.nonce = nonce;
    return element;
  };
  const set = Element.prototype.setAttribute;
  Element.prototype.setAttribute = function (name, value) {
    if (name === "style" && this.style) this.style.cssText = value;
    else set.call(this, name, value);
  };
})();

class MachineConsole {
  constructor(box, machine, tell) {
    this.machine = machine;
    this.tell = tell;
    this.stop = new AbortController();
    this.typed = "";
    this.term = new Terminal({
      convertEol: true,
      scrollback: 5000,
      screenReaderMode: true,
      fontFamily: "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace",
      fontSize: 14,
      linkHandler: { activate() {}, allowNonHttpProtocols: false },
      theme: { background: "#10161d", foreground: "#dbe4ec", cursor: "#5eead4" },
    });
    this.fitter = new FitAddon.FitAddon();
    this.term.loadAddon(this.fitter);
    this.silence();
    this.term.open(box);
    this.term.textarea.setAttribute("aria-label", `Console of ${machine}`);
    this.term.textarea.setAttribute("aria-describedby", "terminal-hint");
    this.term.attachCustomKeyEventHandler((event) => {
      if (event.key === "F6" && event.ctrlKey && event.shiftKey) {
        if (event.type === "keydown") document.getElementById("terminal-close").focus();
        event.preventDefault();
        return false;
      }
      return true;
    });
    this.term.onData((text) => this.type(text));
    this.resized = new ResizeObserver(() => this.fitter.fit());
    this.resized.observe(box);
    this.fitter.fit();
    this.follow();
  }

  /* Takes from the terminal what it would answer, link or hand on. */
  silence() {
    const parser = this.term.parser;
    const taken = () => true;
    for (const id of [
      { final: "c" }, { prefix: ">", final: "c" }, { prefix: "=", final: "c" },
      { final: "n" }, { prefix: "?", final: "n" }, { prefix: ">", final: "q" },
      { intermediates: "$", final: "p" }, { prefix: "?", intermediates: "$", final: "p" },
      { final: "t" }, { prefix: "?", final: "u" },
    ]) parser.registerCsiHandler(id, taken);
    parser.registerDcsHandler({ intermediates: "$", final: "q" }, taken);
    parser.registerDcsHandler({ intermediates: "+", final: "q" }, taken);
    parser.registerEscHandler({ final: "Z" }, taken);
    for (const number of [0, 1, 2, 4, 5, 7, 8, 9, 10, 11, 12, 50, 52, 104, 110, 111, 112, 777, 1337]) {
      parser.registerOscHandler(number, taken);
    }
  }

  /* Shows all that it printed, and what it prints, at the terminal's pace. */
  async follow() {
    while (!this.stop.signal.aborted) {
      try {
        this.tell("connecting");
        const answer = await fetch(`/api/console?machine=${encodeURIComponent(this.machine)}`, { signal: this.stop.signal });
        if (!answer.ok) throw new Error((await answer.json()).error);
        this.tell("connected");
        this.term.reset();
        const reader = answer.body.getReader();
        for (;;) {
          const { done, value } = await reader.read();
          if (done) break;
          await new Promise((written) => this.term.write(value, written));
        }
        this.tell("the machine has ended; waiting for its next start");
      } catch (error) {
        if (this.stop.signal.aborted) return;
        this.tell(`not connected: ${error.message}`);
      }
      await new Promise((later) => setTimeout(later, 1500));
      await this.started();
    }
  }

  /* Waits until the machine runs: an ended console would be told again and again. */
  async started() {
    while (!this.stop.signal.aborted) {
      const machine = (App.status?.machines ?? []).find((one) => one.name === this.machine);
      if (!machine || ["running", "starting"].includes(machine.state)) return;
      await new Promise((later) => setTimeout(later, 500));
    }
  }

  /* Sends keys in their order, one request at a time; what is typed meanwhile goes with the next. */
  async type(text) {
    this.typed = (this.typed + text).slice(-65536);
    if (this.sending) return;
    this.sending = true;
    while (this.typed && !this.stop.signal.aborted) {
      const piece = this.typed.slice(0, 8192);
      this.typed = this.typed.slice(piece.length);
      try {
        const answer = await fetch(`/api/console?machine=${encodeURIComponent(this.machine)}`, {
          method: "POST", body: piece, headers: { "Content-Type": "text/plain" }, signal: this.stop.signal,
        });
        if (!answer.ok) this.tell(`not typed: ${(await answer.json()).error}`);
      } catch (error) {
        if (!this.stop.signal.aborted) this.tell(`not typed: ${error.message}`);
      }
    }
    this.sending = false;
  }

  close() {
    this.stop.abort();
    this.resized.disconnect();
    this.term.dispose();
  }
}
