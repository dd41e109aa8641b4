// Requests to the control plane. The token, if the server wants one, lives in this tab's sessionStorage only.

const TOKEN = "tidemill-token";

/** An answer that is a problem (RFC 9457), or no answer: message says what to do. status 0: no answer. */
export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** The error of a request that was refused; any other error is thrown on. */
export function refused(error) {
  if (error instanceof Refused) return error;
  throw error;
}

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => sessionStorage.setItem(TOKEN, value),
  forget: () => sessionStorage.removeItem(TOKEN),
};

// The link that `tidemill up` prints has the token in its fragment, which is sent to no server. It leaves the address.
function takeFromAddress() {
  if (!location.hash.startsWith("#token=")) return false;
  token.set(decodeURIComponent(location.hash.slice("#token=".length)));
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}
takeFromAddress();
window.addEventListener("hashchange", () => takeFromAddress() && location.reload());

export function headers(extra = {}) {
  const given = token.get();
  return { "X-Tidemill-By": "dashboard", ...(given ? { Authorization: `Bearer ${given}` } : {}), ...extra };
}

async function problem(response) {
  try {
    return (await response.json()).detail ?? response.statusText;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

/** One request; its JSON. Refused when the server refuses or does not answer. */
export async function ask(method, path, body) {
  let response;
  try {
    response = await fetch(path, {
      method,
      headers: headers(body === undefined ? {} : { "Content-Type": "application/json" }),
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: AbortSignal.timeout(15000),
    });
  } catch (error) {
    throw new Refused(0, error.name === "TimeoutError" ? "no answer within 15 s" : "the control plane does not answer");
  }
  if (!response.ok) throw new Refused(response.status, await problem(response));
  try {
    return await response.json();
  } catch (error) {
    // The rest of a long answer may be late, too.
    if (error.name !== "TimeoutError" && error.name !== "AbortError") throw error;
    throw new Refused(0, "no whole answer within 15 s");
  }
}

/** A file, however long it takes to come; the browser keeps a large one on its disk. */
export async function download(path) {
  try {
    const response = await fetch(path, { headers: headers() });
    if (!response.ok) throw new Refused(response.status, await problem(response));
    return await response.blob();
  } catch (error) {
    throw error instanceof Refused ? error : new Refused(0, "the connection broke");
  }
}

export const read = (path) => ask("GET", path);
