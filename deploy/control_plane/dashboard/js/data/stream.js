// Server-sent events through fetch, because EventSource can't send a token. Reconnects by itself, with the id of the
// last event, and says at every moment whether it is connected.

import { headers } from "./api.js";

const SILENCE_MS = 25000;
const WAITS_MS = [500, 1000, 2000, 4000, 8000];

/** Split what has arrived into events and the rest that is not complete. */
export function parse(text) {
  const parts = text.split("\n\n");
  const rest = parts.pop();
  const events = parts.map((part) => {
    const event = { id: "", name: "message", data: "" };
    for (const line of part.split("\n")) {
      const at = line.indexOf(": ");
      const value = line.slice(at + 2);
      if (line.startsWith("event")) event.name = value;
      else if (line.startsWith("data")) event.data += value;
      else if (line.startsWith("id")) event.id = value;
    }
    return event;
  });
  return { events: events.filter((event) => event.data), rest };
}

/**
 * Follow the run for ever. onEvent(name, data), onLink(state, detail) with state live, lost or refused;
 * after a refusal (status 401) it waits for `retry()`.
 */
export function follow(path, { onEvent, onLink, lastId = "" }) {
  let failures = 0;
  let wake = null;
  const nap = (ms) => new Promise((resolve) => {
    wake = resolve;
    if (ms !== null) setTimeout(resolve, ms);
  });

  async function once() {
    const stop = new AbortController();
    let watchdog = setTimeout(() => stop.abort(), SILENCE_MS);
    try {
      const response = await fetch(path, {
        headers: headers(lastId ? { "Last-Event-ID": lastId } : {}),
        signal: stop.signal,
        cache: "no-store",
      });
      if (!response.ok) return response.status;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      onLink("live");
      failures = 0;
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return 0;
        clearTimeout(watchdog);
        watchdog = setTimeout(() => stop.abort(), SILENCE_MS);
        const { events, rest } = parse(text + value);
        text = rest;
        for (const event of events) {
          if (event.id) lastId = event.id;
          onEvent(event.name, JSON.parse(event.data));
        }
      }
    } catch (error) {
      if (error instanceof SyntaxError) throw error;
      return 0; // The network, or the watchdog.
    } finally {
      clearTimeout(watchdog);
      stop.abort();
    }
  }

  (async () => {
    for (;;) {
      const status = await once();
      if (status === 401) {
        onLink("refused");
        await nap(null);
        continue;
      }
      const wait = WAITS_MS[Math.min(failures++, WAITS_MS.length - 1)];
      onLink("lost", { wait });
      await nap(wait);
    }
  })();

  return { retry: () => wake?.() };
}
